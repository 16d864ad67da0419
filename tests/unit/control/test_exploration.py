"""Looks at what is not done: how many, how long, and at what price."""

from __future__ import annotations

import pytest

from outrider.control.scored import (
    FIRST_GAP,
    LONGEST_GAP,
    MOST_SWEEP_ROUNDS,
    PROBE_ROUNDS,
    SHARE,
    SWEEP_ROUNDS,
    DepthSweep,
    Probes,
    sweep_depths,
)


def run(probes: Probes, num_rounds: int, *, loss: float, is_plain: bool = False) -> list[int]:
    """Rounds of a second, `loss` more in a look; the rounds in which looks began."""
    began: list[int] = []
    for index in range(num_rounds):
        if probes.is_due(urgent=False) and not probes.is_on:
            probes.begin(is_plain=is_plain)
            began.append(index)
        probes.book(1 + loss * probes.is_on, 1.0)
        probes.advance(is_plain=is_plain)
    return began


@pytest.mark.parametrize(
    ("k", "wanted"), [(0, (0,)), (1, (0, 1)), (6, (0, 1, 2, 4, 6)), (8, (0, 1, 2, 4, 8))]
)
def test_the_depths_of_a_sweep(k: int, wanted: tuple[int, ...]) -> None:
    assert sweep_depths(k) == wanted


def test_a_sweep_stays_for_rounds_that_tell_something() -> None:
    sweep = DepthSweep((0, 2))
    seen: list[int | None] = []
    for index in range(2 * SWEEP_ROUNDS * 2):
        seen.append(sweep.depth)
        sweep.advance(telling=index % 2 == 1)
    assert seen == [0] * (2 * SWEEP_ROUNDS) + [2] * (2 * SWEEP_ROUNDS)
    assert sweep.depth is None


def test_a_sweep_does_not_wait_for_ever() -> None:
    sweep = DepthSweep((0, 2))
    ends = [sweep.advance(telling=False) for _ in range(2 * MOST_SWEEP_ROUNDS)]
    assert [index for index, end in enumerate(ends) if end] == [
        MOST_SWEEP_ROUNDS - 1,
        2 * MOST_SWEEP_ROUNDS - 1,
    ]
    assert sweep.depth is None


def test_a_sweep_can_be_ended() -> None:
    sweep = DepthSweep((0, 1, 2))
    sweep.end()
    assert sweep.depth is None


def test_looks_that_change_nothing_become_rare() -> None:
    began = run(Probes(), 2000, loss=0.0)
    gaps = [b - a - PROBE_ROUNDS for a, b in zip([-PROBE_ROUNDS, *began], began, strict=False)]
    assert gaps[:4] == [FIRST_GAP, 2 * FIRST_GAP, 4 * FIRST_GAP, LONGEST_GAP]
    assert set(gaps[3:]) == {LONGEST_GAP}


def test_a_look_that_changed_the_choice_is_followed_up_soon() -> None:
    probes = Probes()
    run(probes, 600, loss=0.0)
    while not probes.is_due(urgent=False):
        probes.advance(is_plain=False)
    probes.begin(is_plain=False)
    for _ in range(PROBE_ROUNDS):
        probes.advance(is_plain=True)
    assert run(probes, FIRST_GAP + 1, loss=0.0) == [FIRST_GAP]


@pytest.mark.parametrize("loss", [0.5, 3.0, 40.0])
def test_looks_cost_a_bounded_share_of_the_time(loss: float) -> None:
    """None begins above it, so the share is passed by one look at most."""
    probes = Probes()
    began = run(probes, 20_000, loss=loss)
    assert began
    assert probes.spent <= SHARE * probes.total + PROBE_ROUNDS * loss
    assert probes.spent == pytest.approx(len(began) * PROBE_ROUNDS * loss)


def test_a_look_that_went_well_is_no_credit() -> None:
    probes = Probes()
    run(probes, FIRST_GAP, loss=0.0)
    probes.begin(is_plain=True)
    probes.book(1.0, 5.0)
    assert probes.spent == 0


def test_an_urgent_look_waits_less_and_pays_the_same() -> None:
    probes = Probes()
    assert not probes.is_due(urgent=True)
    for _ in range(PROBE_ROUNDS):
        probes.book(1.0, 1.0)
        probes.advance(is_plain=True)
    assert probes.is_due(urgent=True)
    assert not probes.is_due(urgent=False)
    probes.begin(is_plain=True)
    probes.book(9.0, 1.0)
    for _ in range(2 * PROBE_ROUNDS):
        probes.advance(is_plain=True)
    assert not probes.is_due(urgent=True)
