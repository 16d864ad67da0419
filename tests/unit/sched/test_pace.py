"""A job reads as many prompt tokens as fit its time, and no fewer than a pass is worth."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import pytest

from outrider.sched import admission as module
from outrider.sched.admission import (
    LEAST_ALONE,
    LEAST_CHUNK,
    LEAST_WITH_ROUNDS,
    LONG_ROUNDS,
    NUM_ROUNDS,
    PASSES_A_TRIAL,
    SHARE_WITH_ROUNDS,
    PromptPace,
)
from outrider.sched.jobs import Job, ReadyQueues, SingleLane, Stage, StageItem

CHUNK_SECONDS, ALONE_SECONDS = 0.2, 1.0
NO_ROUNDS = ReadyQueues((), (), (), 9999)
DECODING = ReadyQueues((), (StageItem(0, Stage.DRAFT, 1),), (), 9999)


@pytest.fixture(autouse=True)
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_SECONDS", CHUNK_SECONDS)
    monkeypatch.setattr(module, "ALONE_SECONDS", ALONE_SECONDS)


def job(*stages: Stage, tokens: int, seqs: int = 1) -> Job:
    """One that feeds so many `tokens` of `seqs` sequences in each of its stages."""
    shares = [tokens // seqs] * (seqs - 1) + [tokens - tokens // seqs * (seqs - 1)]
    return Job(tuple(StageItem(i, stage, n) for stage in stages for i, n in enumerate(shares)))


def test_nothing_is_bounded_before_anything_is_known() -> None:
    assert PromptPace().limit(DECODING) is None


def test_a_guess_bounds_the_first_chunk() -> None:
    assert PromptPace(seconds=0.002).limit(DECODING) == int(CHUNK_SECONDS / 0.002)


def test_a_prompt_is_read_in_larger_chunks_while_no_request_decodes() -> None:
    assert PromptPace(seconds=0.002).limit(NO_ROUNDS) == int(ALONE_SECONDS / 0.002) == 500
    assert PromptPace(seconds=0.1).limit(NO_ROUNDS) == LEAST_ALONE
    assert PromptPace(seconds=0.1).limit(DECODING) == LEAST_CHUNK
    assert PromptPace().limit(NO_ROUNDS) is None
    other_lane = replace(NO_ROUNDS, verifying=(1,))
    assert PromptPace(seconds=0.002).limit(other_lane) == int(CHUNK_SECONDS / 0.002)


def test_a_chunk_takes_its_time_by_the_fastest_of_the_last() -> None:
    pace = PromptPace(seconds=0.001)
    pace.observe(job(Stage.PREFILL, tokens=100), 1.0)
    assert pace.limit(DECODING) == 200  # still as expected: one job may have been held up
    pace.observe(job(Stage.PREFILL, tokens=100), 1.0)
    pace.observe(job(Stage.PREFILL, tokens=100), 1.0)
    assert pace.limit(DECODING) == 20
    pace.observe(job(Stage.PREFILL, tokens=50), 0.25)
    pace.observe(job(Stage.DRAFT, Stage.PREFILL, Stage.VERIFY, tokens=100), 9.0)
    assert pace.limit(DECODING) == 40


def test_a_model_with_slow_passes_reads_for_as_long_as_a_few_of_them() -> None:
    pace = PromptPace()
    pace.observe(job(Stage.PREFILL, tokens=100), 1.0)
    pace.observe(job(Stage.DRAFT, Stage.VERIFY, tokens=1), 0.5)
    assert pace.limit(DECODING) == int(NUM_ROUNDS * 0.5 / 0.01)


def test_it_never_reads_fewer_than_a_pass_is_worth() -> None:
    pace = PromptPace()
    pace.observe(job(Stage.PREFILL, tokens=20), 60.0)
    assert pace.limit(DECODING) == LEAST_CHUNK


def test_drafting_and_rounds_say_nothing_of_prompts() -> None:
    pace = PromptPace()
    pace.observe(job(Stage.DRAFT, tokens=500), 9.0)
    pace.observe(job(Stage.AHEAD, tokens=500), 9.0)
    pace.observe(job(Stage.DRAFT, Stage.VERIFY, tokens=4, seqs=4), 0.1)
    assert pace.limit(DECODING) is None


def test_a_schedule_keeps_within_it() -> None:
    waiting = (StageItem(0, Stage.PREFILL, 1000), StageItem(1, Stage.PREFILL, 7))
    pool = ReadyQueues(waiting, (), (), 9999, most_prompt_tokens=40)
    job = SingleLane(256).next_job("main", pool, 2)
    assert job is not None
    assert sum(work.num_tokens for work in job.of(Stage.PREFILL) + job.of(Stage.VERIFY)) == 40


# Seconds of a pass: a round of each sequence, and a prompt token.
ROUND, READ = 0.03, 0.001


def pool_of(unread: int, num_rounds: int) -> ReadyQueues:
    prompts = (StageItem(99, Stage.PREFILL, unread),) if unread else ()
    writers = tuple(StageItem(i, Stage.DRAFT, 1) for i in range(num_rounds))
    return ReadyQueues(prompts, writers, (), 99_999)


def passes(
    pace: PromptPace,
    *,
    unread: int,
    num_rounds: int,
    round_seconds: Callable[[], float],
    seconds_a_token: float = READ,
) -> list[int]:
    """Prompt tokens of each pass while much of the prompt is unread, beside rounds that take so
    long."""
    found: list[int] = []
    while unread > 2 * CHUNK_SECONDS / READ:
        pool = pool_of(unread, num_rounds)
        pool = replace(pool, most_prompt_tokens=pace.limit_with_rounds(pool))
        job = SingleLane(256).next_job("main", pool, 9)
        assert job is not None
        verified = job.of(Stage.VERIFY)
        # Every text that is written has its round in every pass.
        assert sum(work.num_tokens == 1 for work in verified) == num_rounds
        works = (*job.of(Stage.PREFILL), *verified)
        found.append(sum(work.num_tokens for work in works if work.seq_id == 99))
        unread -= found[-1]
        pace.observe(job, round_seconds() + seconds_a_token * found[-1])
    return found


def chunks_of(found: list[int]) -> list[int]:
    """Without the passes that time a round."""
    assert all(one == 1 for one in found[PASSES_A_TRIAL - 1 :: PASSES_A_TRIAL])
    return [one for one in found if one > 1]


def paced(num_rounds: int = 4) -> PromptPace:
    """One that has seen rounds of so many sequences."""
    pace = PromptPace(READ)
    pace.observe(job(Stage.DRAFT, Stage.VERIFY, tokens=num_rounds, seqs=num_rounds), ROUND)
    return pace


def test_a_long_prompt_takes_no_more_of_a_pass_than_the_rounds_beside_it() -> None:
    found = passes(paced(), unread=3_000, num_rounds=4, round_seconds=lambda: ROUND)
    most = SHARE_WITH_ROUNDS * ROUND / READ
    # The passes that time a round read one token.
    assert max(found) <= most + 1
    assert min(chunks_of(found)) >= 0.9 * most


@pytest.mark.parametrize("now", [0.25, 0.5, 2.0, 4.0])
def test_rounds_that_take_another_time_than_they_did_are_found_out(now: float) -> None:
    found = passes(paced(), unread=8_000, num_rounds=4, round_seconds=lambda: now * ROUND)
    most = now * SHARE_WITH_ROUNDS * ROUND / READ
    settled = chunks_of(found)[4 * PASSES_A_TRIAL :]
    assert max(settled) <= 1.1 * most + 1
    assert min(settled) >= 0.8 * most


def test_rounds_that_differ_leave_the_prompt_its_share() -> None:
    """As those do in which something is drafted and those in which nothing is."""
    rng = random.Random(1)
    found = passes(
        paced(),
        unread=20_000,
        num_rounds=4,
        round_seconds=lambda: ROUND * rng.choice((0.6, 1.0, 1.4)),
    )
    most = SHARE_WITH_ROUNDS * ROUND / READ
    assert 0.5 * most <= mean(chunks_of(found)) <= 1.5 * most


def test_a_prompt_that_is_slow_to_read_goes_in_steps_of_a_few_tokens() -> None:
    found = passes(
        paced(),
        unread=3_000,
        num_rounds=4,
        round_seconds=lambda: ROUND,
        seconds_a_token=5 * READ,
    )
    assert max(chunks_of(found)[PASSES_A_TRIAL:]) <= LEAST_WITH_ROUNDS + 1


def test_short_prompts_and_prompts_alone_are_read_at_once() -> None:
    most = int(CHUNK_SECONDS / READ)
    assert paced().limit_with_rounds(pool_of(most, 4)) == most
    assert paced().limit_with_rounds(pool_of(int(LONG_ROUNDS * ROUND / READ), 4)) == most
    assert PromptPace(READ).limit_with_rounds(pool_of(2_000, 4)) == most
    assert paced().limit(DECODING) == most


@pytest.mark.parametrize("watched", [False, True])
def test_rounds_that_become_long_are_no_slow_reading(watched: bool) -> None:
    """While many short prompts wait, no pass consists of rounds alone, and each round drafts."""
    pace, found, num_rounds = PromptPace(READ), [0], 0
    for _ in range(60):
        pool = pool_of(20, num_rounds)
        most = pace.limit_with_rounds(pool) if watched else pace.limit(pool)
        job = SingleLane(256).next_job("main", replace(pool, most_prompt_tokens=most), 9)
        assert job is not None
        assert most is not None
        found.append(most)
        pace.observe(job, 0.3 * num_rounds + READ * min(most, 20))
        num_rounds = min(num_rounds + 1, 6)
    # The pass of rounds takes 1.8 seconds, so 0.2 seconds more of reading are the least.
    assert min(chunks_of_all(found[20:])) >= CHUNK_SECONDS / READ / 2


def chunks_of_all(found: list[int]) -> list[int]:
    return [one for one in found if one > 1]


def test_the_end_of_a_long_prompt_is_read_as_its_beginning_was() -> None:
    pace, most = paced(), int(CHUNK_SECONDS / READ)
    beside = pace.limit_with_rounds(pool_of(3 * most, 4))
    assert beside is not None
    assert beside < most
    assert pace.limit_with_rounds(pool_of(most // 2, 4)) == beside
    # When it is read, those that are short are read at once again.
    assert pace.limit_with_rounds(pool_of(0, 4)) == most
    assert pace.limit_with_rounds(pool_of(most // 2, 4)) == most
