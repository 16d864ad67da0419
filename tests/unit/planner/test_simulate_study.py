"""Engines side by side: speed-ups near the formulas, and what is told of each run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from doubles.planned import calibration, drafter
from outrider.core.errors import ConfigError
from outrider.estimate.acceptance import expected_tokens
from outrider.plugins.lanes.ahead.fan_out import Misses, expected_hit_rate, optimal
from outrider_lab.simulator.study import ENGINES, PLAIN, SimulatedStudy, compare

STUDY = SimulatedStudy(
    calibration=calibration(1.0, 0.1),
    drafter=drafter(0.1),
    rates=(0.8,),
    p_hit=0.9,
    prompt=1,
    output=250,
    requests=2,
)


def test_speedups_are_near_the_formulas() -> None:
    found = compare(STUDY)
    assert list(found.numbers) == [PLAIN, *ENGINES]
    assert found.speedup(PLAIN) == 1
    plain = expected_tokens(0.8, 4)
    assert STUDY.formula("single") == pytest.approx(plain / 1.4)
    assert STUDY.formula("ssd") == pytest.approx(plain / (0.9 + 0.1 * 1.4))
    assert STUDY.formula("pdv") is None
    for engine in ("single", "ssd"):
        assert found.speedup(engine) == pytest.approx(STUDY.formula(engine), rel=0.04)
    assert found.speedup("pd") == pytest.approx(found.speedup("single"), rel=0.01)


def test_numbers_tell_of_their_run() -> None:
    found = compare(replace(STUDY, output=50, requests=6, batch=2, arrivals="together"))
    for engine, own in found.numbers.items():
        assert own.seconds == pytest.approx(found.runs[engine].seconds)
        assert own.tokens_per_second == pytest.approx(300 / own.seconds)
        assert own.stats.num_emitted == 300
        assert own.first_token.p50 <= own.first_token.p95 <= own.latency.p95
        assert set(own.busy) <= {"main", "decode", "verify", "prefill"}
        json.dumps(own.to_dict(), allow_nan=False)
    # Both requests are verified in one pass by one lane.
    assert 1.5 < found.numbers["single"].rounds_per_pass <= 2
    assert found.numbers[PLAIN].p_hit is None
    # A round or two is tried in turns.
    assert 0.6 < (found.numbers["ssd"].p_hit or 0) < 1
    assert found.numbers[PLAIN].stats.drafter == "none"
    assert found.numbers[PLAIN].busy == {"main": pytest.approx(1.0)}


def test_a_hit_rate_that_nobody_names_is_that_of_the_fan_out() -> None:
    chances = [0.8**n * 0.2 for n in range(4)] + [0.8**4]
    best = expected_hit_rate(optimal(16, chances, Misses()), chances, Misses())
    assert replace(STUDY, p_hit=None).hit_chance == pytest.approx(best)
    more = replace(STUDY, p_hit=None, fan_out=32).hit_chance
    assert best < more < 1
    assert replace(STUDY, p_hit=None, k=0, engines=("pd",)).hit_chance == 0


def test_rates_of_places_are_those_of_the_formula() -> None:
    study = replace(STUDY, rates=(0.9, 0.5), k=3, engines=("single",))
    tokens = 1 + 0.9 + 0.45 + 0.225
    assert study.chance.tokens_per_round(3) == pytest.approx(tokens)
    assert study.formula("single") == pytest.approx(tokens / 1.3)
    assert compare(study).speedup("single") == pytest.approx(tokens / 1.3, rel=0.03)


def test_requests_come_as_they_are_told_to() -> None:
    assert replace(STUDY, batch=3).load.in_flight == 3
    assert replace(STUDY, arrivals="together").load.in_flight is None
    rated = replace(STUDY, arrivals=2.0).load
    assert rated.requests[0].arrives > 0
    assert replace(STUDY, batch=64).most_live == 2


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"engines": ("single", "sdd")}, "no engine 'sdd'"),
        ({"engines": ()}, "no engine is named"),
        ({"k": 0}, "nothing is drafted"),
        ({"requests": 10_000}, "takes minutes"),
    ],
)
def test_what_cannot_be_compared_is_refused(changed: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        replace(STUDY, **changed)
    assert caught.value.hint


def test_no_time_at_all_has_no_speedup() -> None:
    study = replace(
        STUDY, calibration=calibration(0.0, 0.0), drafter=drafter(0.0), output=5, engines=("pd",)
    )
    assert compare(study).speedup("pd") is None
    assert study.formula("single") is None
    assert study.times.window_steps is None
