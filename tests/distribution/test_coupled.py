"""The coupled rule: races over shared numbers, enumerated, in closed form and by the million."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from checks.distribution import (
    CASES,
    Weights,
    accepted_distribution,
    chain,
    check_tree_distribution,
    floats,
    normal,
)
from checks.effort import examples
from checks.rng import (
    check_each_emitted_token_has_its_own_race,
    check_race_frequencies,
    check_race_numbers,
    check_races,
    race_counts,
)
from checks.runs import racing_along
from checks.state import VOCAB as TOKENS
from doubles.drafters import random_chains, random_trees
from doubles.racing import volume, whole, won_by
from doubles.rig import Request, Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter
from outrider.core.rng import KeyedRng, race_node
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.plugins.proof.distributions import joint_winner
from outrider.verify.exact import CoupledRule
from outrider_lab.proof.chisquare import p_values

small = st.integers(2, 4).flatmap(
    lambda size: st.tuples(
        *[st.tuples(*[st.sampled_from([0, 0, 1, 1, 2, 3, 8])] * size).filter(any)] * 2
    )
)


def joint(p_V: Tensor, q_V: Tensor) -> list[list[float]]:
    """P(i wins under p and j under q), by volumes."""
    p, q = floats(p_V), floats(q_V)
    rows: list[list[float]] = []
    for i, share in enumerate(p):
        part = won_by(whole(len(p)), p, i) if share > 0 else ()
        rows.append([volume(won_by(part, q, j)) if q[j] > 0 else 0.0 for j in range(len(q))])
    return rows


@given(pair=small)
@example(pair=((1, 1, 0, 0), (0, 0, 1, 1)))
@example(pair=((1, 0, 0), (1, 2, 3)))
@example(pair=((2, 3, 2, 3), (2, 3, 2, 3)))
def test_volumes_closed_forms_and_bounds_agree(pair: tuple[Weights, Weights]) -> None:
    """Each race follows its weights; both have winner i with 1 / sum of max(p_j/p_i, q_j/q_i);
    they agree with at least (1 - TV) / (1 + TV)."""
    p_V, q_V = normal(pair[0]), normal(pair[1])
    p, q, table = floats(p_V), floats(q_V), joint(p_V, q_V)
    assert [sum(row) for row in table] == pytest.approx(p, abs=1e-12)
    assert [sum(column) for column in zip(*table, strict=True)] == pytest.approx(q, abs=1e-12)
    agreed = 0.0
    for i, row in enumerate(table):
        if p[i] > 0 and q[i] > 0:
            both = 1 / sum(max(a / p[i], b / q[i]) for a, b in zip(p, q, strict=True))
            assert row[i] == pytest.approx(both, abs=1e-12)
        closed = [joint_winner(p, q, i, j) for j in range(len(q))]
        assert row == pytest.approx(closed, abs=1e-12)
        agreed += row[i]
    distance = float((p_V - q_V).abs().sum()) / 2
    assert (1 - distance) / (1 + distance) - 1e-12 <= agreed <= 1 - distance + 1e-12


@examples(25)
@given(
    length=st.integers(1, 2),
    targets=st.lists(st.tuples(*[st.integers(0, 8)] * 3).filter(any), min_size=3, max_size=3),
    proposals=st.lists(st.tuples(*[st.integers(0, 8)] * 3).filter(any), min_size=2, max_size=2),
)
def test_drafts_that_race_along_leave_the_distribution_alone(
    length: int, targets: list[Weights], proposals: list[Weights]
) -> None:
    case = replace(chain(targets[: length + 1], proposals[:length]), races=True)
    check_tree_distribution(CoupledRule(), case)


@examples(3)
@given(
    parents=st.sampled_from([(-1, -1, 0), (-1, 0, -1, 2), (-1, 0, 0)]),
    target=st.tuples(*[st.integers(0, 8)] * 3).filter(any),
    races=st.booleans(),
)
def test_trees(parents: tuple[int, ...], target: Weights, races: bool) -> None:
    case = replace(CASES[8], parents=parents, certain=frozenset({0}), races=races)
    check_tree_distribution(CoupledRule(), replace(case, target=(target, *case.target[1:])))


@given(p=st.tuples(*[st.integers(0, 8)] * 3).filter(any), q=st.tuples(*[st.integers(0, 8)] * 3))
def test_a_draft_is_kept_as_often_as_the_closed_form_says(p: Weights, q: Weights) -> None:
    if any(q):
        case = replace(chain([p, p], [q]), races=True)
        agreed = sum(row[i] for i, row in enumerate(joint(normal(p), normal(q))))
        assert accepted_distribution(CoupledRule(), case)[1] == pytest.approx(agreed, abs=1e-12)


PAIRS = (
    ((17, 16, 18, 15), (16, 18, 15, 17)),
    ((90, 4, 5, 1), (50, 20, 10, 20)),
    ((400, 250, 150, 200), (375, 247, 156, 222)),
    ((3, 2, 0, 0), (0, 0, 2, 3)),
    ((0, 1, 0, 0), (2, 3, 1, 1)),
    ((3, 4, 1, 1), (1, 0, 1, 0)),
)


@pytest.mark.slow
@pytest.mark.parametrize("num_races", [200_000, pytest.param(1_000_000, marks=pytest.mark.deep)])
@pytest.mark.parametrize(("place", "pair"), list(enumerate(PAIRS)))
def test_many_shipped_races(place: int, pair: tuple[Weights, Weights], num_races: int) -> None:
    """Both winners of races at as many positions, against their joint distribution (chi-square)."""
    p_V, q_V = normal(pair[0]), normal(pair[1])
    counts_VV = race_counts(p_V, q_V, seed=place, num_races=num_races)
    probs_VV = torch.tensor(joint(p_V, q_V), dtype=torch.float64)
    value = float(p_values(counts_VV.reshape(1, -1), probs_VV.flatten())[0])
    assert value > 1e-6 / len(PAIRS), f"p = {value:.3g}"


def test_each_emitted_token_has_its_own_race() -> None:
    check_each_emitted_token_has_its_own_race()


def test_race_numbers() -> None:
    check_race_numbers()


def test_races() -> None:
    check_races()


def test_race_frequencies() -> None:
    check_race_frequencies()


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "ngram": lambda: NgramDrafter(max_n=2, min_n=1),
    "model": lambda: model_drafter(ToyHybrid(vocab_size=TOKENS, seed=5), chunk=3),
    "races": lambda: model_drafter(ToyHybrid(vocab_size=TOKENS, seed=5), chunk=3, draw=race_node),
    "chains": lambda: random_chains(TOKENS),
    "trees": lambda: random_trees(TOKENS),
}


# Every drafter and every length, not each with each: the text may depend on neither. Other
# combinations are `deep`.
@pytest.mark.sample(4)
@pytest.mark.covering(1)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_no_drafter_and_no_mate_changes_the_text(drafter: str, k: int) -> None:
    asked = [
        Request(prompt, SamplingParams(temperature=0.8, seed=seed, max_tokens=14), sample=sample)
        for prompt, seed, sample in [((1, 2, 1), 3, 0), ((1, 2, 1), 3, 1), ((0,), 4, 0)]
    ]
    alone = [
        Rig(TinyAttentionLM(vocab_size=TOKENS), rule=CoupledRule(), k=0).run([request])[0]
        for request in asked
    ]
    together = Rig(TinyAttentionLM(vocab_size=TOKENS), DRAFTERS[drafter](), CoupledRule(), k=k)
    assert together.run(asked) == alone
    assert alone[0] != alone[1]


def test_a_racing_drafter_with_the_targets_model_is_always_right() -> None:
    racing_along()


def test_a_race_is_the_same_for_any_scale_and_any_unlikely_company() -> None:
    weights_V = torch.tensor([0.2, 0.0, 0.5, 0.3])
    for start in range(50):
        rng = KeyedRng(4, 1, start)
        winner = rng.race_at(weights_V, 3)
        assert winner == KeyedRng(4, 1, start + 2).race_at(weights_V * 1024, 1)
        assert winner == rng.race_at(torch.cat([weights_V, torch.full((9,), 1e-300)]), 3)


def test_the_winner_of_a_race_over_a_large_vocabulary() -> None:
    """Numbers are made in parts; the least quotient wins wherever it lies."""
    rng = np.random.default_rng(0)
    for size in (1 << 15, (1 << 15) + 1, 100_000):
        weights_V = torch.tensor(rng.random(size), dtype=torch.float32)
        winner = KeyedRng(1, 0, 2).race_at(weights_V, 0)
        alone = torch.zeros(size)
        ids = rng.choice(size, 50, replace=False)
        alone[ids] = weights_V[ids]
        alone[winner] = weights_V[winner]
        assert KeyedRng(1, 0, 2).race_at(alone, 0) == winner
