"""One lane: whole rounds of all that decode, first rounds and chunks beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.config import EngineConfig
from outrider.sched.jobs import (
    Job,
    LaneSizes,
    Ledger,
    ReadyQueues,
    SingleLane,
    Stage,
    StageItem,
    lane_job,
    single_lane,
)


def pool_of(unread: list[int], num_decoding: int = 0) -> ReadyQueues:
    draft = tuple(StageItem(100 + i, Stage.DRAFT, 1) for i in range(num_decoding))
    return ReadyQueues(
        tuple(StageItem(i, Stage.PREFILL, n) for i, n in enumerate(unread)), draft, (), 99
    )


def next_job(lane: SingleLane, pool: ReadyQueues) -> Job:
    job = lane.next_job("main", pool, len(pool.prefill) + len(pool.draft))
    assert job is not None
    return job


def verified(job: Job) -> dict[int, int]:
    assert [w.seq_id for w in job.of(Stage.DRAFT)] == [w.seq_id for w in job.of(Stage.VERIFY)]
    return {work.seq_id: work.num_tokens for work in job.of(Stage.VERIFY)}


def read(job: Job) -> dict[int, int]:
    return {work.seq_id: work.num_tokens for work in job.of(Stage.PREFILL)}


def test_a_prompt_whose_rest_fits_is_read_in_the_pass_of_its_first_round() -> None:
    job = next_job(SingleLane(8), pool_of([8]))
    assert (verified(job), read(job)) == ({0: 8}, {})


def test_a_longer_prompt_is_read_in_chunks() -> None:
    job = next_job(SingleLane(8), pool_of([9]))
    assert (verified(job), read(job)) == ({}, {0: 8})


def test_first_rounds_and_chunks_share_the_chunk_beside_those_that_decode() -> None:
    job = next_job(SingleLane(8), pool_of([50, 3, 9], num_decoding=2))
    assert verified(job) == {100: 1, 101: 1, 1: 3}
    assert read(job) == {0: 4, 2: 1}


def test_no_more_rounds_than_allowed() -> None:
    """Who has no place reads all but the pending token, and decodes with the next job."""
    job = next_job(SingleLane(16, batch=2), pool_of([3, 4], num_decoding=1))
    assert (verified(job), read(job)) == ({100: 1, 0: 3}, {1: 3})
    job = next_job(SingleLane(16, batch=2), pool_of([3], num_decoding=3))
    assert (verified(job), read(job)) == ({100: 1, 101: 1}, {0: 2})


def test_no_more_prompts_than_allowed() -> None:
    job = next_job(SingleLane(16, prefill_batch=1), pool_of([3, 4], num_decoding=1))
    assert (verified(job), read(job)) == ({100: 1, 0: 3}, {})


@given(
    unread=st.lists(st.integers(2, 30), max_size=6),
    num_decoding=st.integers(0, 5),
    chunk=st.integers(1, 20),
    batch=st.integers(1, 6),
)
def test_a_job_keeps_within_its_sizes(
    unread: list[int], num_decoding: int, chunk: int, batch: int
) -> None:
    pool = pool_of(unread, num_decoding)
    job = SingleLane(chunk, batch=batch).next_job("main", pool, 9)
    if job is None:
        assert not pool.prefill
        assert not pool.draft
        return
    decoding = [work.seq_id for work in pool.draft[:batch]]
    assert list(verified(job))[: len(decoding)] == decoding
    assert len(verified(job)) <= batch
    fed = sum(n for i, n in verified(job).items() if i < 100) + sum(read(job).values())
    assert fed <= chunk
    assert all(1 <= count < unread[i] for i, count in read(job).items())
    assert all(count == unread[i] for i, count in verified(job).items() if i < 100)
    assert not set(read(job)) & set(verified(job))


def test_nothing_to_do_is_no_job() -> None:
    assert SingleLane(4).next_job("main", pool_of([]), 0) is None
    assert SingleLane(4).lanes == ("main",)


def test_the_sizes_are_those_of_the_settings() -> None:
    config = EngineConfig(prefill_chunk=16, batch_size=3, prefill_batch=1)
    job = next_job(single_lane(config), pool_of([40, 40], num_decoding=5))
    assert (len(verified(job)), read(job)) == (3, {0: 16})
    job = next_job(single_lane(EngineConfig(batch_size=3, decode_batch=2)), pool_of([], 5))
    assert len(verified(job)) == 2


def test_a_chunk_is_larger_while_nothing_decodes() -> None:
    lane = single_lane(EngineConfig())
    assert read(next_job(lane, pool_of([2000]))) == {0: 512}
    assert read(next_job(lane, pool_of([2000], num_decoding=1))) == {0: 256}
    assert read(next_job(lane, replace(pool_of([2000]), most_prompt_tokens=40))) == {0: 40}


@pytest.mark.parametrize("of_others", ["verify", "ahead", "drafting", "verifying"])
def test_a_lane_reads_less_while_other_lanes_decode(of_others: str) -> None:
    def num_read(pool: ReadyQueues) -> int:
        job = lane_job("prefill", pool, LaneSizes(None))
        assert job is not None
        return job.works[0].num_tokens

    alone = pool_of([2000])
    works = (100,) if of_others.endswith("ing") else (StageItem(100, Stage.VERIFY, 1),)
    shared = replace(alone, **{of_others: works})
    assert (num_read(alone), num_read(shared)) == (512, 256)


def test_a_chunk_that_is_set_is_the_same_next_to_rounds() -> None:
    lane = single_lane(EngineConfig(prefill_chunk=400))
    assert read(next_job(lane, pool_of([2000]))) == {0: 400}
    assert read(next_job(lane, pool_of([2000], num_decoding=1))) == {0: 400}


def test_a_request_that_comes_while_a_prompt_is_read_decodes_between_small_chunks() -> None:
    lane, ledger, found = single_lane(EngineConfig()), Ledger(), list[tuple[int, int]]()
    ledger.add(0, 2000)
    for number in range(4):
        job = next_job(lane, ledger.pool(9999))
        found.append((read(job)[0], len(verified(job))))
        ledger.start(job)
        ledger.finish(job, lambda _: False)
        if not number:
            ledger.add(1, 5)
    # The second pass has the whole of the other prompt, and its first round.
    assert found == [(512, 0), (507, 1), (256, 1), (256, 1)]
