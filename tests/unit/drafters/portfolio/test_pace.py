"""What a model's pass takes, in passes of the target: told by the pass that verified its draft."""

from __future__ import annotations

import pytest

from doubles.clocks import FakeClock
from outrider.drafters.common.members import DraftCostMeter
from outrider.estimate.cost import ASSUMED_DRAFT, ROW_COST


def rounds(
    pace: DraftCostMeter, clock: FakeClock, count: int, *, token: float, plain: float
) -> None:
    """Drafts of four tokens, and passes that take as long as their rows make them."""
    for _ in range(count):
        pace.begin_round()
        clock.advance(4 * token)
        pace.drafted(4 * token, 4)
        pace.end_drafting(1 + 4 * ROW_COST)
        clock.advance(plain * (1 + 4 * ROW_COST))


def test_it_is_assumed_until_a_few_drafts_were_timed() -> None:
    clock = FakeClock()
    pace = DraftCostMeter(clock=clock)
    rounds(pace, clock, 5, token=0.3, plain=1.0)
    assert pace.share == ASSUMED_DRAFT
    rounds(pace, clock, 1, token=0.3, plain=1.0)
    assert pace.share == pytest.approx(0.3)


def test_rounds_without_a_draft_say_nothing_of_it() -> None:
    """The machine is three times as fast while the model rests: its drafts would be as well."""
    clock = FakeClock()
    pace = DraftCostMeter(clock=clock)
    rounds(pace, clock, 20, token=0.2, plain=1.0)
    for _ in range(100):
        pace.begin_round()
        pace.end_drafting(1.0)
        clock.advance(1 / 3)
    assert pace.share == pytest.approx(0.2)


def test_a_rest_between_rounds_does_not_count() -> None:
    clock = FakeClock()
    pace = DraftCostMeter(clock=clock)
    for turn in range(30):
        rounds(pace, clock, 1, token=0.2, plain=1.0)
        if turn % 3 == 0:
            clock.advance(50.0)
    assert pace.share == pytest.approx(0.2)


def test_costs_of_a_draft_that_do_not_depend_on_its_length_are_counted() -> None:
    """A draft takes 0.5 passes, and 0.1 more for each pass of the member."""
    clock = FakeClock()
    pace = DraftCostMeter(clock=clock)
    for turn in range(40):
        depth = 1 if turn % 2 else 4
        pace.begin_round()
        clock.advance(0.5 + 0.1 * depth)
        pace.drafted(0.5 + 0.1 * depth, depth)
        pace.end_drafting(1.0)
        clock.advance(1.0)
    assert pace.cost(1) == pytest.approx(0.6)
    assert pace.cost(4) == pytest.approx(0.9)
    assert pace.cost(2) >= 2 * pace.share
    assert pace.cost(6) > pace.cost(4)
