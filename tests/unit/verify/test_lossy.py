"""Lossy rules: what each test lets pass, and how the walk uses it.

Shapes:  V = vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch

from outrider.core.draft import Draft
from outrider.core.protocols import VerifyRow
from outrider.core.rng import KeyedRng
from outrider.core.sampling import Distributions
from outrider.verify.rules import (
    Candidate,
    LossyRule,
    above,
    among_top,
    in_nucleus,
    rule_for,
    typical,
)

DISTRIBUTION = (0.1, 0.4, 0.1, 0.3, 0.1, 0.0)
NOISE = KeyedRng(0, 0, 1)


def passing(
    name: str, leniency: float, distribution: tuple[float, ...] = DISTRIBUTION
) -> list[int]:
    """Which single drafts the rule accepts, when sampling."""
    probs_NV = torch.tensor([distribution, distribution], dtype=torch.float64)
    rule = rule_for(name, leniency)
    rows = [
        VerifyRow(Draft.chain([token]), Distributions(probs_NV=probs_NV), NOISE, probs_NV)
        for token in range(len(distribution))
    ]
    return [token for token, verdict in enumerate(rule(rows)) if verdict.path]


@pytest.mark.parametrize(
    ("name", "leniency", "wanted"),
    [
        ("threshold", 0.4, [1]),
        ("threshold", 0.3, [1, 3]),
        ("threshold", 0.41, []),
        ("p_min", 1.0, [1]),
        ("p_min", 0.41, [1]),
        ("p_min", 0.3, [1, 3]),
        ("top_k", 1, [1]),
        ("top_k", 2, [1, 3]),
        ("top_k", 3, [0, 1, 3]),
        ("top_k", 99, [0, 1, 2, 3, 4]),
        ("nucleus", 0.1, [1]),
        ("nucleus", 0.5, [1, 3]),
        ("nucleus", 0.75, [0, 1, 3]),
        ("nucleus", 1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_what_passes(name: str, leniency: float, wanted: list[int]) -> None:
    """Equals go by id; what the target rules out never passes."""
    assert passing(name, leniency) == wanted


def test_typical_acceptance_is_stricter_where_the_distribution_is_sure() -> None:
    """p > min(e, sqrt(e) exp(-H)): an entropy of log 4 divides sqrt(0.09) by four."""
    flat = (0.25, 0.25, 0.25, 0.25)
    assert passing("typical", 0.09, flat) == [0, 1, 2, 3]
    sure = (0.85, 0.08, 0.04, 0.03)
    assert passing("typical", 0.09, sure) == [0]
    entropy = -sum(share * math.log(share) for share in DISTRIBUTION if share)
    epsilon = 0.35
    assert math.sqrt(epsilon) * math.exp(-entropy) < epsilon
    bar = math.sqrt(epsilon) * math.exp(-entropy)
    assert passing("typical", epsilon) == [t for t, share in enumerate(DISTRIBUTION) if share > bar]


@pytest.mark.parametrize("epsilon", [0.01, 0.09, 0.5, 1.0])
def test_typical_acceptance_lets_the_likeliest_pass(epsilon: float) -> None:
    """exp(-H) is at most the largest probability; a sure token needs e below 1."""
    for distribution in (DISTRIBUTION, (0.2,) * 5, (0.97, 0.01, 0.02)):
        if epsilon < 1:
            likeliest = max(range(len(distribution)), key=lambda token: distribution[token])
            assert likeliest in passing("typical", epsilon, distribution)


def test_offers() -> None:
    probs_V = torch.tensor(DISTRIBUTION)
    assert Candidate(1, probs_V, probs_V).likeliest
    assert not Candidate(3, probs_V, probs_V).likeliest
    assert Candidate(3, 3, probs_V).likeliest
    offer = Candidate(2, probs_V, probs_V)
    assert [bool(x) for x in offer.likelier()] == [True, True, False, True, False, False]
    assert above(offer, 0.1)
    assert not among_top(offer, 3)
    assert not in_nucleus(offer, 0.79)
    assert not typical(offer, 0.5)


def greedy_row(draft: Draft) -> VerifyRow:
    """Distributions of a tree of at most four nodes, as greedy decoding gives them to a lossy
    rule."""
    soft_NV = torch.tensor([(0.5, 0.3, 0.2), (0.1, 0.2, 0.7), (0.6, 0.3, 0.1), (0.2, 0.5, 0.3)])
    soft_NV = soft_NV[: len(draft) + 1]
    best = tuple(int(token) for token in soft_NV.argmax(-1))
    return VerifyRow(draft, Distributions(tokens=best), NOISE, soft_NV)


def test_a_greedy_walk_keeps_what_is_likely_and_ends_with_the_likeliest() -> None:
    rule = LossyRule("threshold", above, 0.3)
    verdict = rule([greedy_row(Draft.chain([1, 1, 2]))])[0]
    assert (verdict.path, verdict.next_token) == ((0,), 2)
    verdict = rule([greedy_row(Draft.chain([1, 2, 1]))])[0]
    assert (verdict.path, verdict.next_token) == ((0, 1, 2), 1)


def test_the_first_child_that_passes_is_taken() -> None:
    draft = Draft((2, 1, 0), (-1, -1, -1))
    rule = LossyRule("threshold", above, 0.3)
    verdict = rule([greedy_row(draft)])[0]
    assert (verdict.path, verdict.next_token) == ((1,), 0)


def test_strict_argmax_is_greedy_decoding() -> None:
    """p_min at 1 keeps the target's own text at temperature 0, whatever the soft distribution's
    ties."""
    rule = rule_for("p_min", 1.0)
    tied = torch.full((3, 3), 1 / 3)
    for best in ((2, 1, 0), (0, 0, 0)):
        for token in range(3):
            row = VerifyRow(Draft.chain([token, 1]), Distributions(tokens=best), NOISE, tied)
            wanted = (0, 1)[: 0 if token != best[0] else 1 + (best[1] == 1)]
            assert rule([row])[0].path == wanted


def test_the_token_after_the_path_is_drawn_from_the_target() -> None:
    """Its distribution at the leaf, and not what the refused drafts left of it."""
    probs_NV = torch.tensor([(0.5, 0.3, 0.2), (0.2, 0.2, 0.6)], dtype=torch.float64)
    counts = [0, 0, 0]
    for start in range(3000):
        rng = KeyedRng(0, 0, start)
        row = VerifyRow(Draft.chain([2]), Distributions(probs_NV=probs_NV), rng, probs_NV)
        verdict = rule_for("threshold")([row])[0]
        assert verdict.path == ()
        counts[verdict.next_token] += 1
    assert [count / 3000 for count in counts] == pytest.approx([0.5, 0.3, 0.2], abs=0.04)
