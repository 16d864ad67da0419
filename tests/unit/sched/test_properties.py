"""Whatever comes, whenever, at whatever cost: all is read once, all finish, and nobody starves."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from checks.machine import check_long_prompt, check_short_prompts
from doubles.lanes import SCHEDULES, Arrival, Lanes, Ran
from outrider.sched.jobs import Job, LaneSizes, Stage

every_schedule = pytest.mark.parametrize("name", SCHEDULES)
arrivals = st.lists(
    st.builds(Arrival, st.integers(1, 24), st.integers(1, 5), st.integers(0, 20).map(float)),
    min_size=1,
    max_size=10,
)
batches = st.integers(1, 4)
sizes = st.builds(LaneSizes, st.integers(1, 9), batches, batches, batches)


def lanes_of(name: str, sizes: LaneSizes, requests: Sequence[Arrival], seed: int) -> Lanes:
    rng = random.Random(seed)
    return Lanes(
        SCHEDULES[name](sizes),
        requests,
        cost=lambda lane, job: rng.choice([0.0, 0.5, 1.0, 7.0]),
        drafts_ahead=name == "ssd",
    )


def check_read(lanes: Lanes) -> None:
    """Each that was not dropped was read once and ran all of its rounds."""
    for seq_id, request in enumerate(lanes.arrivals):
        if seq_id in lanes.dropped:
            continue
        assert seq_id in lanes.ended
        assert lanes.read[seq_id] == request.num_unread + request.num_rounds - 1


def check_sizes(ran: Sequence[Ran], sizes: LaneSizes) -> None:
    """Lanes keep within what they may do at once."""
    for each in ran:
        prefill, verify = each.job.of(Stage.PREFILL), each.job.of(Stage.VERIFY)
        waiting = {work.seq_id for work in each.pool.prefill}
        fed = sum(work.num_tokens for work in (*prefill, *verify) if work.seq_id in waiting)
        assert fed <= sizes.chunk
        assert len(prefill) <= sizes.prefill
        assert len(each.job.of(Stage.DRAFT)) <= sizes.decode
        assert len(verify) <= max(sizes.verify, sizes.decode)


@every_schedule
@examples(20)
@given(requests=arrivals, sizes=sizes, seed=st.integers(0, 9))
def test_all_is_read_once_and_all_finish(
    name: str, requests: list[Arrival], sizes: LaneSizes, seed: int
) -> None:
    lanes = lanes_of(name, sizes, requests, seed)
    check_sizes(lanes.run(), sizes)
    check_read(lanes)
    assert len(lanes.ended) == len(requests)


@every_schedule
@examples(20)
@given(requests=arrivals, sizes=sizes, seed=st.integers(0, 9), data=st.data())
def test_failed_jobs_and_cancelled_requests_hold_nobody_up(
    name: str, requests: list[Arrival], sizes: LaneSizes, seed: int, data: st.DataObject
) -> None:
    """A failed job is tried again, or goes on without one of its sequences."""
    rng = random.Random(seed)
    lanes = lanes_of(name, sizes, requests, seed)

    def fault(job: Job) -> Sequence[int] | None:
        if rng.random() > 0.2:
            return None
        return rng.sample(job.seq_ids, rng.randint(0, 1))

    lanes.fault = fault
    times = st.integers(0, 60).map(float)
    lanes.drops = data.draw(st.dictionaries(st.integers(0, len(requests) - 1), times, max_size=3))
    lanes.run()
    check_read(lanes)
    assert set(lanes.ended) | lanes.dropped == set(range(len(requests)))


@every_schedule
@examples(6)
@given(
    long=st.integers(10, 80),
    chunk=st.integers(2, 16),
    every=st.sampled_from([0.25, 0.5, 1.0]),
    short=st.integers(2, 16),
)
def test_a_long_prompt_gets_half_of_each_chunk_however_many_short_ones_come(
    name: str, long: int, chunk: int, every: float, short: int
) -> None:
    count = int((long // (chunk // 2) + 6) / every)
    stream = [Arrival(min(short, chunk), 1, index * every) for index in range(count)]
    check_long_prompt(name, long, chunk, stream)


@every_schedule
@examples(15)
@given(
    long=st.integers(50, 200),
    shorts=st.lists(st.integers(2, 20), min_size=1, max_size=6),
    chunk=st.integers(2, 16),
)
def test_short_prompts_pass_a_long_one_by(
    name: str, long: int, shorts: list[int], chunk: int
) -> None:
    check_short_prompts(name, long, shorts, chunk)


@every_schedule
@examples(15)
@given(num_requests=st.integers(1, 12), batch=batches)
def test_those_that_decode_take_turns(name: str, num_requests: int, batch: int) -> None:
    """With fewer places than sequences, nobody is two rounds ahead of anybody."""
    sizes = LaneSizes(8, decode=batch, verify=batch)
    lanes = lanes_of(name, sizes, [Arrival(1, 6)] * num_requests, seed=0)
    lanes.cost = lambda lane, job: 1.0
    done = dict.fromkeys(range(num_requests), 0)
    for each in lanes.run():
        for work in each.job.of(Stage.VERIFY):
            done[work.seq_id] += 1
            assert done[work.seq_id] <= min(done.values()) + 2
