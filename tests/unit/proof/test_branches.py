"""The enumeration: distributions come out whole, numbers are used once, races share theirs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.rng import KeyedRng, Role
from outrider.plugins.proof.distributions import (
    BadDrawError,
    EveryBranch,
    distribution,
    joint_winner,
    runs,
)
from outrider_lab.proof.chisquare import p_value

weights = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)


@given(first=weights, second=weights)
def test_the_distribution_of_two_picks_is_their_product(
    first: list[int], second: list[int]
) -> None:
    def picks(rng: EveryBranch) -> tuple[int, ...]:
        a = rng.pick(torch.tensor(first), 0, Role.DRAFT)
        return a, rng.pick(torch.tensor(second), a, Role.NEXT)

    found = distribution(picks)
    total = sum(first) * sum(second)
    wanted = {(a, b): first[a] * second[b] / total for a in range(3) for b in range(3)}
    assert found == pytest.approx({text: share for text, share in wanted.items() if share})


def test_coins_beyond_their_bounds_are_certain() -> None:
    def tosses(rng: EveryBranch) -> tuple[int, ...]:
        return (rng.coin(7.0, 0, Role.ACCEPT), rng.coin(-1.0, 1, Role.ACCEPT))

    assert list(runs(tosses)) == [((True, False), 1.0)]


@pytest.mark.parametrize("bad", [[0.0, 0.0], [1.0, -0.5], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_that_are_no_distribution_are_refused(bad: list[float]) -> None:
    with pytest.raises(BadDrawError, match="no distribution"):
        EveryBranch().pick(torch.tensor(bad), 0, Role.NEXT)


def test_a_number_is_used_once_a_round() -> None:
    rng = EveryBranch()
    flat_V = torch.ones(2)
    rng.pick(flat_V, 3, Role.ACCEPT)
    with pytest.raises(BadDrawError, match="drawn twice"):
        rng.coin(0.5, 3, Role.ACCEPT)
    rng.pick(flat_V, 3, Role.NEXT)
    rng.at(4).pick(flat_V, 3, Role.ACCEPT)
    with pytest.raises(BadDrawError, match="no probability"):
        rng.coin(float("nan"), 0, Role.DRAFT)


@given(p=weights, q=weights)
def test_winners_of_shared_races_have_each_its_own_distribution(p: list[int], q: list[int]) -> None:
    joint = [[joint_winner(p, q, i, j) for j in range(3)] for i in range(3)]
    assert [sum(row) for row in joint] == pytest.approx([w / sum(p) for w in p])
    assert [sum(column) for column in zip(*joint, strict=True)] == pytest.approx(
        [w / sum(q) for w in q]
    )
    distance = sum(abs(a / sum(p) - b / sum(q)) for a, b in zip(p, q, strict=True)) / 2
    agreeing = sum(joint[i][i] for i in range(3))
    assert agreeing >= (1 - distance) / (1 + distance) - 1e-12


@given(p=weights, q=weights)
def test_two_races_at_a_place_follow_the_joint_distribution(p: list[int], q: list[int]) -> None:
    def race(rng: EveryBranch) -> tuple[int, ...]:
        return rng.race_at(torch.tensor(p), 1), rng.race_at(torch.tensor(q), 1)

    wanted = {(i, j): joint_winner(p, q, i, j) for i in range(3) for j in range(3)}
    found = distribution(race)
    assert all(abs(found.get(pair, 0.0) - share) < 1e-12 for pair, share in wanted.items())
    assert sum(found.values()) == pytest.approx(1)


def test_a_third_race_needs_a_new_round() -> None:
    rng, flat_V = EveryBranch(), torch.ones(2)
    assert rng.at(5).race_at(flat_V, 2) == rng.race_at(flat_V, 2)
    with pytest.raises(BadDrawError, match="drawn twice"):
        rng.race_at(flat_V, 2)
    rng.at(7).race_at(flat_V, 0)
    rng.race_at(flat_V, 0)


def test_the_joint_distribution_is_that_of_the_shipped_races() -> None:
    p, q = (5, 3, 2), (2, 2, 6)
    p_V, q_V = torch.tensor(p).double(), torch.tensor(q).double()
    counts = [[0] * 3 for _ in range(3)]
    for sample in range(2000):
        rng = KeyedRng(3, sample, 9)
        counts[rng.race_at(p_V, 1)][rng.race_at(q_V, 1)] += 1
    probs = [joint_winner(p, q, i, j) for i in range(3) for j in range(3)]
    assert p_value([count for row in counts for count in row], probs) > 1e-4
