"""The limit on live sequences: it climbs while that pays and the target holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from checks.controllers import trace
from outrider.sched.admission import (
    KNEE_GAIN,
    KNEE_PASSES,
    KNEE_START,
    NUM_PASSES,
    BatchLimit,
    Knee,
)


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


def run_knee(
    knee: Knee,
    pass_ms: Callable[[int], float],
    *,
    num_passes: int = 100,
    num_clients: int = 64,
    reading: bool = False,
) -> list[int]:
    """The limit after each pass, where so many clients always have a request."""
    found: list[int] = []
    for index in range(num_passes):
        batch = min(knee.limit, num_clients)
        for seq_id in range(batch):
            one = trace(
                seq_id,
                0,
                0,
                ms=pass_ms(batch),
                num_waiting=num_clients - batch,
                reading=reading and not seq_id,
            )
            knee.observe(replace(one, pass_index=index, batch_size=batch))
        found.append(knee.limit)
    return found


def test_more_are_live_while_each_doubling_pays() -> None:
    """The limit doubles after each few passes that were timed, up to the highest."""
    found = run_knee(Knee(highest=64), lambda b: 10 + 0.1 * b, num_passes=3 * KNEE_PASSES)
    assert found[KNEE_PASSES - 2] == KNEE_START
    assert found[KNEE_PASSES - 1 :: KNEE_PASSES] == [16, 32, 64]


def test_the_limit_stays_where_one_more_costs_what_it_brings() -> None:
    """Up to sixteen rows cost what one does, and each beyond costs its share."""
    found = run_knee(Knee(highest=64), lambda b: 10.0 * max(b, 16) / 16, num_passes=300)
    assert max(found) == 32
    assert found.count(32) < len(found) / 2
    assert found[-1] == 16


def test_what_the_limit_gives_up_is_little() -> None:
    """Whatever a row costs, no limit above the one that is found has much more throughput."""
    for row in (0.0, 0.05, 0.2, 1.0, 5.0):

        def pass_ms(batch: int, row: float = row) -> float:
            return 10 + row * batch

        settled = run_knee(Knee(highest=64), pass_ms, num_passes=60)[-1]
        rates = {batch: batch / pass_ms(batch) for batch in (8, 16, 32, 64)}
        assert rates[settled] > max(rates.values()) / KNEE_GAIN**2


def test_a_slow_moment_does_not_hold_the_limit_for_ever() -> None:
    """Passes of sixteen are slow while others use the machine, and later they are not."""
    knee = Knee(highest=64)
    run_knee(knee, lambda b: 10.0 if b <= 8 else 40.0, num_passes=60)
    assert knee.limit == 8
    assert run_knee(knee, lambda _: 10.0, num_passes=300)[-1] == 64


def test_where_every_pass_reads_prompts_more_are_live_too() -> None:
    assert run_knee(Knee(highest=64), lambda b: 10.0, reading=True)[-1] == 64


def test_where_nobody_waits_no_more_may_be_live() -> None:
    assert set(run_knee(Knee(highest=64), lambda b: 10.0, num_clients=4)) == {8}


def test_the_highest_may_be_low() -> None:
    assert set(run_knee(Knee(highest=3), lambda b: 10.0)) == {3}
