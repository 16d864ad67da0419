"""What an engine says of its jobs is whole and true: every lane, every round, no gap, no overlap
where there is none."""

from __future__ import annotations

import pytest

from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.draft import JobTrace, RoundTrace
from outrider.core.params import SamplingParams
from outrider_lab.metrics.chrome_trace import PASSES, rounds_of, slices, trace_events
from outrider_lab.metrics.timeline import timeline

pytestmark = [pytest.mark.weights, pytest.mark.slow]

PROMPTS = ("def add(a, b):", "Once upon a time", "Question: 3 + 4?\nAnswer:", "import os\n") * 2


def run(schedule: str, *, at_once: bool) -> tuple[list[JobTrace], list[RoundTrace]]:
    jobs: list[JobTrace] = []
    config = EngineConfig(
        schedule=schedule, concurrent_lanes=at_once, batch_size=4, profile=True, prefill_chunk=8
    )
    llm = LLM(config=config, on_job=jobs.append)
    try:
        results = llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
    finally:
        llm.close()
    return jobs, [trace for result in results for trace in result.rounds]


@pytest.mark.sample(2)
@pytest.mark.parametrize("at_once", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("schedule", ["single", "pd", "pdv", "ssd"])
def test_every_pass_has_its_rounds_and_every_round_its_pass(schedule: str, at_once: bool) -> None:
    jobs, rounds = run(schedule, at_once=at_once)
    found = rounds_of(jobs, rounds)
    assert sum(map(len, found)) == len(rounds)
    for job, own in zip(jobs, found, strict=True):
        assert bool(own) == bool(set(PASSES) & set(job.kinds))
        assert job.began <= job.ended
        assert job.num_live <= 4
        assert sum(job.queues) <= job.num_live
        # The parts of a round were timed inside its job.
        assert slices(job, own)[-1].ended <= job.ended
    assert sum(trace.num_emitted for trace in rounds) == 12 * len(PROMPTS)
    events = list(trace_events(jobs, rounds))
    assert sum(event.get("cat") == "job" for event in events) == len(jobs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["pd", "pdv", "ssd"])
def test_lanes_in_turns_never_overlap(schedule: str) -> None:
    jobs, _ = run(schedule, at_once=False)
    found = timeline(jobs)
    assert len(found.lanes) > 1
    assert found.overlap_fraction == 0
    assert set(found.overlaps.values()) == {0}


def test_queues_and_memory_are_told_as_they_were() -> None:
    """Eight requests, four at once: four wait at the door, and memory falls while others run."""
    jobs, _ = run("single", at_once=False)
    first = jobs[0]
    assert (first.num_waiting, first.num_live, first.queues) == (4, 4, (4, 0, 0))
    queues = timeline(jobs).queues
    assert queues["waiting"].max == 4
    assert queues["prefill"].max == 4
    assert min(job.num_free_tokens for job in jobs[1:]) < first.num_free_tokens
    assert jobs[-1].num_waiting == 0
