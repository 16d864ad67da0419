"""A thousand careless requests: cancelled, let go, raising, interrupted, and nothing is left."""

from __future__ import annotations

from collections import Counter

import pytest

from checks.soak import SCHEDULES, soak

KINDS = ("cancelled", "let_go", "raised", "interrupted")

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]


# The schedules with one lane, and with most of them.
MORE = [
    pytest.param(one, marks=pytest.mark.deep) for one in SCHEDULES if one not in ("single", "ssd")
]


@pytest.mark.parametrize("schedule", ["single", "ssd", *MORE])
def test_careless_requests_leave_nothing_behind(schedule: str) -> None:
    happened = Counter[str]()
    # When signals and cancelling come depends on the machine, and so does what else is drawn.
    for seed in range(1, 6):
        found = soak(schedule, 250, seed)
        assert found.wrong == 0
        assert found.lost_pages == 0
        assert found.completed > 125
        assert found.last_threads <= found.first_threads + 1
        happened.update({kind: getattr(found, kind) for kind in KINDS})
        if min(happened.values()) > 2:
            return
    pytest.fail(f"what was to happen did not: {happened}")
