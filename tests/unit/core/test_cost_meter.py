"""Costs learnt from rounds: what is counted, what is left out, and how noise and drift are met."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from checks.controllers import trace
from outrider.core.draft import RoundTrace
from outrider.estimate.cost import WINDOW, CostMeter, CostTable


def passed(
    depths: Sequence[int], *, target: float, draft: float = 0.0, accept: float = 0.0
) -> list[RoundTrace]:
    """The traces of one pass over rounds that drafted `depths`."""
    return [
        replace(
            trace(seq_id, depth, depth // 2),
            batch_size=len(depths),
            draft_seconds=draft,
            verify_seconds=target,
            accept_seconds=accept,
        )
        for seq_id, depth in enumerate(depths)
    ]


def table(meter: CostMeter) -> CostTable:
    found = meter.table()
    assert found is not None
    return found


def test_nothing_is_known_before_the_first_pass() -> None:
    assert CostMeter().table() is None


def test_rows_are_those_of_the_whole_pass() -> None:
    meter = CostMeter()
    meter.observe(passed([0, 0], target=1.0), caught_up=True)
    meter.observe(passed([3, 1], target=2.0, draft=0.6, accept=0.5), caught_up=True)
    found = table(meter)
    assert found.target.points == ((2, 1.0), (6, 2.0))
    # What is not the pass goes by sequences: nothing once, a quarter of a second each once.
    assert found.host == pytest.approx(0.125)
    assert found.drafts[0][0] == 2
    assert found.draft_seconds(3, 2) == pytest.approx(0.6)
    assert found.draft_seconds(1, 2) == pytest.approx(0.2)  # no draft takes no time


def test_before_a_draft_was_measured_it_is_a_tenth_of_a_pass() -> None:
    meter = CostMeter()
    meter.observe(passed([0], target=2.0), caught_up=True)
    assert table(meter).draft_seconds(3, 1) == pytest.approx(0.6)


def test_prompts_say_nothing_of_verification() -> None:
    meter = CostMeter()
    for depth in (0, 2, 4):
        meter.observe(passed([depth], target=1.0, draft=0.1 * depth), caught_up=True)
    before = meter.table()
    for _ in range(100):
        rounds = passed([2, 2], target=9.0, draft=5.0)
        meter.observe([replace(rounds[0], num_prompt_tokens=7), rounds[1]], caught_up=True)
        reading = replace(trace(5, 0, 0, reading=True), verify_seconds=9.0)
        meter.observe([*rounds, reading], caught_up=True)
        meter.observe([reading], caught_up=True)
    assert meter.table() == before


def test_a_drafter_that_had_to_catch_up_says_nothing_of_drafting() -> None:
    meter = CostMeter()
    for _ in range(5):
        meter.observe(passed([4], target=1.0, draft=0.4), caught_up=True)
    for _ in range(50):
        meter.observe(passed([4], target=1.0, draft=9.0), caught_up=False)
    assert table(meter).draft_seconds(4, 1) == pytest.approx(0.4)


def test_interruptions_move_nothing() -> None:
    meter = CostMeter()
    for index in range(60):
        slow = 50.0 if index % 5 == 4 else 1.0
        meter.observe(passed([0], target=slow), caught_up=True)
        meter.observe(passed([4], target=slow, draft=slow), caught_up=True)
    found = table(meter)
    assert found.target_seconds(1) == pytest.approx(1.0)
    assert found.target_seconds(5) == pytest.approx(1.0)
    assert found.draft_seconds(4, 1) == pytest.approx(1.0)


def test_few_times_that_scatter_count_for_the_line_through_all() -> None:
    """A pass takes 1 + rows / 10; nine rows were seen thrice, and slow each time."""
    chance = random.Random(3)
    meter = CostMeter()
    for _ in range(WINDOW):
        for depth in (0, 2, 4):
            noise = chance.lognormvariate(0, 0.3)
            meter.observe(passed([depth], target=noise * (1.1 + 0.1 * depth)), caught_up=True)
    for _ in range(3):
        meter.observe(passed([8], target=2.9 * meter.level), caught_up=True)
    assert 1.8 < table(meter).target_seconds(9) / meter.level < 2.4


def test_times_that_do_not_scatter_are_believed_off_the_line() -> None:
    meter = CostMeter()
    for _ in range(20):
        for depth, seconds in ((0, 1.0), (2, 1.0), (4, 1.0), (6, 4.0), (8, 4.0)):
            meter.observe(passed([depth], target=seconds), caught_up=True)
    assert [table(meter).target_seconds(rows) for rows in (1, 5, 7, 9)] == pytest.approx(
        [1.0, 1.0, 4.0, 4.0]
    )


def test_what_was_measured_long_ago_drifts_along() -> None:
    """The machine gets three times slower while only four tokens are drafted."""
    meter = CostMeter()
    for _ in range(30):
        meter.observe(passed([0], target=1.0), caught_up=True)
    for index in range(300):
        slow = 1.0 if index < 60 else 3.0
        meter.observe(passed([4], target=slow * 1.2, draft=slow * 0.4), caught_up=True)
    found = table(meter)
    assert found.target_seconds(5) == pytest.approx(3.6, rel=0.05)
    assert found.target_seconds(1) == pytest.approx(3.0, rel=0.05)


def test_costs_without_drift_stay_where_they_are() -> None:
    """The common level does not wander with noise."""
    chance = random.Random(1)
    meter = CostMeter()
    for _ in range(30):
        meter.observe(passed([0], target=chance.lognormvariate(0, 0.1)), caught_up=True)
    for _ in range(3000):
        target = 1.2 * chance.lognormvariate(0, 0.1)
        meter.observe(passed([4], target=target), caught_up=True)
    found = table(meter)
    assert found.target_seconds(5) / found.target_seconds(1) == pytest.approx(1.2, rel=0.1)


def test_a_stored_table_is_where_it_starts_and_not_where_it_stays() -> None:
    first = CostMeter()
    for depth in (0, 4):
        for _ in range(9):
            first.observe(passed([depth], target=1.0 + depth, draft=0.1 * depth), caught_up=True)
    stored = table(first)
    meter = CostMeter(stored)
    assert meter.table() == stored
    for _ in range(40):
        meter.observe(passed([4], target=1.0, draft=0.4), caught_up=True)
    assert table(meter).target_seconds(5) < 2.0


def test_many_rows_share_a_bucket_with_their_neighbours_only() -> None:
    meter = CostMeter()
    for batch in (16, 17, 64, 65, 128):
        meter.observe(passed([0] * batch, target=float(batch)), caught_up=True)
    found = table(meter)
    assert len(found.target.points) == 4
    assert found.target_seconds(64) == pytest.approx(64.5, rel=0.02)


def test_judging_goes_by_drafted_tokens() -> None:
    """The host takes a tenth of a second for a sequence, and a drafted token as much again."""
    meter = CostMeter()
    for _ in range(4):
        meter.observe(passed([0, 0], target=1.0, accept=0.2), caught_up=True)
    for _ in range(4):
        meter.observe(passed([3, 1], target=1.0, accept=0.6), caught_up=True)
    found = table(meter)
    assert (found.host, found.judge) == (pytest.approx(0.1), pytest.approx(0.1))
    more = found.round_seconds(2, 6, 3, 2) - found.round_seconds(2, 2, 0, 0)
    assert more == pytest.approx(0.4 + found.draft_seconds(3, 2))
    assert CostTable.of_json(found.to_json()) == found
    old = json.loads(found.to_json())
    del old["judge"]
    assert CostTable.of_json(json.dumps(old)) == replace(found, judge=0.0)


def test_a_host_that_takes_as_long_with_drafts_judges_for_nothing() -> None:
    chance = random.Random(5)
    meter = CostMeter()
    for depth in (0, 4) * 40:
        accept = 0.3 * chance.lognormvariate(0, 0.2)
        meter.observe(passed([depth], target=1.0, accept=accept), caught_up=True)
    assert table(meter).judge < 0.01
