"""Schedules of two and three lanes: who does what, and when the lanes are joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles.lanes import Arrival, Lanes, Ran
from doubles.timelines import job_trace
from outrider.core.config import EngineConfig
from outrider.plugins.lanes.overlap import NEWEST
from outrider.plugins.lanes.schedules import (
    DraftAheadLanes,
    PrefillDecode,
    PrefillDraftVerify,
    schedule_for,
)
from outrider.sched.jobs import (
    Job,
    JobKind,
    LaneSizes,
    ReadyQueues,
    Schedule,
    Stage,
    StageItem,
)

DRAFTS = tuple(StageItem(i, Stage.DRAFT, 1) for i in (1, 2))
VERIFIES = (StageItem(3, Stage.VERIFY, 1), StageItem(4, Stage.VERIFY, 6))
POOL = ReadyQueues(
    (StageItem(0, Stage.PREFILL, 50),), DRAFTS, VERIFIES, 99, (StageItem(4, Stage.AHEAD, 0),)
)
ROUNDS = Job(tuple(StageItem(i, stage, 1) for i in (1, 2) for stage in (Stage.DRAFT, Stage.VERIFY)))
SIZES = LaneSizes(chunk=8)


def is_separate(schedule: PrefillDraftVerify, num_live: int) -> bool:
    job = schedule.next_job("decode", POOL, num_live)
    assert job in (Job(DRAFTS), ROUNDS)
    return job == Job(DRAFTS)


@pytest.mark.parametrize(
    "schedule", [PrefillDecode(8), PrefillDraftVerify(SIZES), DraftAheadLanes(SIZES)]
)
def test_the_prefill_lane_reads_chunks_and_nothing_else(schedule: Schedule) -> None:
    assert schedule.next_job("prefill", POOL, 5) == Job((StageItem(0, Stage.PREFILL, 8),))
    assert schedule.lanes[-1] == "prefill"
    for lane in schedule.lanes:
        assert schedule.next_job(lane, ReadyQueues((), (), (), 99), 0) is None


def test_pd_decodes_in_whole_rounds() -> None:
    assert PrefillDecode(8).next_job("decode", POOL, 5) == ROUNDS
    assert PrefillDecode(8, batch=1).next_job("decode", POOL, 5) == ROUNDS.alone(1)
    pool = ReadyQueues(
        (StageItem(0, Stage.PREFILL, 50), StageItem(1, Stage.PREFILL, 3)), (), (), 99
    )
    job = PrefillDecode(8, prefill_batch=1).next_job("prefill", pool, 2)
    assert job == Job((StageItem(0, Stage.PREFILL, 8),))


def test_pdv_drafts_on_one_lane_and_verifies_on_another() -> None:
    schedule = PrefillDraftVerify(LaneSizes(chunk=8, decode=1, verify=1), threshold=0)
    assert schedule.next_job("decode", POOL, 5) == Job(DRAFTS[:1])
    assert schedule.next_job("verify", POOL, 5) == Job(VERIFIES[:1])


def test_pdv_verifies_what_was_drafted_before_the_lanes_were_joined() -> None:
    assert PrefillDraftVerify(SIZES).next_job("verify", POOL, 2) == Job(VERIFIES)


def test_three_requests_are_few_and_four_are_many() -> None:
    schedule = PrefillDraftVerify(SIZES)
    live = [1, 2, 3, 4, 3, 3, 4, 5, 3, 2, 3, 0, 3, 9]
    told = [is_separate(schedule, num_live) for num_live in live]
    many = [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1]
    assert told == list(map(bool, many))


def test_every_lane_s_question_counts_for_the_mode() -> None:
    schedule = PrefillDraftVerify(SIZES)
    schedule.next_job("prefill", POOL, 4)
    assert is_separate(schedule, 3)


@pytest.mark.parametrize("num_live", [0, 1, 2, 9])
def test_a_threshold_of_nought_keeps_the_lanes_separate(num_live: int) -> None:
    assert is_separate(PrefillDraftVerify(SIZES, threshold=0), num_live)


def test_ssd_drafts_for_verdicts_that_came_before_it_drafts_ahead() -> None:
    schedule = DraftAheadLanes(LaneSizes(chunk=8, decode=1, verify=1))
    assert schedule.next_job("decode", POOL, 5) == Job(DRAFTS[:1])
    assert schedule.next_job("verify", POOL, 5) == Job(VERIFIES[:1])
    nobody = ReadyQueues((), (), (), 99, POOL.ahead)
    assert schedule.next_job("decode", nobody, 5) == Job(POOL.ahead)


@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 40)),
        min_size=1,
        max_size=8,
    ),
    chunk=st.integers(1, 9),
)
def test_with_up_to_three_requests_pdv_runs_the_very_jobs_of_pd(
    arrivals: list[tuple[int, int, int]], chunk: int
) -> None:
    """The same lanes, works and times; the verify lane is never used."""
    requests = [Arrival(n, rounds, float(at)) for n, rounds, at in arrivals]

    def cost(lane: str, job: Job) -> float:
        return 1.0 + sum(work.num_tokens for work in job.works) / 4 + len(lane) / 64

    both: list[list[Ran]] = []
    for schedule in (PrefillDecode(chunk), PrefillDraftVerify(LaneSizes(chunk=chunk))):
        # Requests come in threes, each three when the one before has ended.
        both.append([])
        for first in range(0, len(requests), 3):
            both[-1] += Lanes(schedule, requests[first : first + 3], cost).run()
    assert both[0] == both[1]


def total(schedule: Schedule, *, ahead: bool = False, num_requests: int = 2) -> float:
    """Time of 5 rounds of each request, where drafting and verifying take a second each."""
    requests = [Arrival(1, 5)] * num_requests
    ran = Lanes(schedule, requests, lambda _, job: len(job.stages), drafts_ahead=ahead).run()
    return max(each.ended for each in ran)


def test_two_requests_keep_two_lanes_busy() -> None:
    """One by one, 2 x 5 rounds of two seconds; side by side, half of that and a start."""
    assert total(PrefillDecode(8, batch=1)) == 20
    assert total(PrefillDraftVerify(LaneSizes(8, decode=1, verify=1), threshold=0)) == 11
    assert total(PrefillDecode(8)) == 10
    assert total(PrefillDraftVerify(SIZES)) == 10


def test_every_verification_is_drafted_ahead_of_while_it_runs() -> None:
    lanes = Lanes(DraftAheadLanes(SIZES), [Arrival(1, 5)], lambda _, job: 1.0, drafts_ahead=True)
    told = [(each.lane, each.job.stages[0].name, each.began) for each in lanes.run()]
    for round_index in range(5):
        start = 2.0 * round_index
        assert ("decode", "DRAFT", start) in told
        assert ("verify", "VERIFY", start + 1) in told
        assert ("decode", "AHEAD", start + 1) in told
    assert len(told) == 15


def test_ssd_verifies_two_groups_in_one_pass_where_that_saves_more_than_the_wait() -> None:
    schedule = DraftAheadLanes(SIZES)
    waiting = ReadyQueues((), (), VERIFIES, 99, POOL.ahead, drafting=(7,))
    assert schedule.next_job("verify", waiting, 5) == Job(VERIFIES)
    for size in (1, 2):
        schedule.observe(job_trace("draft", size, 0.1))
        schedule.observe(job_trace("verify", size, 1.0))
    assert schedule.next_job("verify", waiting, 5) is None
    assert schedule.next_job("decode", replace(waiting, drafting=()), 5) == Job(POOL.ahead)
    assert schedule.next_job("verify", replace(waiting, patient=False), 5) == Job(VERIFIES)


@pytest.mark.parametrize("make", [DraftAheadLanes, partial(PrefillDraftVerify, threshold=1)])
def test_who_waited_before_lanes_were_joined_waits_for_nobody_after(
    make: Callable[[LaneSizes], DraftAheadLanes | PrefillDraftVerify],
) -> None:
    schedule = make(SIZES)
    waiting = ReadyQueues((), (), VERIFIES, 99, drafting=(7,))
    for size in (1, 2):
        schedule.observe(job_trace("draft", size, 0.1))
        schedule.observe(job_trace("verify", size, 1.0))
    assert schedule.next_job("verify", waiting, 5) is None
    # By now it would not pay.
    for size in (1, 2) * NEWEST:
        schedule.observe(job_trace("draft", size, 9.0))
    schedule._trial.mode = lambda num_live: 1  # pyright: ignore[reportPrivateUsage]
    assert schedule.next_job("verify", waiting, 5) == Job(VERIFIES)
    schedule._trial.mode = lambda num_live: 0  # pyright: ignore[reportPrivateUsage]
    assert schedule.next_job("verify", waiting, 5) == Job(VERIFIES)


def test_ssd_in_turns_drafts_where_it_verifies_and_never_beside_another_draft() -> None:
    """One job at a time uses the drafter."""
    schedule = DraftAheadLanes(SIZES)
    waiting = ReadyQueues((), DRAFTS, (), 99)
    schedule._trial.mode = lambda num_live: 1  # pyright: ignore[reportPrivateUsage]
    round_of_all = schedule.next_job("verify", waiting, 2)
    assert round_of_all is not None
    assert round_of_all.kind is JobKind.ROUND
    assert schedule.next_job("decode", waiting, 2) is None
    assert schedule.next_job("verify", replace(waiting, num_ahead=1), 2) is None
    assert schedule.next_job("verify", replace(waiting, drafting=(7,)), 2) is None
    assert schedule.next_job("verify", replace(waiting, verify=VERIFIES), 2) == Job(VERIFIES)
    schedule._trial.mode = lambda num_live: 0  # pyright: ignore[reportPrivateUsage]
    assert schedule.next_job("decode", replace(waiting, drafting=(7,)), 2) is None
    assert schedule.next_job("decode", waiting, 2) == Job(DRAFTS)


@pytest.mark.parametrize(
    ("config", "always"),
    [
        (EngineConfig(schedule="ssd"), False),
        (EngineConfig(schedule="ssd", hybrid_threshold=0), True),
        (EngineConfig(schedule="ssd", force_hits=0.0), True),
        *(
            (EngineConfig(schedule="ssd", fallback=name), True)
            for name in ("ngram", "none", "auto")
        ),
    ],
)
def test_who_asks_for_drafting_ahead_keeps_it_where_turns_are_shorter(
    config: EngineConfig, always: bool
) -> None:
    """Ahead a round takes as long as four of its verifications. Without a new draft after a miss
    rounds bring less, so that seconds of them say nothing."""

    def cost(lane: str, job: Job) -> float:
        del lane
        return 4.0 if Stage.AHEAD in job.stages else 1.0

    ran = Lanes(schedule_for(config), [Arrival(1, 60)], cost, drafts_ahead=True).run()
    num_ahead = sum(Stage.AHEAD in each.job.stages for each in ran)
    assert (num_ahead == 60) == always
