"""Drafting ahead stays within the window, and rests where even the least does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.core.config import EngineConfig
from outrider.plugins.lanes.ahead.choices import AheadChoices
from outrider.plugins.lanes.ahead.table import FIRST_REST, FanOutLimiter


def settle(
    pace: FanOutLimiter, *, each: float, fixed: float, window: float, rounds: int = 60
) -> list[int]:
    """Fan-outs of rounds on a machine where a foreseen verdict costs `each` beside `fixed`."""
    found: list[int] = []
    for _ in range(rounds):
        found.append(pace.fan_out)
        if pace.fan_out:
            pace.observe(fixed + each * pace.fan_out, window, saved=1.0)
        else:
            pace.rest()
    return found


def test_it_shrinks_until_the_window_holds_it_and_stays() -> None:
    found = settle(FanOutLimiter(16), each=1.0, fixed=1.0, window=6.0)
    assert found[0] == 16
    assert set(found[-20:]) <= {4, 5}


def test_it_grows_again_when_verifications_take_longer() -> None:
    pace = FanOutLimiter(16)
    settle(pace, each=1.0, fixed=1.0, window=3.0)
    assert pace.fan_out <= 2
    assert settle(pace, each=1.0, fixed=1.0, window=40.0)[-1] == 16


def test_it_rests_where_even_one_verdict_costs_more_than_it_saves() -> None:
    found = settle(FanOutLimiter(8), each=1.0, fixed=5.0, window=2.0, rounds=400)
    assert 0 in found
    # Looks become rare: the last half has fewer than the first.
    tried = [fan_out > 0 for fan_out in found]
    assert sum(tried[200:]) < sum(tried[:200])
    first = tried.index(False)
    assert not any(tried[first : first + FIRST_REST])


def test_it_goes_on_always_if_that_was_asked_for() -> None:
    assert (
        min(settle(FanOutLimiter(8, always=True), each=1.0, fixed=5.0, window=2.0, rounds=400)) == 1
    )


def test_a_threshold_of_none_goes_on_always() -> None:
    """What --hybrid-threshold 0 promises, of the schedule and of the drafter."""
    assert [AheadChoices.of(EngineConfig(hybrid_threshold=n)).always for n in (0, 3)] == [
        True,
        False,
    ]


def test_it_does_not_rest_where_hits_save_more_than_waiting_costs() -> None:
    pace = FanOutLimiter(8)
    for _ in range(50):
        pace.observe(2.5, 2.0, saved=1.0)
    assert pace.fan_out == 1


@given(
    most=st.integers(1, 64),
    looks=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), max_size=40),
)
def test_it_never_leaves_its_bounds(most: int, looks: list[tuple[float, float, float]]) -> None:
    pace = FanOutLimiter(most)
    for seconds, window, saved in looks:
        pace.observe(seconds, window, saved)
        assert 0 <= pace.fan_out <= most
        pace.rest()


def test_nothing_is_learnt_without_a_window() -> None:
    pace = FanOutLimiter(5)
    pace.observe(9.0, 0.0, saved=0.0)
    assert pace.fan_out == 5
