"""Hundreds of careless requests: cancelled, let go, raising, interrupted, and nothing is left."""

from __future__ import annotations

from collections import Counter

import pytest

from checks.soak import SCHEDULES, soak

# Of one run: some kinds come with a chance of one in twenty.
NUM_REQUESTS = 150
KINDS = ("cancelled", "let_go", "raised", "interrupted")

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]


# With several lanes test_interrupt_sweep.py interrupts at each moment of a short run.
MORE = [pytest.param(one, marks=pytest.mark.deep) for one in SCHEDULES if one != "single"]


@pytest.mark.parametrize("schedule", ["single", *MORE])
def test_careless_requests_leave_nothing_behind(schedule: str) -> None:
    happened = Counter[str]()
    # When signals and cancelling come depends on the machine, and so does what else is drawn.
    for seed in range(1, 6):
        found = soak(schedule, NUM_REQUESTS, seed)
        assert found.wrong == 0
        assert found.lost_pages == 0
        assert found.completed > NUM_REQUESTS // 2
        assert found.last_threads <= found.first_threads + 1
        happened.update({kind: getattr(found, kind) for kind in KINDS})
        if min(happened.values()) > 2:
            return
    pytest.fail(f"what was to happen did not: {happened}")
