"""Lane orders, decision by decision: by queues, by latencies, by what paid off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.config import LANE_ORDERS
from outrider.core.draft import JobTrace
from outrider.core.errors import ConfigError
from outrider.estimate.acceptance import MOST_SEQUENCES
from outrider.plugins.lanes.lane_order import (
    DRAFTS_FIRST,
    VERDICTS_FIRST,
    DepthOrder,
    FixedOrder,
    LearnedOrder,
    SloOrder,
    order_named,
)
from outrider.sched.jobs import LaneOrder, ReadyQueues, Stage, StageItem

LANES = ("decode", "verify", "prefill")
VERIFY_FIRST = ("verify", "decode", "prefill")


def pool(*, prefill: int = 0, draft: int = 0, verify: int = 0) -> ReadyQueues:
    stages = (Stage.PREFILL, Stage.DRAFT, Stage.VERIFY)
    counts = (prefill, draft, verify)
    works = [
        tuple(StageItem(100 * i + n, stage, 1) for n in range(count))
        for i, (stage, count) in enumerate(zip(stages, counts, strict=True))
    ]
    return ReadyQueues(works[0], works[1], works[2], num_free_tokens=100)


def job(lane: str, began: float, ended: float, seq_ids: tuple[int, ...] = (0,)) -> JobTrace:
    return JobTrace(
        lane=lane,
        kinds=("draft",) if lane == "decode" else (lane,),
        seq_ids=seq_ids,
        num_tokens=len(seq_ids),
        began=began,
        ended=ended,
        queues=(0, 0, 0),
        num_waiting=0,
        num_live=1,
        num_free_tokens=100,
    )


@pytest.mark.parametrize("margin", [0, 2, 5])
@given(draft=st.integers(0, 20), verify=st.integers(0, 20), prefill=st.integers(0, 3))
def test_verifying_goes_first_when_its_queue_is_longer_by_more_than_the_margin(
    margin: int, draft: int, verify: int, prefill: int
) -> None:
    found = DepthOrder(margin).arrange(LANES, pool(prefill=prefill, draft=draft, verify=verify))
    assert found == (VERIFY_FIRST if verify > draft + margin else LANES)


@pytest.mark.parametrize("name", LANE_ORDERS)
@given(
    lanes=st.sampled_from(
        [("main",), ("decode", "prefill"), ("prefill", "decode"), LANES, ("verify", "x", "prefill")]
    ),
    verify=st.integers(0, 9),
)
def test_every_order_keeps_all_lanes_and_reads_prompts_last(
    name: str, lanes: tuple[str, ...], verify: int
) -> None:
    found = order_named(name).arrange(lanes, pool(prefill=1, verify=verify))
    assert sorted(found) == sorted(lanes)
    assert "prefill" not in found[:-1]


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="'deep'") as caught:
        order_named("deep")
    assert caught.value.hint is not None
    assert all(name in caught.value.hint for name in LANE_ORDERS)


def test_the_lane_furthest_behind_its_share_goes_first() -> None:
    order = SloOrder(target_ms=100)
    order.observe(job("decode", 0.0, 0.03))
    assert order.arrange(LANES, pool()) == LANES
    order.observe(job("verify", 0.05, 0.07))
    assert order.lateness("decode", 2) == pytest.approx(2 * 0.03 / 0.1)
    assert order.lateness("verify", 2) == pytest.approx(2 * 0.04 / 0.1)  # with its wait
    assert order.arrange(LANES, pool()) == VERIFY_FIRST


def test_one_slow_job_in_a_hundred_is_not_what_decides() -> None:
    order = SloOrder(target_ms=100)
    for n in range(60):
        slow = 5.0 if n == 30 else 0.02
        order.observe(job("verify", 10 * n, 10 * n + slow, (n,)))
        order.observe(job("decode", 10 * n, 10 * n + 0.03, (1000 + n,)))
    assert order.arrange(LANES, pool()) == LANES


def test_prompts_go_first_when_none_was_read_for_long() -> None:
    order = SloOrder(target_ms=100)
    order.observe(job("prefill", 0.0, 0.5))
    order.observe(job("decode", 0.5, 2.4))
    assert order.arrange(LANES, pool(prefill=1))[-1] == "prefill"
    order.observe(job("decode", 2.4, 2.6))
    assert order.arrange(LANES, pool(prefill=1))[0] == "prefill"
    assert order.arrange(LANES, pool())[-1] == "prefill"
    order.observe(job("prefill", 2.6, 2.7))
    assert order.arrange(LANES, pool(prefill=1))[-1] == "prefill"


def test_old_sequences_are_forgotten() -> None:
    order = SloOrder(target_ms=100)
    num_jobs = 3 * MOST_SEQUENCES
    for n in range(num_jobs):
        order.observe(job("decode", n, n + 0.01, (n,)))
    order.observe(job("verify", num_jobs, num_jobs + 0.01, (0,)))
    assert order.lateness("verify", 1) == pytest.approx(0.1)


def rate_of(order: LaneOrder, verdicts_first: float) -> float:
    """Jobs of a machine on which verifying first makes jobs faster by this factor."""
    first = order.arrange(LANES, pool())[0]
    return verdicts_first if first == "verify" else 1.0


def learned(verdicts_first: float, num_jobs: int) -> tuple[LearnedOrder, list[int]]:
    order = LearnedOrder((FixedOrder(DRAFTS_FIRST), FixedOrder(VERDICTS_FIRST)))
    now, chosen = 0.0, list[int]()
    for _ in range(num_jobs):
        chosen.append(order.current)
        seconds = 1 / rate_of(order, verdicts_first)
        order.observe(job("verify", now, now + seconds))
        now += seconds
    return order, chosen


@pytest.mark.parametrize(("verdicts_first", "best"), [(1.3, 1), (0.8, 0)])
def test_what_pays_is_done_and_the_other_tried_less_and_less(
    verdicts_first: float, best: int
) -> None:
    num_decisions = 400
    _, chosen = learned(verdicts_first, num_decisions * LearnedOrder.JOBS)
    per_decision = chosen[:: LearnedOrder.JOBS]
    num_other = sum(arm != best for arm in per_decision)
    assert num_other <= 20 + 2  # square decisions, and the first of each
    assert sum(arm != best for arm in per_decision[-100:]) <= 3
    assert num_other >= 5


def test_the_same_observations_give_the_same_choices() -> None:
    assert learned(1.1, 2000)[1] == learned(1.1, 2000)[1]


def test_orders_within_it_see_all_jobs() -> None:
    inner = SloOrder(target_ms=100)
    order = LearnedOrder((FixedOrder(), inner))
    order.observe(job("verify", 0.0, 0.05))
    assert inner.lateness("verify", 2) == pytest.approx(1.0)
