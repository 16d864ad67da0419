"""First come, first served, never beyond memory or places."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.sched.jobs import Limits, num_admissible

needs = st.lists(st.integers(1, 20), max_size=8)


@given(waiting=needs, running=needs, places=st.integers(1, 10), room=st.integers(0, 60))
def test_as_many_as_fit_and_no_more(
    waiting: list[int], running: list[int], places: int, room: int
) -> None:
    limits = Limits(places, sum(running) + room)
    count = num_admissible(waiting, running, limits)
    assert 0 <= count <= len(waiting)
    assert count == 0 or len(running) + count <= places
    assert sum(waiting[:count]) <= room
    if count < len(waiting) and len(running) + count < places:
        assert sum(waiting[: count + 1]) > room


def test_the_first_is_not_overtaken() -> None:
    assert num_admissible([9, 1, 1], [], Limits(8, 5)) == 0
    assert num_admissible([2, 9, 1], [], Limits(8, 5)) == 1


def test_over_committed_limits_admit_nobody() -> None:
    assert num_admissible([1], [4, 4], Limits(8, 5)) == 0
    assert num_admissible([1], [1, 1], Limits(1, 99)) == 0
