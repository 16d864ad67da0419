"""When a lane waits for the other's sequences, and for how long at most."""

from __future__ import annotations

import pytest

from doubles.timelines import job_trace
from outrider.plugins.lanes.overlap import FORGOTTEN_AFTER, BatchMerger, StageSeconds
from outrider.sched.jobs import LaneSizes, ReadyQueues, Stage, StageItem

VERIFY, DECODE = "verify", "decode"


def works(stage: Stage, *seq_ids: int) -> tuple[StageItem, ...]:
    return tuple(StageItem(seq_id, stage, 1) for seq_id in seq_ids)


def pool(
    draft: tuple[int, ...] = (),
    verify: tuple[int, ...] = (),
    drafting: tuple[int, ...] = (),
    verifying: tuple[int, ...] = (),
    *,
    patient: bool = True,
) -> ReadyQueues:
    waiting = works(Stage.DRAFT, *draft), works(Stage.VERIFY, *verify)
    return ReadyQueues((), *waiting, 99, (), drafting, verifying, patient)


def lanes(*, fixed: float, each: float = 0.0, draft: float = 0.5, most: int = 8) -> BatchMerger:
    """That saw drafts and verifications of one and three sequences."""
    found = BatchMerger(LaneSizes(chunk=8, decode=most, verify=most))
    for size in (1, 3):
        found.observe(job_trace("draft", size, draft))
        found.observe(job_trace("verify", size, fixed + each * size))
    return found


def test_a_line_tells_what_a_job_takes_whoever_it_is_for() -> None:
    seconds = StageSeconds()
    assert seconds.mean(1) is None
    assert seconds.longest(1) is None
    seconds.add(1, 3.0)
    assert (seconds.mean(9), seconds.fixed(), seconds.longest(9)) == (3.0, None, 3.0)
    seconds.add(3, 7.0)
    assert seconds.mean(5) == pytest.approx(11)
    assert seconds.fixed() == pytest.approx(1)
    assert (seconds.longest(3), seconds.longest(5)) == (7.0, pytest.approx(11))


