"""Whatever happens to requests on lanes, pages are conserved and every memory is that of its text.

`pytest --hypothesis-profile=deep` runs thousands of histories instead of some hundred.
"""

from __future__ import annotations

import pytest

from checks.machine import check_histories
from doubles.lanes import SCHEDULES


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_history_of_requests_keeps_memory_and_ledger_right(name: str) -> None:
    check_histories(name, percent=60)
