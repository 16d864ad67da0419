"""Schedules with everything chosen: whole histories, and who waits how long for a pass."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from checks.effort import examples
from checks.machine import Machine
from doubles.lanes import Arrival, Lanes, Ran
from doubles.schedules import SCHEDULES
from outrider.sched.jobs import LaneSizes, Stage


def check_histories(name: str, *, percent: int) -> None:
    machine = type("Scheduled", (Machine,), {"schedule_name": name})
    run_state_machine_as_test(
        machine,
        settings=settings(
            examples(percent),
            stateful_step_count=40,
            phases=[Phase.generate],
            report_multiple_bugs=False,
        ),
    )


def histories() -> None:
    """Of the schedule that has every kind of job."""
    check_histories("ssd", percent=40)


def passes_of(ran: Sequence[Ran], seq_id: int) -> list[int]:
    """What each pass that read prompts, while `seq_id` waited for that, gave to it."""
    given: list[int] = []
    for each in ran:
        waiting = {work.seq_id for work in each.pool.prefill}
        reads = [w for s in (Stage.PREFILL, Stage.VERIFY) for w in each.job.of(s)]
        if seq_id in waiting and any(work.seq_id in waiting for work in reads):
            given.append(sum(work.num_tokens for work in reads if work.seq_id == seq_id))
    return given


def waits(name: str, chunk: int, requests: Sequence[Arrival]) -> list[Ran]:
    """All jobs, where each takes a second."""
    lanes = Lanes(
        SCHEDULES[name](LaneSizes(chunk)),
        requests,
        cost=lambda lane, job: 1.0,
        drafts_ahead=name == "ssd",
    )
    return lanes.run()


def check_long_prompt(name: str, long: int, chunk: int, short: Sequence[Arrival]) -> None:
    """While others come, a long prompt gets half of each chunk, and so comes to its end."""
    passes = passes_of(waits(name, chunk, [Arrival(long, 1), *short]), 0)
    assert len(passes) <= -(-long // (chunk // 2)) + 1
    left = long
    for count in passes:
        assert count >= min(left - 1, chunk // 2)
        left -= count


def check_short_prompts(name: str, long: int, shorts: Sequence[int], chunk: int) -> None:
    """The other half of each chunk is theirs, the shortest first."""
    ran = waits(name, chunk, [Arrival(long, 1), *(Arrival(count, 1) for count in shorts)])
    for seq_id, count in enumerate(shorts, start=1):
        before = sum(n for n in shorts if n <= count)
        assert len(passes_of(ran, seq_id)) <= -(-before // (chunk - chunk // 2))


def fairness() -> None:
    for name in SCHEDULES:
        for every in (0.5, 1.0):
            stream = [Arrival(8, 1, index * every) for index in range(40)]
            check_long_prompt(name, 60, 8, stream)
        check_short_prompts(name, 90, (20, 3, 9, 3), 8)
