"""Which verdicts are drafted for: by rank, never with the refused token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from outrider.plugins.lanes.ahead.choices import capacity_needed
from outrider.plugins.lanes.ahead.forecast import Forecast, Policy
from outrider.plugins.lanes.ahead.table import Branch, fork, rank

POLICIES: tuple[Policy, ...] = ("top", "optimal", "geometric", "uniform")


def logits(seed: int, num_places: int, vocab_size: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num_places, vocab_size, generator=rng)


@examples(40)
@given(
    seed=st.integers(0, 99),
    draft=st.lists(st.integers(0, 6), max_size=4),
    budget=st.integers(1, 30),
    policy=st.sampled_from(POLICIES),
    hit=st.booleans(),
)
def test_branches_differ_and_none_is_the_refused_token(
    seed: int, draft: list[int], budget: int, policy: Policy, hit: bool
) -> None:
    ranking = rank(logits(seed, len(draft) + 1, 7), draft, 0.8)
    branches = fork(ranking, Forecast(policy), budget, hit=hit)
    assert len(set(branches)) == len(branches) <= budget
    for branch in branches:
        assert 0 <= branch.accepted <= len(draft)
        if branch.accepted < len(draft):
            assert branch.token != draft[branch.accepted]
    if policy == "top":
        # There are six others after a refusal, and seven after the whole draft.
        assert len(branches) == min(budget, 6 * len(draft) + 7)


def test_shares_are_of_what_is_left_at_the_requests_temperature() -> None:
    logits_NV = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0]])
    want = (logits_NV / 0.5).softmax(-1)
    ranking = rank(logits_NV.clone(), [0], 0.5)
    assert [list(ids) for ids in ranking.ids] == [[1, 2], [1, 2, 0]]
    left = want[0, 1:] / want[0, 1:].sum()
    assert ranking.shares[0] == pytest.approx([float(left[0]), float(left[1])])
    assert ranking.shares[1] == pytest.approx([float(want[1, t]) for t in (1, 2, 0)])


def test_top_takes_the_likeliest_of_all_places() -> None:
    # Place 0 is sure of token 2 once 0 was refused; after the whole draft nothing is sure.
    logits_NV = torch.tensor([[9.0, 0.0, 8.0], [0.0, 0.0, 0.0]])
    branches = fork(rank(logits_NV, [0], 0.0), Forecast("top"), 4, hit=False)
    # P(0) = 0.2 and P(1) = 0.8: 0.27 for each bonus token, then 0.2.
    assert {branch.accepted for branch in branches[:3]} == {1}
    assert branches[3] == Branch(0, 2)


def test_counts_are_taken_from_the_top_of_each_list() -> None:
    logits_NV = torch.tensor([[9.0, 1.0, 2.0, 3.0], [1.0, 4.0, 3.0, 2.0]])
    branches = fork(rank(logits_NV, [0], 1.0), Forecast("uniform"), 4, hit=False)
    assert branches == [Branch(0, 3), Branch(0, 2), Branch(1, 1), Branch(1, 2)]


def test_logits_that_are_not_numbers_are_not_ranked() -> None:
    ranking = rank(torch.full((2, 3), torch.nan), [1], 1.0)
    assert [list(ids) for ids in ranking.ids] == [[], []]
    assert fork(ranking, Forecast("top"), 3, hit=False) == []


def test_what_a_model_must_hold() -> None:
    room = capacity_needed(4, 16, 3)
    assert (room.num_rows, room.num_logits, room.num_slots) == (48, 48, 70)
    assert capacity_needed(8, 2, 1).num_rows == 10
