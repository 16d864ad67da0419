"""A job reads as many prompt tokens as fit its time, and no fewer than a pass is worth."""

from __future__ import annotations

import pytest

from outrider.sched import pace as module
from outrider.sched.jobs import Job, ReadyQueues, Stage, StageItem
from outrider.sched.pace import LEAST_CHUNK, NUM_ROUNDS, PromptPace
from outrider.sched.schedules import SingleLane

CHUNK_SECONDS = 0.2


@pytest.fixture(autouse=True)
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_SECONDS", CHUNK_SECONDS)


def job(*stages: Stage, tokens: int, seqs: int = 1) -> Job:
    """One that feeds so many `tokens` of `seqs` sequences in each of its stages."""
    shares = [tokens // seqs] * (seqs - 1) + [tokens - tokens // seqs * (seqs - 1)]
    return Job(tuple(StageItem(i, stage, n) for stage in stages for i, n in enumerate(shares)))


def test_nothing_is_bounded_before_anything_is_known() -> None:
    assert PromptPace().limit is None


def test_a_guess_bounds_the_first_chunk() -> None:
    assert PromptPace(seconds=0.002).limit == int(CHUNK_SECONDS / 0.002)


def test_a_chunk_takes_its_time_by_the_fastest_of_the_last() -> None:
    pace = PromptPace(seconds=0.001)
    pace.observe(job(Stage.PREFILL, tokens=100), 1.0)
    assert pace.limit == 200  # still as expected: one job may have been held up
    pace.observe(job(Stage.PREFILL, tokens=100), 1.0)
    pace.observe(job(Stage.PREFILL, tokens=100), 1.0)
    assert pace.limit == 20
    pace.observe(job(Stage.PREFILL, tokens=50), 0.25)
    pace.observe(job(Stage.DRAFT, Stage.PREFILL, Stage.VERIFY, tokens=100), 9.0)
    assert pace.limit == 40


def test_a_model_with_slow_passes_reads_for_as_long_as_a_few_of_them() -> None:
    pace = PromptPace()
    pace.observe(job(Stage.PREFILL, tokens=100), 1.0)
    pace.observe(job(Stage.DRAFT, Stage.VERIFY, tokens=1), 0.5)
    assert pace.limit == int(NUM_ROUNDS * 0.5 / 0.01)


def test_it_never_reads_fewer_than_a_pass_is_worth() -> None:
    pace = PromptPace()
    pace.observe(job(Stage.PREFILL, tokens=20), 60.0)
    assert pace.limit == LEAST_CHUNK


def test_drafting_and_rounds_say_nothing_of_prompts() -> None:
    pace = PromptPace()
    pace.observe(job(Stage.DRAFT, tokens=500), 9.0)
    pace.observe(job(Stage.AHEAD, tokens=500), 9.0)
    pace.observe(job(Stage.DRAFT, Stage.VERIFY, tokens=4, seqs=4), 0.1)
    assert pace.limit is None


def test_a_schedule_keeps_within_it() -> None:
    waiting = (StageItem(0, Stage.PREFILL, 1000), StageItem(1, Stage.PREFILL, 7))
    pool = ReadyQueues(waiting, (), (), 9999, most_prompt_tokens=40)
    job = SingleLane(256).next_job("main", pool, 2)
    assert job is not None
    assert sum(work.num_tokens for work in job.of(Stage.PREFILL) + job.of(Stage.VERIFY)) == 40
