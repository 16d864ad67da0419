"""What every AcceptanceRule must do, lossy or not; losslessness itself is proved in distribution/.

Shapes:  N = distributions, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from doubles.every_branch import EveryBranch
from outrider.core.draft import Draft, Outcome
from outrider.core.protocols import AcceptanceRule, VerifyRow
from outrider.core.rng import KeyedRng, Rng
from outrider.core.sampling import Distributions
from outrider.core.tree import ROOT
from outrider.verify.rules import EXACT, LOSSY, rule_for

VOCAB = 4
every_rule = pytest.mark.parametrize(
    "rule", [rule_for(name) for name in (*EXACT, *LOSSY)], ids=[*EXACT, *LOSSY]
)
every_exact_rule = pytest.mark.parametrize("rule", [rule_for(name) for name in EXACT], ids=EXACT)


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, 7)))]
    tokens = [draw(st.integers(0, VOCAB - 1)) for _ in parents]
    distributions = _soft(len(parents), draw(st.integers(0, 99))) if draw(st.booleans()) else None
    return Draft(tuple(tokens), tuple(parents), distributions)


def _soft(rows: int, seed: int) -> torch.Tensor:
    logits_NV = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    return logits_NV.softmax(-1)


def _row(draft: Draft, probs_NV: torch.Tensor, rng: Rng, *, greedy: bool = False) -> VerifyRow:
    """A row as the engine makes it for any rule."""
    best = tuple(int(token) for token in probs_NV.argmax(-1))
    distributions = Distributions(tokens=best) if greedy else Distributions(probs_NV=probs_NV)
    return VerifyRow(draft, distributions, rng, probs_NV)


@every_rule
@given(draft=trees(), seed=st.integers(0, 99), greedy=st.booleans())
def test_a_path_leads_down_from_the_root(
    rule: AcceptanceRule, draft: Draft, seed: int, greedy: bool
) -> None:
    probs_NV = _soft(len(draft) + 1, seed)
    row = _row(draft, probs_NV, KeyedRng(seed, 0, 3), greedy=greedy)
    verdict = rule([row])[0]
    assert [draft.parents[node] for node in verdict.path] == [ROOT, *verdict.path][:-1]
    assert 0 <= verdict.next_token < VOCAB
    if greedy:
        leaf = verdict.path[-1] if verdict.path else ROOT
        assert verdict.next_token == row.distributions.at(leaf + 1)


@every_exact_rule
@given(draft=trees(), seed=st.integers(0, 99))
def test_an_exact_rule_follows_greedy_distributions(
    rule: AcceptanceRule, draft: Draft, seed: int
) -> None:
    probs_NV = _soft(len(draft) + 1, seed)
    row = _row(draft, probs_NV, KeyedRng(seed, 0, 3), greedy=True)
    best = [int(token) for token in probs_NV.argmax(-1)]
    assert Outcome(0, draft, rule([row])[0]).tokens == _argmax_walk(draft, best)


def _argmax_walk(draft: Draft, best: Sequence[int]) -> tuple[int, ...]:
    """What plain greedy decoding emits, as far as the tree goes along with it."""
    tokens: list[int] = []
    node = ROOT
    while True:
        tokens.append(best[node + 1])
        followers = [c for c in draft.children(node) if draft.tokens[c] == tokens[-1]]
        if not followers:
            return tuple(tokens)
        node = followers[0]


@every_rule
def test_an_empty_draft_is_plain_sampling(rule: AcceptanceRule) -> None:
    probs_V = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    for greedy in (True, False):
        row = _row(Draft.empty(), probs_V, EveryBranch(), greedy=greedy)
        verdict = rule([row])[0]
        assert (verdict.path, verdict.next_token) == ((), 2)


@every_rule
@pytest.mark.parametrize("greedy", [True, False])
def test_a_draft_that_the_target_is_sure_of_is_accepted_whole(
    rule: AcceptanceRule, greedy: bool
) -> None:
    sure_NV = torch.eye(VOCAB)[[2, 0, 3]]
    for probs_NV in (None, sure_NV[:2], torch.full((2, VOCAB), 0.25)):
        draft = Draft.chain([2, 0], probs_NV)
        verdict = rule([_row(draft, sure_NV, KeyedRng(1, 0, 9), greedy=greedy)])[0]
        assert (verdict.path, verdict.next_token) == ((0, 1), 3)


@every_rule
@pytest.mark.parametrize("greedy", [True, False])
def test_a_draft_that_the_target_rules_out_is_refused_whole(
    rule: AcceptanceRule, greedy: bool
) -> None:
    sure_NV = torch.eye(VOCAB)[[1, 0, 3]]
    for probs_NV in (None, torch.full((2, VOCAB), 0.25)):
        draft = Draft.chain([2, 0], probs_NV)
        verdict = rule([_row(draft, sure_NV, KeyedRng(1, 0, 9), greedy=greedy)])[0]
        assert (verdict.path, verdict.next_token) == ((), 1)


@every_rule
@examples(50)
@given(drafts=st.lists(trees(), max_size=4), seed=st.integers(0, 99))
def test_rows_are_judged_alone_and_purely(
    rule: AcceptanceRule, drafts: list[Draft], seed: int
) -> None:
    rows = [
        _row(draft, _soft(len(draft) + 1, seed + i), KeyedRng(seed, i, 5))
        for i, draft in enumerate(drafts)
    ]
    together = rule(rows)
    assert together == [rule([row])[0] for row in rows]
    assert together == rule(rows)


@every_rule
@given(draft=trees(), seed=st.integers(0, 99))
def test_distributions_are_read_and_not_written(
    rule: AcceptanceRule, draft: Draft, seed: int
) -> None:
    probs_NV = _soft(len(draft) + 1, seed)
    before_NV = probs_NV.clone()
    proposed_NV = None if draft.probs_NV is None else draft.probs_NV.clone()
    rule([_row(draft, probs_NV, KeyedRng(seed, 0, 5))])
    assert torch.equal(probs_NV, before_NV)
    assert proposed_NV is None or torch.equal(proposed_NV, cast(torch.Tensor, draft.probs_NV))


@pytest.mark.parametrize("name", [*EXACT, *LOSSY])
def test_a_rule_says_whether_it_is_exact(name: str) -> None:
    assert rule_for(name).exact is (name in EXACT)
