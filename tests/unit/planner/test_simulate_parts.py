"""What a simulation is made of: lanes that share a memory, chance, costs, requests."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from doubles.planned import calibration, drafter
from outrider.core.errors import ConfigError
from outrider.estimate.cost import Curve
from outrider_lab.planner.calibration import Calibration, DrafterCosts, PassCosts
from outrider_lab.simulator.engine import SharedLanes
from outrider_lab.simulator.events import (
    Chance,
    Drafted,
    Fed,
    JobCosts,
    round_times,
    widest_fan_out,
)
from outrider_lab.simulator.load import Lengths, poisson, requests_of

works = st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5)), min_size=1, max_size=5)


def ends(jobs: list[tuple[float, float]], contention: float) -> list[float]:
    """When jobs (start, seconds), each on a lane of its own, end."""
    lanes = SharedLanes[int](contention)
    found = [0.0] * len(jobs)
    left = sorted(range(len(jobs)), key=lambda i: jobs[i][0])
    while left or lanes.busy:
        now = min(lanes.next_end, jobs[left[0]][0] if left else math.inf)
        for i in lanes.ended(now):
            found[i] = now
        while left and jobs[left[0]][0] <= now:
            i = left.pop(0)
            lanes.start(f"lane {i}", i, jobs[i][1], now=now)
    return found


@examples(40)
@given(works)
def test_lanes_with_devices_of_their_own_do_not_meet(jobs: list[tuple[float, float]]) -> None:
    assert ends(jobs, 0.0) == pytest.approx([start + length for start, length in jobs])


@examples(40)
@given(works)
def test_one_memory_is_never_outrun(jobs: list[tuple[float, float]]) -> None:
    """All that is started by then takes the time of its parts, one after another, and no more."""
    last = 0.0
    for start, length in sorted(jobs):
        last = max(last, start) + length
    assert max(ends(jobs, 1.0)) == pytest.approx(last)


@examples(40)
@given(works, st.floats(0, 1))
def test_contention_lies_between_both(jobs: list[tuple[float, float]], contention: float) -> None:
    between = ends(jobs, contention)
    for least, some, most in zip(ends(jobs, 0.0), between, ends(jobs, 1.0), strict=True):
        assert least <= some * (1 + 1e-9)
        assert some <= most * (1 + 1e-9)


def test_what_takes_no_time_holds_nobody_up() -> None:
    lanes = SharedLanes[str](1.0)
    lanes.start("verify", "pass", 1.0, now=0.0)
    lanes.start("decode", "look up", 0.0, now=0.5)
    assert lanes.next_end == 0.5
    assert lanes.ended(0.5) == ["look up"]
    assert lanes.next_end == 1.0
    assert lanes.stopped() == ["pass"]
    assert not lanes.busy


@pytest.mark.parametrize("rates", [(0.8,), (0.9, 0.5, 0.2)])
def test_drafts_are_kept_with_the_rates_of_their_places(rates: tuple[float, ...]) -> None:
    chance, total = Chance(rates, seed=3), 3000
    counts = Counter(chance.num_kept(7, start, 4) for start in range(total))
    places = (*rates, *[rates[-1]] * 4)[:4]
    reached = 1.0
    for place, rate in enumerate(places, start=1):
        reached *= rate
        share = sum(count for kept, count in counts.items() if kept >= place) / total
        assert share == pytest.approx(reached, abs=0.025)
    assert chance.tokens_per_round(4) == pytest.approx(
        sum(kept * count for kept, count in counts.items()) / total + 1, rel=0.02
    )


@examples(40)
@given(st.integers(0, 999), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_a_longer_draft_keeps_what_a_shorter_one_would(start: int, rates: list[float]) -> None:
    chance = Chance(tuple(rates))
    kept = [chance.num_kept(1, start, depth) for depth in range(8)]
    assert kept == [min(depth, kept[-1]) for depth in range(8)]


def test_chance_may_be_taken_away() -> None:
    for start in range(50):
        assert Chance((1.0,)).num_kept(0, start, 6) == 6
        assert Chance((0.0,)).num_kept(0, start, 6) == 0
        assert Chance((1.0, 1.0, 0.0)).num_kept(0, start, 6) == 2
        assert Chance((0.5,), p_hit=1.0).is_hit(0, start)
        assert not Chance((0.5,), p_hit=0.0).is_hit(0, start)


@pytest.mark.parametrize(
    ("rates", "p_hit"), [((1.5,), 0.0), ((-0.1,), 0.0), ((math.nan,), 0.0), ((0.5,), 2.0), ((), 0)]
)
def test_what_is_no_probability_is_refused(rates: tuple[float, ...], p_hit: float) -> None:
    with pytest.raises(ConfigError) as caught:
        Chance(rates, p_hit=p_hit)
    assert caught.value.hint


def test_a_job_takes_what_the_calibration_says() -> None:
    """Of two sequences that were drafted for, and a chunk of a prompt."""
    rows = Curve(((1.0, 1.0), (101.0, 2.0)))
    draft = Curve(((1.0, 0.1), (5.0, 0.5)))
    known = Calibration(
        machine="paper",
        target_name="target",
        target=PassCosts(rows, per_context=0.001, per_read=0.0001),
        drafters=(DrafterCosts("model", ((1, draft), (4, draft.scaled(2))), per_context=0.01),),
        overhead=0.5,
        host=0.05,
        rule=0.003,
    )
    costs = JobCosts(known, known.drafters[0], fan_out=2)
    fed = [Fed(5, 100, judged=5), Fed(3, 40, judged=3), Fed(13, 8)]
    by_rows = 1 + (5 + 3 + 13 - 1) / 100
    reads = 5 * 100 + 3 * 40 + 13 * 8
    assert costs.pass_seconds(fed) == pytest.approx(
        0.5 + 3 * 0.05 + 8 * 0.003 + by_rows + 0.001 * 148 + 0.0001 * reads
    )
    drafts = [Drafted(4, 100), Drafted(2, 40), Drafted(0, 900)]
    assert costs.draft_seconds(drafts) == known.drafters[0].seconds(4, 2, 140)
    assert costs.ahead_seconds(drafts) == known.drafters[0].seconds(5, 4, 140)
    assert costs.draft_seconds([Drafted(0, 5)]) == costs.pass_seconds([]) == 0
    assert JobCosts(known, None).draft_seconds(drafts) == 0


def test_the_window_of_a_verification() -> None:
    """Ten steps of a tenth fit; of K = 4 and the step before it, every branch while it is free."""
    costs = JobCosts(calibration(1.0, 0.1), drafter(0.1))
    times = round_times(costs, batch=2, context=100, k=4)
    assert (times.plain, times.verify) == (1.0, 1.0)
    assert times.window_steps == pytest.approx(10)
    assert times.draft_share == pytest.approx(0.4)
    assert times.ahead == pytest.approx(0.5)
    assert widest_fan_out(costs, batch=2, context=100, k=4, most=50) == 50
    assert widest_fan_out(costs, batch=2, context=100, k=10, most=50) == 0
    step = Curve(((1.0, 0.1), (64.0, 6.4)))
    wide = DrafterCosts("model", ((1, step), (16, step.scaled(16))))
    # A step of n branches takes n tenths: two of them leave K + 1 = 5 steps in a second.
    assert (
        widest_fan_out(JobCosts(calibration(1.0, 0.1), wide), batch=1, context=0, k=4, most=50) == 2
    )


def test_lengths_are_spread_around_their_means() -> None:
    lengths = Lengths(100, 50, spread=0.5)
    found = requests_of(lengths, 400, seed=1)
    assert found == requests_of(lengths, 400, seed=1)
    assert found[:9] == requests_of(lengths, 9, seed=1)
    assert {50 <= one.num_prompt <= 150 for one in found} == {True}
    assert {25 <= one.num_output <= 75 for one in found} == {True}
    assert sum(one.num_output for one in found) / 400 == pytest.approx(50, rel=0.05)
    assert {one.num_prompt for one in requests_of(Lengths(7, 1), 5, seed=0)} == {7}
    assert min(one.num_output for one in requests_of(Lengths(1, 1, 0.99), 50, seed=0)) == 1


def test_poisson_arrivals_come_at_their_rate() -> None:
    load = poisson(requests_of(Lengths(5, 5), 1000, seed=2), 4.0, seed=2)
    moments = [one.arrives for one in load.requests]
    assert moments == sorted(moments)
    assert load.in_flight is None
    assert moments[-1] == pytest.approx(250, rel=0.1)
    gaps = [after - before for before, after in pairwise(moments)]
    # Of an exponential stats the share above its mean is 1 / e.
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.04)
    assert load.num_tokens == 5000