def test_sizes_that_were_not_seen_for_long_do_not_bend_the_line() -> None:
    seconds = StageSeconds()
    seconds.add(1, 9.0)
    for size in (2, 4) * (FORGOTTEN_AFTER // 2):
        assert seconds.longest(1) == 9.0
        seconds.add(size, float(size))
    assert seconds.fixed() == pytest.approx(0)
    assert seconds.mean(8) == pytest.approx(8)


def test_nothing_is_reckoned_where_nobody_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    own = lanes(fixed=9.0)
    monkeypatch.delattr(StageSeconds, "_line")
    assert not own.holds(VERIFY, pool(verify=(1,), drafting=(2,), patient=False))
    assert not own.holds(DECODE, pool(draft=(1,), verifying=(2,), patient=False))


def test_nothing_is_fixed_below_nought_and_more_sequences_never_take_less() -> None:
    steep, falling = StageSeconds(), StageSeconds()
    for size in (2, 4):
        steep.add(size, float(size**2))
        falling.add(size, 1.0 / size)
    assert steep.fixed() == pytest.approx(0)
    assert falling.mean(9) == falling.mean(1) == falling.fixed() == pytest.approx(0.375)


@pytest.mark.parametrize(("fixed", "waits"), [(0.4, False), (0.6, True)])
def test_a_verification_waits_for_drafts_that_take_less_than_a_pass_saved(
    fixed: float, waits: bool
) -> None:
    for coming in (pool(verify=(1,), drafting=(2,)), pool(draft=(2,), verify=(1,))):
        assert lanes(fixed=fixed, each=0.1).holds(VERIFY, coming) == waits


def test_drafts_wait_for_verdicts_where_a_draft_saved_is_longer() -> None:
    quick, slow = lanes(fixed=0.4), lanes(fixed=0.6)
    for coming in (pool(draft=(1,), verifying=(2,)), pool(draft=(1,), verify=(2,))):
        assert quick.holds(DECODE, coming)
        assert not slow.holds(DECODE, coming)


def test_nobody_waits_for_nobody_for_no_room_or_where_nothing_else_runs() -> None:
    for nothing in (
        pool(verify=(1,)),
        pool(drafting=(2,)),
        pool(verify=(1,), drafting=(2,), patient=False),
    ):
        assert not lanes(fixed=9.0).holds(VERIFY, nothing)
    assert not lanes(fixed=9.0, most=1).holds(VERIFY, pool(verify=(1,), drafting=(2,)))
    fresh = BatchMerger(LaneSizes(chunk=8))
    assert not fresh.holds(VERIFY, pool(verify=(1,), drafting=(2,)))


def test_a_wait_ends_with_those_for_whom_it_began() -> None:
    own = lanes(fixed=9.0)
    assert own.holds(VERIFY, pool(verify=(1,), drafting=(2,), draft=(5,)))
    assert own.holds(VERIFY, pool(verify=(1, 6), drafting=(2, 3)))
    # Another has begun meanwhile, and is not waited for; it is by the next job.
    assert not own.holds(VERIFY, pool(verify=(1, 2, 6), drafting=(3,)))
    assert own.holds(VERIFY, pool(verify=(1, 2, 6), drafting=(3,)))


def test_a_wait_that_was_left_is_none_when_lanes_are_parted_again() -> None:
    own, waiting = lanes(fixed=9.0), pool(verify=(1,), drafting=(2,))
    assert own.holds(VERIFY, waiting)
    for _ in range(8):
        for size in (1, 3):
            own.observe(job_trace("draft", size, 99.0))
    assert own.holds(VERIFY, waiting)
    own.forget_waits()
    assert not own.holds(VERIFY, waiting)


def test_lanes_never_wait_for_each_other() -> None:
    own = lanes(fixed=9.0, draft=0.5)
    assert own.holds(VERIFY, pool(draft=(2,), verify=(1,)))
    for _ in range(8):
        for size in (1, 3):
            own.observe(job_trace("draft", size, 99.0))
    assert not own.holds(DECODE, pool(draft=(2,), verify=(1,)))
    assert own.holds(VERIFY, pool(draft=(2,), verify=(1,)))


def test_who_waits_for_a_draft_may_wait_for_the_end_of_one_ahead_first() -> None:
    own = lanes(fixed=1.0)
    own.observe(job_trace("ahead", 2, 1.3))
    assert own.holds(VERIFY, pool(draft=(2,), verify=(1,)))
    late = lanes(fixed=1.0)
    late.observe(job_trace("ahead", 2, 1.4))
    assert not late.holds(VERIFY, pool(draft=(2,), verify=(1,)))
    assert late.holds(VERIFY, pool(drafting=(2,), verify=(1,)))


def test_jobs_of_two_stages_and_failed_ones_tell_nothing() -> None:
    own = lanes(fixed=0.4, each=0.1)
    own.observe(job_trace("draft,verify", 2, 50.0))
    own.observe(job_trace("verify", 2, 50.0, num_failed=1))
    assert own.in_turns(2) == pytest.approx(0.5 + 0.6)
    own.observe(job_trace("draft", 2, 0.0))
    own.observe(job_trace("draft", 2, 0.75))
    assert own.in_turns(2) == pytest.approx(0.75 + 0.6)


@pytest.mark.parametrize(("fixed", "draft", "parts"), [(0.3, 0.5, True), (0.6, 0.5, False)])
def test_a_whole_batch_is_parted_where_each_lane_hides_more_than_it_pays_twice(
    fixed: float, draft: float, parts: bool
) -> None:
    own = lanes(fixed=fixed, each=0.3, draft=draft)
    assert own.parts(pool(draft=(1, 2, 3))) == parts
    for other in (
        pool(draft=(1,)),
        pool(draft=(1, 2), verify=(3,)),
        pool(draft=(1, 2), drafting=(3,)),
        pool(draft=(1, 2), verifying=(3,)),
    ):
        assert not own.parts(other)
    # What drafts pay twice is more than a verification hides.
    assert not lanes(fixed=0.1, each=0.01, draft=0.5).parts(pool(draft=(1, 2, 3)))
    assert not BatchMerger(LaneSizes(chunk=8)).parts(pool(draft=(1, 2, 3)))
