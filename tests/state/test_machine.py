"""Whatever happens to requests on lanes, pages are conserved and every memory is that of its text.

`pytest --hypothesis-profile=deep` runs hundreds of histories of each schedule instead of thirty.
"""

from __future__ import annotations

import pytest

from checks.machine import check_histories, histories
from doubles.lanes import SCHEDULES


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "ssd"])
def test_any_history_of_requests_keeps_memory_and_ledger_right(name: str) -> None:
    check_histories(name, percent=30)


@pytest.mark.slow
def test_nor_does_one_of_the_schedule_that_has_every_kind_of_job() -> None:
    histories()
