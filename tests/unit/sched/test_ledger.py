"""The state machine of the ledger by itself: what each sequence waits for, job after job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.core.errors import ContractError
from outrider.sched.jobs import Job, Ledger, ReadyQueues, Stage, StageItem

NOTHING = ReadyQueues((), (), (), 99)


def pool_of(ledger: Ledger) -> ReadyQueues:
    """Who waits for what."""
    return replace(ledger.pool(num_free_tokens=99), drafting=(), verifying=())


def job(*works: tuple[int, Stage, int]) -> Job:
    return Job(tuple(StageItem(*work) for work in works))


def round_of(seq_id: int, num_tokens: int = 1) -> Job:
    return job((seq_id, Stage.DRAFT, num_tokens), (seq_id, Stage.VERIFY, num_tokens))


def run(ledger: Ledger, *jobs: Job) -> None:
    for each in jobs:
        ledger.start(each)
        ledger.finish(each, lambda seq_id: False)


def verifying(seq_ids: range) -> tuple[Ledger, Job]:
    """A ledger in which all of these are drafted and being verified."""
    ledger = Ledger(drafts_ahead=True)
    for seq_id in seq_ids:
        ledger.add(seq_id, 1)
        run(ledger, job((seq_id, Stage.DRAFT, 1)))
    verify = job(*((seq_id, Stage.VERIFY, 1) for seq_id in seq_ids))
    ledger.start(verify)
    return ledger, verify


def test_a_sequence_waits_for_prefill_while_more_than_its_pending_token_is_unread() -> None:
    ledger = Ledger()
    ledger.add(7, 9)
    for rest, count in ((9, 5), (4, 2), (2, 1)):
        assert pool_of(ledger) == ReadyQueues((StageItem(7, Stage.PREFILL, rest),), (), (), 99)
        run(ledger, job((7, Stage.PREFILL, count)))
    assert pool_of(ledger) == ReadyQueues((), (StageItem(7, Stage.DRAFT, 1),), (), 99)


def test_a_sequence_without_a_prompt_to_read_drafts_at_once() -> None:
    ledger = Ledger()
    ledger.add(0, 1)
    assert pool_of(ledger).draft == (StageItem(0, Stage.DRAFT, 1),)


def test_a_first_round_may_read_all_of_the_rest() -> None:
    ledger = Ledger()
    ledger.add(0, 6)
    run(ledger, job((0, Stage.PREFILL, 2)), round_of(0, 4))
    assert pool_of(ledger) == ReadyQueues((), (StageItem(0, Stage.DRAFT, 1),), (), 99)


def test_drafting_and_verifying_may_be_separate_jobs_even_in_a_first_round() -> None:
    ledger = Ledger()
    ledger.add(0, 3)
    run(ledger, job((0, Stage.DRAFT, 3)))
    assert pool_of(ledger) == ReadyQueues((), (), (StageItem(0, Stage.VERIFY, 3),), 99)
    run(ledger, job((0, Stage.VERIFY, 3)))
    assert pool_of(ledger) == ReadyQueues((), (StageItem(0, Stage.DRAFT, 1),), (), 99)


def test_a_pool_tells_who_drafts_and_who_is_verified() -> None:
    ledger = Ledger()
    for seq_id in range(4):
        ledger.add(seq_id, 1)
    for seq_id in (1, 3):
        ledger.start(job((seq_id, Stage.DRAFT, 1)))
    ledger.finish(job((3, Stage.DRAFT, 1)), lambda _: False)
    ledger.start(job((3, Stage.VERIFY, 1)))
    pool = ledger.pool(99, patient=False)
    assert (pool.drafting, pool.verifying, pool.patient) == ((1,), (3,), False)
    ledger.undo(job((3, Stage.VERIFY, 1)))
    ledger.drop(1)
    assert ledger.pool(99) == replace(ledger.pool(99), drafting=(), verifying=(), patient=True)


def test_whoever_runs_does_not_wait() -> None:
    ledger = Ledger()
    for seq_id, num_unread in enumerate((1, 5)):
        ledger.add(seq_id, num_unread)
    both = job((1, Stage.PREFILL, 2), *((w.seq_id, w.stage, 1) for w in round_of(0).works))
    assert not ledger.is_running(0)
    ledger.start(both)
    assert pool_of(ledger) == NOTHING
    assert ledger.is_running(0)
    assert ledger.is_running(1)
    assert ledger.num_live == 2


def test_prompts_wait_in_the_order_they_came_whatever_was_read_of_them() -> None:
    """Else a long prompt would stand behind those that came after it with every chunk."""
    ledger = Ledger()
    ledger.add(5, 40)
    chunk = job((5, Stage.PREFILL, 8))
    ledger.start(chunk)
    ledger.add(3, 8)
    ledger.add(9, 8)
    ledger.finish(chunk, lambda _: False)
    assert [work.seq_id for work in pool_of(ledger).prefill] == [5, 3, 9]
    run(ledger, job((9, Stage.PREFILL, 4), (5, Stage.PREFILL, 4)))
    assert [work.seq_id for work in pool_of(ledger).prefill] == [5, 3, 9]
    ledger.drop(5)
    ledger.add(5, 2)
    assert [work.seq_id for work in pool_of(ledger).prefill] == [3, 9, 5]


def test_those_that_decode_take_turns() -> None:
    ledger = Ledger()
    for seq_id in range(3):
        ledger.add(seq_id, 1)
    run(ledger, round_of(0))
    assert [work.seq_id for work in pool_of(ledger).draft] == [1, 2, 0]


def test_who_finishes_is_forgotten_and_is_asked_after_a_verification_only() -> None:
    ledger = Ledger()
    ledger.add(0, 4)
    asked: list[int] = []

    def finished(seq_id: int) -> bool:
        asked.append(seq_id)
        return True

    for each in (job((0, Stage.PREFILL, 3)), job((0, Stage.DRAFT, 1)), job((0, Stage.VERIFY, 1))):
        assert asked == []
        ledger.start(each)
        ledger.finish(each, finished)
    assert asked == [0]
    assert ledger.num_live == 0
    assert not ledger.is_running(0)
    ledger.add(0, 1)


def test_a_sequence_is_added_once_and_with_work() -> None:
    ledger = Ledger()
    ledger.add(0, 1)
    for seq_id, num_unread in ((0, 1), (1, 0)):
        with pytest.raises(ContractError):
            ledger.add(seq_id, num_unread)


@pytest.mark.parametrize("stage", ["prefill", "draft", "verify"])
def test_a_dropped_sequence_is_forgotten_wherever_it_waits(stage: str) -> None:
    ledger = Ledger()
    ledger.add(0, 9 if stage == "prefill" else 1)
    if stage == "verify":
        run(ledger, job((0, Stage.DRAFT, 1)))
    assert len(getattr(pool_of(ledger), stage)) == 1
    ledger.drop(0)
    assert ledger.num_live == 0
    assert pool_of(ledger) == NOTHING


def test_a_sequence_may_be_dropped_from_a_job_that_was_undone() -> None:
    ledger = Ledger()
    for seq_id in (0, 1):
        ledger.add(seq_id, 1)
    both = Job((*round_of(0).works, *round_of(1).works))
    ledger.start(both)
    ledger.undo(both)
    ledger.drop(0)
    assert pool_of(ledger).draft == (StageItem(1, Stage.DRAFT, 1),)


def test_a_failed_job_is_undone_in_place() -> None:
    """Its sequences wait for what they waited for before, ahead of those that came since."""
    ledger = Ledger()
    for seq_id, num_unread in ((0, 1), (1, 9), (2, 1), (5, 3)):
        ledger.add(seq_id, num_unread)
    before = pool_of(ledger)
    first = job((5, Stage.DRAFT, 3), (5, Stage.VERIFY, 3), (1, Stage.PREFILL, 4))
    failing = Job((*round_of(0).works, *round_of(2).works, *first.works))
    ledger.start(failing)
    ledger.add(3, 1)
    ledger.add(4, 9)
    ledger.undo(failing)
    after = pool_of(ledger)
    assert after.draft == (*before.draft, StageItem(3, Stage.DRAFT, 1))
    assert after.prefill == (*before.prefill, StageItem(4, Stage.PREFILL, 9))
    assert after.verify == ()
    assert not any(map(ledger.is_running, range(5)))


def test_sequences_in_verification_are_offered_for_drafting_ahead_once() -> None:
    ledger, verify = verifying(range(2))
    offered = tuple(StageItem(seq_id, Stage.AHEAD, 0) for seq_id in (0, 1))
    assert pool_of(ledger) == ReadyQueues((), (), (), 99, ahead=offered)
    ahead = Job(offered[:1])
    ledger.start(ahead)
    assert pool_of(ledger).ahead == offered[1:]
    ledger.finish(verify, lambda _: False)
    assert pool_of(ledger).ahead == ()
    assert [ledger.is_running(seq_id) for seq_id in (0, 1)] == [True, False]
    ledger.finish(ahead, lambda _: False)
    assert not ledger.is_running(0)
    assert [work.seq_id for work in pool_of(ledger).draft] == [0, 1]


def test_nothing_is_offered_where_nobody_drafts_ahead_or_drafts_in_the_same_job() -> None:
    ledger = Ledger()
    ledger.add(0, 1)
    ledger.start(round_of(0))
    assert pool_of(ledger) == NOTHING
    ledger = Ledger(drafts_ahead=True)
    ledger.add(0, 1)
    ledger.start(round_of(0))
    assert pool_of(ledger) == NOTHING


def test_a_failed_draft_ahead_is_not_tried_again() -> None:
    ledger, verify = verifying(range(1))
    ahead = Job(pool_of(ledger).ahead)
    ledger.start(ahead)
    ledger.undo(ahead)
    assert not pool_of(ledger).ahead
    assert ledger.is_running(0)
    ledger.finish(verify, lambda _: False)
    assert [work.seq_id for work in pool_of(ledger).draft] == [0]


def test_a_verification_that_failed_takes_its_offers_back() -> None:
    ledger, verify = verifying(range(2))
    ahead = job((1, Stage.AHEAD, 0))
    ledger.start(ahead)
    ledger.undo(verify)
    assert pool_of(ledger) == ReadyQueues((), (), tuple(verify.works), 99, num_ahead=1)
    assert [ledger.is_running(seq_id) for seq_id in (0, 1)] == [False, True]


def test_who_finishes_or_is_dropped_while_drafted_ahead_still_runs_there() -> None:
    """Its drafter may be in use until that job ends."""
    ledger, verify = verifying(range(2))
    ahead = Job(pool_of(ledger).ahead)
    ledger.start(ahead)
    ledger.finish(verify, lambda seq_id: seq_id == 0)
    ledger.drop(1)
    assert ledger.num_live == 0
    assert ledger.is_running(0)
    assert ledger.is_running(1)
    ledger.finish(ahead, lambda _: False)
    assert not ledger.is_running(0)
    assert not ledger.is_running(1)
