"""Schedule and ledger together, without tensors: everything is fed once, and all finish."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.sched.jobs import Job, Pool, Stage, Work
from outrider.sched.ledger import Ledger
from outrider.sched.single import SingleLane


def pool_of(ledger: Ledger) -> Pool:
    return ledger.pool(num_free_tokens=99)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=6),
    chunk=st.integers(1, 9),
    arrivals=st.lists(st.integers(0, 6), min_size=6, max_size=6),
)
def test_every_sequence_is_read_once_and_finishes(
    sizes: list[tuple[int, int]], chunk: int, arrivals: list[int]
) -> None:
    ledger, lane = Ledger(chunk), SingleLane(chunk)
    rounds = {seq_id: count for seq_id, (_, count) in enumerate(sizes)}
    read = dict.fromkeys(rounds, 0)
    waiting = sorted(rounds, key=lambda seq_id: arrivals[seq_id])
    for turn in range(300):
        while waiting and arrivals[waiting[0]] <= turn:
            ledger.add(waiting[0], sizes[waiting[0]][0])
            waiting.pop(0)
        before = pool_of(ledger)
        job = lane.next_job("main", before, ledger.num_live)
        if job is None:
            assert ledger.num_live == 0
            if not waiting:
                break
            continue
        check_job(job, before, chunk)
        ledger.start(job)
        assert all(work.seq_id not in waiting_ids(pool_of(ledger)) for work in job.works)
        for work in job.of(Stage.PREFILL):
            read[work.seq_id] += work.num_tokens
        for work in job.of(Stage.VERIFY):
            read[work.seq_id] += work.num_tokens
            rounds[work.seq_id] -= 1
        ledger.finish(job, lambda seq_id: rounds[seq_id] == 0)
    assert not any(rounds.values())
    assert read == {i: size + count - 1 for i, (size, count) in enumerate(sizes)}


def check_job(job: Job, pool: Pool, chunk: int) -> None:
    """All that decode are in it; prompts and first rounds keep within the chunk."""
    prefill, verify = job.of(Stage.PREFILL), job.of(Stage.VERIFY)
    assert [w.seq_id for w in job.of(Stage.DRAFT)] == [w.seq_id for w in verify]
    ids = [work.seq_id for work in (*prefill, *verify)]
    assert len(set(ids)) == len(ids)
    decoding = {work.seq_id for work in pool.draft if work.num_tokens == 1}
    assert decoding <= {work.seq_id for work in verify}
    longer = sum(work.num_tokens for work in verify if work.num_tokens > 1)
    assert longer + sum(work.num_tokens for work in prefill) <= chunk
    assert pool.verify == ()


def waiting_ids(pool: Pool) -> set[int]:
    return {work.seq_id for work in (*pool.prefill, *pool.draft, *pool.verify)}


def test_a_long_prompt_waits_in_prefill_until_a_round_may_carry_the_rest() -> None:
    ledger = Ledger(4)
    ledger.add(7, 9)
    assert pool_of(ledger).prefill == (Work(7, Stage.PREFILL, 9),)
    for rest in (5, 1):
        job = Job((Work(7, Stage.PREFILL, 4),))
        ledger.start(job)
        assert pool_of(ledger) == Pool((), (), (), 99)
        ledger.finish(job, lambda _: False)
        stage = "prefill" if rest > 4 else "draft"
        assert [work.num_tokens for work in getattr(pool_of(ledger), stage)] == [rest]


def test_decoding_goes_before_first_rounds_and_chunks() -> None:
    pool = Pool(
        prefill=(Work(3, Stage.PREFILL, 50),),
        draft=(Work(1, Stage.DRAFT, 6), Work(0, Stage.DRAFT, 1), Work(2, Stage.DRAFT, 3)),
        verify=(),
        num_free_tokens=99,
    )
    job = SingleLane(8).next_job("main", pool, 4)
    assert job is not None
    # Six of eight are left after sequence 1, so 2 does not fit, and 3 gets the last two.
    assert job.of(Stage.VERIFY) == (Work(0, Stage.VERIFY, 1), Work(1, Stage.VERIFY, 6))
    assert job.of(Stage.PREFILL) == (Work(3, Stage.PREFILL, 2),)


def test_a_long_prompt_is_not_starved_by_younger_first_rounds() -> None:
    ledger = Ledger(8)
    ledger.add(0, 40)
    fed = 0
    for young in range(1, 30):
        ledger.add(young, 8)
        job = SingleLane(8).next_job("main", pool_of(ledger), ledger.num_live)
        assert job is not None
        ledger.start(job)
        fed += sum(work.num_tokens for work in job.of(Stage.PREFILL) if work.seq_id == 0)
        ledger.finish(job, lambda _: True)
        if not any(work.seq_id == 0 for work in pool_of(ledger).prefill):
            break
    assert fed == 32


def test_a_chunk_leaves_a_token_for_the_first_round() -> None:
    pool = Pool((Work(0, Stage.PREFILL, 9),), (), (), 99)
    job = SingleLane(64).next_job("main", pool, 1)
    assert job == Job((Work(0, Stage.PREFILL, 8),))


def test_nothing_to_do_is_no_job() -> None:
    assert SingleLane(4).next_job("main", Pool((), (), (), 99), 0) is None
    assert SingleLane(4).lanes == ("main",)


def test_a_dropped_sequence_is_forgotten_waiting_or_running() -> None:
    ledger = Ledger(4)
    ledger.add(0, 2)
    ledger.add(1, 9)
    job = Job((Work(0, Stage.DRAFT, 2), Work(0, Stage.VERIFY, 2)))
    ledger.start(job)
    ledger.drop(0)
    ledger.drop(1)
    assert ledger.num_live == 0
    assert pool_of(ledger) == Pool((), (), (), 99)


def test_a_sequence_is_added_once_and_with_work() -> None:
    ledger = Ledger(4)
    ledger.add(0, 1)
    for seq_id, num_unread in ((0, 1), (1, 0)):
        with pytest.raises(AssertionError):
            ledger.add(seq_id, num_unread)


def test_drafting_and_verifying_may_be_separate_jobs() -> None:
    """As lanes of their own would take them; in between the sequence waits for VERIFY."""
    ledger = Ledger(4)
    ledger.add(0, 3)
    for stage, waiting in ((Stage.DRAFT, "verify"), (Stage.VERIFY, "draft")):
        job = Job((Work(0, stage, 3),))
        ledger.start(job)
        assert waiting_ids(pool_of(ledger)) == set()
        ledger.finish(job, lambda _: False)
        assert [work.seq_id for work in getattr(pool_of(ledger), waiting)] == [0]
    assert pool_of(ledger).draft == (Work(0, Stage.DRAFT, 1),)


def test_a_failed_job_is_undone_in_place() -> None:
    """Its sequences wait for what they waited for before, ahead of those that came since."""
    ledger = Ledger(4)
    for seq_id, num_unread in ((0, 1), (1, 9), (2, 2)):
        ledger.add(seq_id, num_unread)
    before = pool_of(ledger)
    job = SingleLane(4).next_job("main", before, 3)
    assert job is not None
    ledger.start(job)
    ledger.add(3, 1)
    ledger.add(4, 9)
    ledger.undo(job)
    after = pool_of(ledger)
    assert after.draft == (*before.draft, Work(3, Stage.DRAFT, 1))
    assert after.prefill == (*before.prefill, Work(4, Stage.PREFILL, 9))
    assert after.verify == ()
