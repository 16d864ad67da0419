"""The limit on live sequences: it climbs while that pays and the target holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from checks.controllers import trace
from outrider.sched.batch_limit import NUM_PASSES, BatchLimit


def play(
    limit: BatchLimit,
    pass_ms: Callable[[int], float],
    *,
    num_looks: int = 60,
    num_waiting: int = 9,
) -> list[int]:
    """The limit after each look; each sequence gets one token a pass of `pass_ms(batch)`."""
    found: list[int] = []
    for index in range(num_looks * NUM_PASSES):
        batch = limit.limit
        for seq_id in range(batch):
            one = trace(seq_id, 0, 0, ms=pass_ms(batch), num_waiting=num_waiting)
            limit.observe(replace(one, pass_index=index, batch_size=batch))
        if index % NUM_PASSES == NUM_PASSES - 1:
            found.append(limit.limit)
    return found


def test_it_climbs_while_throughput_does() -> None:
    """Sixteen sequences take no longer than one; beyond, each adds its share."""
    found = play(BatchLimit(highest=64, target_ms=1000), lambda b: 10 + 10 * max(b - 16, 0) / 16)
    assert max(found) <= 24
    assert 14 <= found[-1] <= 21
    assert (
        found == sorted(found[: found.index(max(found)) + 1]) + found[found.index(max(found)) + 1 :]
    )


def test_it_stays_below_the_latency_target() -> None:
    """A token takes 10 + b milliseconds, which pays for ever and must not."""
    found = play(BatchLimit(highest=64, target_ms=30), lambda b: 10 + b)
    assert 15 <= found[-1] <= 25
    late = [limit for limit in found[20:] if limit > 20]
    assert len(late) <= len(found[20:]) / 4


def test_it_shrinks_to_one_and_no_further() -> None:
    limit = BatchLimit(highest=64, target_ms=5, start=40)
    found = play(limit, lambda b: 10.0, num_looks=30)
    assert found[0] == 30
    assert found[-1] == 1


def test_it_never_passes_the_highest() -> None:
    found = play(BatchLimit(highest=10, target_ms=1000), lambda b: 10.0)
    assert max(found) == found[-1] == 10


def test_where_nobody_waits_it_stays() -> None:
    limit = BatchLimit(highest=64, target_ms=1000, start=8)
    assert set(play(limit, lambda b: 10.0, num_waiting=0)) == {8}


def test_a_step_that_does_not_pay_is_tried_less_and_less() -> None:
    found = play(BatchLimit(highest=64, target_ms=1000, start=8), lambda b: 10.0 * b, num_looks=120)
    steps = [look for look, limit in enumerate(found) if limit > 8]
    gaps = [b - a for a, b in pairwise(steps)]
    assert all(found[look + 1] == 8 for look in steps)
    assert gaps == sorted(gaps)
    assert gaps[-1] > 3 * gaps[0]


def test_what_is_measured_is_the_whole_pass_once() -> None:
    """A batch of four that takes as long as one alone has four times its throughput."""
    limit = BatchLimit(highest=4, target_ms=1000)
    assert play(limit, lambda b: 10.0, num_looks=4) == [2, 3, 4, 4]


def test_passes_that_only_read_prompts_are_left_out() -> None:
    limit = BatchLimit(highest=64, target_ms=1, start=8)
    for index in range(3 * NUM_PASSES):
        reading = trace(0, 0, 0, ms=500, reading=True, num_waiting=9)
        limit.observe(replace(reading, pass_index=index))
    assert limit.limit == 8


def test_records_that_never_come_are_forgotten() -> None:
    limit = BatchLimit(highest=64, target_ms=1000)
    for index in range(1000):
        limit.observe(replace(trace(0, 0, 0, num_waiting=9), pass_index=index, batch_size=2))
    assert limit.limit == 1
    assert play(limit, lambda b: 10.0, num_looks=3) == [2, 3, 4]
