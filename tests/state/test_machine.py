"""Whatever happens to requests on lanes, pages are conserved and every memory is that of its text.

`pytest --hypothesis-profile=deep` runs thousands of histories instead of some hundred.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from checks.effort import examples
from checks.machine import Machine
from doubles.schedules import SCHEDULES


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_history_of_requests_keeps_memory_and_ledger_right(name: str) -> None:
    machine = type("Scheduled", (Machine,), {"schedule_name": name})
    run_state_machine_as_test(
        machine,
        settings=settings(
            examples(60),
            stateful_step_count=40,
            phases=[Phase.generate],
            report_multiple_bugs=False,
        ),
    )
