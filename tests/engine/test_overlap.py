"""Overlap is real: by the records of their jobs, lanes run at the same time.

The measure would find a lock: with one around the lanes, the same run does not pass.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from checks.faults import keep_drafting_ahead
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.draft import JobTrace
from outrider.plugins.lanes import threads
from outrider_lab.metrics.timeline import seconds, seconds_by_depth

pytestmark = [
    pytest.mark.weights,
    pytest.mark.alone,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core runs one lane at a time"),
]
ENOUGH = 0.5
# Three lanes meet less often than two: drafts and verifications are of groups that take turns.
ENOUGH_OF_THREE = 0.02
LONG = "for i in range(10):\n    print(i, i * i)\n" * 16
# Which lanes have work at the same time, and on what.
CASES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "pd": (("prefill", "decode"), ["x = 1", "def f(x):", *(str(i) + LONG for i in range(6))]),
    "ssd": (("decode", "verify"), ["x = 1", "def f(x):", "while True:", "import os"]),
    "pdv": (
        ("prefill", "decode", "verify"),
        ["x = 1", "def f(x):", "while True:", "import os", *(str(i) + LONG for i in range(8))],
    ),
}
BARS = {schedule: ENOUGH_OF_THREE if len(c[0]) == 3 else ENOUGH for schedule, c in CASES.items()}


def jobs_of(schedule: str) -> list[JobTrace]:
    """What the lanes did for all requests of a case, from the second run on: warm."""
    jobs: list[JobTrace] = []
    config = EngineConfig(
        schedule=schedule,
        k=4,
        batch_size=8,
        hybrid_threshold=0,
        prefill_chunk=128,
        lane_threads=1,
        device="cpu",
    )
    llm = LLM(config=config, on_job=jobs.append)
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    for number in range(2):
        jobs.clear()
        llm.generate([f"{number}{prompt}" for prompt in CASES[schedule][1]], params)
    llm.close()
    return jobs


def overlap(schedule: str) -> float:
    """Time in which all lanes of a case ran, as a share of that of the one which ran least."""
    lanes, jobs = CASES[schedule][0], jobs_of(schedule)
    tracks = [[(job.began, job.ended) for job in jobs if job.lane == lane] for lane in lanes]
    return seconds_by_depth(tracks)[-1] / min(map(seconds, tracks))


@pytest.fixture(autouse=True)
def unpaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drafting ahead runs beside verifying is looked at here."""
    keep_drafting_ahead(monkeypatch)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane takes its task when no other lane has one."""
    lane: Any = threads._Lane  # pyright: ignore[reportPrivateUsage]
    lock, run = threading.Lock(), lane._run

    def one_at_a_time(self: Any, task: Any) -> Any:
        with lock:
            return run(self, task)

    monkeypatch.setattr(lane, "_run", one_at_a_time)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", CASES)
def test_lanes_run_at_once_for_a_part_of_the_shortest_one(schedule: str) -> None:
    """In one run of three: somebody else on the machine can only make lanes wait."""
    assert any(overlap(schedule) >= BARS[schedule] for _ in range(3))


@pytest.mark.slow
@pytest.mark.usefixtures("locked")
@pytest.mark.parametrize("schedule", ["ssd"])
def test_with_a_lock_around_the_lanes_they_do_not(schedule: str) -> None:
    assert overlap(schedule) < BARS[schedule] / 10
