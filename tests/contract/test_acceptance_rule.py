"""What every AcceptanceRule must do, lossy or not; losslessness itself is proved in law/."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from doubles.every_branch import EveryBranch
from outrider.core.draft import Draft, Outcome
from outrider.core.laws import Laws
from outrider.core.noise import ROOT, KeyedNoise
from outrider.core.protocols import AcceptanceRule, JudgeRow
from outrider.verify.match import MatchRule
from outrider.verify.token import TokenRule

VOCAB = 4
RULES: Sequence[AcceptanceRule] = [TokenRule(), MatchRule()]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, 7)))]
    tokens = [draw(st.integers(0, VOCAB - 1)) for _ in parents]
    laws = _soft(len(parents), draw(st.integers(0, 99))) if draw(st.booleans()) else None
    return Draft(tuple(tokens), tuple(parents), laws)


def _soft(rows: int, seed: int) -> torch.Tensor:
    logits_NV = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    return logits_NV.softmax(-1)


@every_rule
@given(draft=trees(), seed=st.integers(0, 99), greedy=st.booleans())
def test_a_path_leads_down_from_the_root(
    rule: AcceptanceRule, draft: Draft, seed: int, greedy: bool
) -> None:
    laws_NV = _soft(len(draft) + 1, seed)
    best = tuple(int(token) for token in laws_NV.argmax(-1))
    laws = Laws(tokens=best) if greedy else Laws(probs_NV=laws_NV)
    verdict = rule([JudgeRow(draft, laws, KeyedNoise(seed, 0, 3))])[0]
    assert [draft.parents[node] for node in verdict.path] == [ROOT, *verdict.path][:-1]
    assert 0 <= verdict.next_token < VOCAB
    if greedy:
        assert Outcome(0, draft, verdict).tokens == _argmax_walk(draft, best)


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
    verdict = rule([JudgeRow(Draft.empty(), Laws(tokens=(3,)), EveryBranch())])[0]
    assert (verdict.path, verdict.next_token) == ((), 3)
    law_V = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    verdict = rule([JudgeRow(Draft.empty(), Laws(probs_NV=law_V), EveryBranch())])[0]
    assert (verdict.path, verdict.next_token) == ((), 2)


@every_rule
def test_a_draft_that_the_target_is_sure_of_is_accepted_whole(rule: AcceptanceRule) -> None:
    sure_NV = torch.eye(VOCAB)[[2, 0, 3]]
    for probs_NV in (None, sure_NV[:2], torch.full((2, VOCAB), 0.25)):
        draft = Draft.chain([2, 0], probs_NV)
        verdict = rule([JudgeRow(draft, Laws(probs_NV=sure_NV), KeyedNoise(1, 0, 9))])[0]
        assert (verdict.path, verdict.next_token) == ((0, 1), 3)


@every_rule
def test_a_draft_that_the_target_rules_out_is_refused_whole(rule: AcceptanceRule) -> None:
    sure_NV = torch.eye(VOCAB)[[1, 0, 3]]
    for probs_NV in (None, torch.full((2, VOCAB), 0.25)):
        draft = Draft.chain([2, 0], probs_NV)
        verdict = rule([JudgeRow(draft, Laws(probs_NV=sure_NV), KeyedNoise(1, 0, 9))])[0]
        assert (verdict.path, verdict.next_token) == ((), 1)


@every_rule
@given(drafts=st.lists(trees(), max_size=4), seed=st.integers(0, 99))
def test_rows_are_judged_alone_and_purely(
    rule: AcceptanceRule, drafts: list[Draft], seed: int
) -> None:
    rows = [
        JudgeRow(draft, Laws(probs_NV=_soft(len(draft) + 1, seed + i)), KeyedNoise(seed, i, 5))
        for i, draft in enumerate(drafts)
    ]
    together = rule(rows)
    assert together == [rule([row])[0] for row in rows]
    assert together == rule(rows)


@every_rule
def test_a_rule_says_whether_it_is_exact(rule: AcceptanceRule) -> None:
    assert rule.exact is True
