"""A thousand careless requests: cancelled, let go, raising, interrupted, and nothing is left."""

from __future__ import annotations

import pytest

from checks.soak import SCHEDULES, soak

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_careless_requests_leave_nothing_behind(schedule: str) -> None:
    found = soak(schedule, 250)
    assert found.wrong == 0
    assert found.lost_pages == 0
    assert found.completed > 125
    assert min(found.cancelled, found.let_go, found.raised, found.interrupted) > 2
    assert found.last_threads <= found.first_threads + 1
