"""Joules a token, and frontiers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from outrider.core.spec import ModelSpec
from outrider.estimate.forecast import PassWork, Power
from outrider_lab.planner.advise import RatePoint, frontier
from outrider_lab.planner.calibration import PLAIN, RoundStats
from outrider_lab.planner.roofline import (
    Energy,
    calibrate,
    device_sheet,
    joules_a_token,
    round_joules,
)
from outrider_lab.planner.rounds import DecodeLoad, Rates, plain_times, round_stats, round_times

TARGET = ModelSpec("t", "llama", 32_000, 4096, 32, 32, 8, 128, 11_008, 4096, 7 * 10**9, 2, 2)
DRAFT = ModelSpec("d", "llama", 32_000, 1024, 8, 8, 8, 128, 2816, 4096, 3 * 10**8, 2, 2)
numbers = st.floats(0.1, 10)
points = st.lists(st.builds(RatePoint, st.just("way"), numbers, numbers), max_size=7)


def test_every_term() -> None:
    energy = Energy(Power(10.0, 1e-9, 1e-12), PassWork(TARGET), PassWork(DRAFT))
    stats, load = round_stats(Rates((0.5,)), 2), DecodeLoad(3, 100)
    kv = TARGET.kv_bytes_per_token, DRAFT.kv_bytes_per_token
    moved = 14e9 + 300 * kv[0] + 2 * (6e8 + 300 * kv[1])
    counted = 9 * (14e9 + 100 * 4 * 32 * 32 * 128) + 2 * 3 * (6e8 + 100 * 4 * 8 * 8 * 128)
    wanted = (10 * 0.2 + 1e-9 * moved + 1e-12 * counted) / (3 * 1.75)
    assert joules_a_token(energy, load, stats, 0.2, depth=2) == pytest.approx(wanted)
    alone = Energy(energy.power, PassWork(TARGET))
    plain = (10 * 0.1 + 14.0 + 1e-9 * 300 * kv[0] + 3e-12 * (14e9 + 100 * 4 * 32 * 32 * 128)) / 3
    assert joules_a_token(alone, load, PLAIN, 0.1, depth=0) == pytest.approx(plain)


def test_a_drafter_that_rests_moves_nothing() -> None:
    """A share of rounds drafts; its passes are counted in those alone."""
    energy = Energy(Power(0.0, 1e-9, 0.0), PassWork(TARGET), PassWork(DRAFT))
    stats = RoundStats((0.25, 0.125), 0.5, 2.0)
    found = joules_a_token(energy, DecodeLoad(1, 0), stats, 1.0, depth=2)
    assert found == pytest.approx((14.0 + 0.5 * 2 * 0.6) / stats.tokens)


def test_a_draft_device_of_its_own_flows_while_it_drafts() -> None:
    """Its watts in all the round's time, its own joules a byte and a FLOP."""
    target, draft = Power(10.0, 1e-9, 1e-12), Power(2.0, 3e-9, 5e-12)
    stats, load = round_stats(Rates((0.5,)), 2), DecodeLoad()
    works = PassWork(TARGET), PassWork(DRAFT)
    one = round_joules(Energy(target, *works), load, stats, 0.2, depth=2)
    two = round_joules(Energy(target, *works, draft), load, stats, 0.2, depth=2)
    assert two.static - one.static == pytest.approx(2 * 0.2)
    assert two.moving - one.moving == pytest.approx(2e-9 * 2 * 6e8)
    assert two.counting - one.counting == pytest.approx(4e-12 * 2 * 6e8)
    plain = [
        joules_a_token(e, load, PLAIN, 0.1, depth=0)
        for e in (Energy(target, *works), Energy(target, *works, draft))
    ]
    assert plain[0] == plain[1]


def by_length(device: str, beta: float, batch: int) -> tuple[list[float], list[float]]:
    """Joules and seconds a token, for K from 0 to 12."""
    sheet = device_sheet(device)
    assert sheet.power is not None
    calibration = calibrate(TARGET, DRAFT, sheet)
    energy, load = Energy(sheet.power, PassWork(TARGET), PassWork(DRAFT)), DecodeLoad(batch, 200)
    joules, seconds = list[float](), list[float]()
    for k in range(13):
        stats = round_stats(Rates((beta,)), k)
        took = round_times(calibration, calibration.drafters[0], load, stats, depth=k).total
        joules.append(joules_a_token(energy, load, stats, took, depth=k))
        seconds.append(took / stats.tokens)
    return joules, seconds


@pytest.mark.parametrize("device", ["v100", "a100", "h100", "rtx4090", "m2-max"])
@pytest.mark.parametrize("beta", [0.4, 0.6, 0.8, 0.9])
def test_for_one_text_the_best_length_by_energy_is_no_longer_than_by_time(
    device: str, beta: float
) -> None:
    joules, seconds = by_length(device, beta, 1)
    assert joules.index(min(joules)) <= seconds.index(min(seconds))
    gains = seconds[0] / min(seconds), joules[0] / min(joules)
    assert gains[1] <= gains[0]


def test_where_arithmetic_decides_the_time_energy_may_want_longer_drafts() -> None:
    """64 texts on a card whose passes are bound by arithmetic from 146 rows on."""
    joules, seconds = by_length("rtx4090", 0.95, 64)
    assert joules.index(min(joules)) > seconds.index(min(seconds))


def test_a_gain_in_time_need_not_be_one_in_energy() -> None:
    """Half of the drafts refused, a batch of 64: faster, and more joules a token."""
    sheet = device_sheet("h100")
    assert sheet.power is not None
    calibration = calibrate(TARGET, DRAFT, sheet)
    energy, load = Energy(sheet.power, PassWork(TARGET), PassWork(DRAFT)), DecodeLoad(64, 500)
    stats = round_stats(Rates((0.45,)), 2)
    took = round_times(calibration, calibration.drafters[0], load, stats, depth=2).total
    plain = plain_times(calibration, load).total
    assert plain * stats.tokens / took > 1
    before = joules_a_token(energy, load, PLAIN, plain, depth=0)
    assert joules_a_token(energy, load, stats, took, depth=2) > 0.8 * before


@examples(20)
@given(points=points)
def test_a_frontier_has_what_no_other_beats(points: list[RatePoint]) -> None:
    kept = frontier(points)
    for one in points:
        beaten = any(o.each >= one.each and o.total >= one.total for o in kept)
        assert beaten
    for a, b in itertools.permutations(kept, 2):
        assert not (a.each >= b.each and a.total >= b.total)
