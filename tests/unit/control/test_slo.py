"""The latency controller: its decisions, one by one, and its account of them."""

from __future__ import annotations

import pytest

from checks.controllers import trace
from outrider.plugins.controllers import NUM_ROUNDS, SloController, SloStats


def slo(*, k: int = 8, min_k: int = 1, target_ms: float = 50.0) -> SloController:
    return SloController(k=k, min_k=min_k, target_ms=target_ms)


def decide(
    controller: SloController, accepted: int, *, ms: float = 1.0, num_waiting: int = 0
) -> int:
    """The depth after one decision's worth of rounds that drafted ten."""
    for seq_id in range(NUM_ROUNDS):
        controller.observe(trace(seq_id, 10, accepted, ms=ms, num_waiting=num_waiting))
    return controller.budgets([0])[0].depth


def test_it_starts_at_four_within_its_range() -> None:
    assert slo().budgets([0])[0].depth == 4
    assert slo(k=3).budgets([0])[0].depth == 3
    assert slo(k=1).budgets([0])[0].depth == 1
    assert slo(k=12, min_k=6).budgets([0])[0].depth == 6


@pytest.mark.parametrize(
    ("accepted", "ms_per_token", "num_waiting", "step"),
    [
        (8, 10, 0, 1),
        (8, 44.9, 5, 1),
        (8, 45.1, 0, 0),  # quick, but too near the target
        (8, 10, 6, 0),  # no short queue any more, no long one yet
        (8, 10, 10, 0),
        (8, 10, 11, -1),
        (8, 50.1, 0, -1),
        (7, 10, 0, 0),  # acceptance must be above 0.7
        (4, 10, 0, 0),
        (3, 10, 0, -1),
    ],
)
def test_one_decision(accepted: int, ms_per_token: float, num_waiting: int, step: int) -> None:
    ms = ms_per_token * (accepted + 1)
    assert decide(slo(), accepted, ms=ms, num_waiting=num_waiting) == 4 + step


def test_it_stays_within_its_range() -> None:
    low, high = slo(), slo(k=6)
    assert [decide(low, 0) for _ in range(4)] == [3, 2, 2, 2]
    assert [decide(high, 10) for _ in range(4)] == [5, 6, 6, 6]
    assert [decide(slo(min_k=3), 0) for _ in range(1)] == [3]


def test_decisions_come_after_full_counts_of_rounds_only() -> None:
    controller = slo()
    for _ in range(NUM_ROUNDS - 1):
        controller.observe(trace(0, 4, 4))
        controller.observe(trace(1, 0, 0, reading=True))
    assert controller.budgets([0])[0].depth == 4
    controller.observe(trace(0, 4, 4))
    assert controller.budgets([0])[0].depth == 5


def test_one_slow_round_is_no_reason_and_two_are() -> None:
    """Of 32 rounds the 95th percentile is the second slowest."""
    for num_slow, depth in ((1, 5), (2, 3)):
        controller = slo()
        for index in range(NUM_ROUNDS):
            controller.observe(trace(0, 4, 4, ms=5000 if index < num_slow else 1))
        assert controller.budgets([0])[0].depth == depth


def test_rounds_without_drafts_say_nothing_about_acceptance() -> None:
    controller = slo()
    for _ in range(NUM_ROUNDS):
        controller.observe(trace(0, 0, 0))
    assert controller.budgets([0])[0].depth == 4
    assert controller.stats().acceptance is None


def test_the_newest_queue_counts() -> None:
    controller = slo()
    for index in range(NUM_ROUNDS):
        controller.observe(trace(0, 4, 4, num_waiting=NUM_ROUNDS - 1 - index))
    assert controller.budgets([0])[0].depth == 5


def temperature(controller: SloController) -> float:
    return controller.budgets([0])[0].temperature


def test_drafts_get_hotter_when_requests_wait_in_spite_of_the_shortest() -> None:
    controller = slo(k=3)
    assert decide(controller, 5, num_waiting=11) == 2
    assert temperature(controller) == 1
    found: list[float] = []
    for num_waiting in (11, 11, 11, 10, 6, 5, 5, 5):
        decide(controller, 5, num_waiting=num_waiting)
        found.append(temperature(controller))
    assert found == [1.25, 1.5, 1.5, 1.5, 1.5, 1.25, 1.0, 1.0]
    assert controller.stats().temperature == 1


@pytest.mark.parametrize("ms", [5000.0, 1.0])
def test_nothing_but_the_queue_makes_drafts_hotter(ms: float) -> None:
    controller = slo(k=2)
    for _ in range(4):
        decide(controller, 0, ms=ms, num_waiting=10)
    assert temperature(controller) == 1


def test_the_account() -> None:
    controller = slo()
    assert controller.stats() == SloStats(4, None, None, 0, 0, 0)
    decide(controller, 8, ms=18)
    decide(controller, 2)
    decide(controller, 2)
    decide(controller, 5, ms=12)
    controller.observe(trace(0, 4, 4))
    stats = controller.stats()
    assert stats == SloStats(3, 0.5, pytest.approx(2.0), 1, 2, 1)  # pyright: ignore[reportArgumentType]
