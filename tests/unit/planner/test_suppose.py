"""Supposed costs and acceptance: figures say whether they were measured, and give way when they
are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from doubles.planned import costs, counts, flat
from outrider.core.spec import ModelSpec
from outrider.estimate.cost import Curve
from outrider_lab.planner.advise import Question, advise
from outrider_lab.planner.calibration import Calibration
from outrider_lab.planner.roofline import device_sheet
from outrider_lab.planner.suppose import Candidate, joined, scaled, supposed

TARGET = ModelSpec(
    name="target",
    family="llama",
    vocab_size=8192,
    hidden_size=1024,
    num_layers=24,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    ffn_size=4096,
    max_tokens=2048,
    num_parameters=400_000_000,
    bytes_per_weight=2,
    bytes_per_kv=2,
)
DRAFTERS = {"model": 8_000_000, "eagle": 18_000_000, "quantised-self": 0, "suffix": 0}


def guess() -> Calibration:
    candidates = [Candidate.of(name, name, TARGET, size) for name, size in DRAFTERS.items()]
    return supposed(TARGET, device_sheet("cpu-2core"), candidates, machine="here")


def test_a_step_takes_what_its_bytes_do() -> None:
    steps = {one.name: one.seconds(4, 1, 0) for one in guess().drafters}
    plain = guess().target.rows.at(1)
    assert steps["suffix"] < steps["model"] < steps["eagle"] < steps["quantised-self"]
    # Four steps of a copy in 4 bits.
    assert plain < steps["quantised-self"] < 2 * plain
    assert steps["suffix"] < plain / 100


def test_what_is_supposed_is_enough_for_a_plan_and_says_that_it_is_no_more() -> None:
    calibration, origins = joined(guess(), None, {})
    plan = advise(calibration, Question())
    assert {option.drafter for option in plan.options} == set(DRAFTERS)
    assert not plan.left_out
    # Nobody is advised by estimates, for or against.
    unsure = advise(calibration, Question(estimated=origins.estimated))
    assert origins.estimated == set(DRAFTERS)
    assert (unsure.speculate, unsure.known) == (False, False)
    assert unsure.verdict.startswith("Whether to speculate is not known: figures of ")
    assert [one.speed_up for one in unsure.options] == [one.speed_up for one in plan.options]
    # Eight drafts leave much open.
    assert plan.best is not None
    assert plan.best.high / plan.best.low > 2
    assert not origins.is_whole
    assert origins.of("model") == ("estimated", "estimated")
    assert "All figures are estimated" in origins.sentence


def test_a_pass_that_was_measured_scales_what_was_not() -> None:
    base = guess()
    pass_seconds = 3 * base.target.rows.at(1)
    found, origins = joined(base, None, {}, pass_seconds=pass_seconds)
    assert found.target.rows.at(1) == pytest.approx(pass_seconds)
    for one, other in zip(found.drafters, base.drafters, strict=True):
        assert one.seconds(2, 1, 0) == pytest.approx(3 * other.seconds(2, 1, 0))
    assert origins.target_pass == "measured"
    assert found.target == scaled(base, pass_seconds).target


def test_a_fit_that_left_no_row_is_a_measurement_all_the_same() -> None:
    measured = flat(costs(0.25, name="model"), target=0.0)
    found, origins = joined(guess(), measured, {}, pass_seconds=2.0)
    assert origins.target_pass == "measured"
    by_name = {one.name: one for one in found.drafters}
    usual = scaled(guess(), 2.0).drafters[1]
    assert by_name["eagle"].seconds(4, 1, 0) == pytest.approx(usual.seconds(4, 1, 0))


def test_what_was_measured_takes_the_place_of_a_guess_figure_by_figure() -> None:
    measured = flat(costs(0.25, name="model"), target=2.0)
    counted = replace(costs(0.0, name="suffix"), places=counts([0.75]), num_rounds=12_000)
    found, origins = joined(guess(), measured, {"suffix": counted})
    by_name = {one.name: one for one in found.drafters}
    assert found.target == measured.target
    assert by_name["model"].seconds(4, 1, 0) == pytest.approx(1.0)
    assert by_name["suffix"].places == counted.places
    assert origins.of("model") == ("measured", "estimated")
    assert origins.of("suffix") == ("estimated", "measured")
    assert origins.of("eagle") == ("estimated", "estimated")
    assert origins.counted["suffix"] == 12_000
    told = origins.sentence
    assert told.startswith("Measured here: the target's pass; times of model; acceptance of suffix")
    assert "Estimated: times of eagle, quantised-self, suffix; acceptance of model, eagle" in told


def test_rounds_in_which_nothing_was_drafted_make_a_draft_less_likely() -> None:
    silent = replace(costs(0.0, name="suffix"), places=(), num_rounds=100)
    before = {one.name: one for one in guess().drafters}["suffix"]
    found, origins = joined(guess(), None, {"suffix": silent})
    after = {one.name: one for one in found.drafters}["suffix"]
    assert after.num_rounds == before.num_rounds + 100
    assert origins.accepted["suffix"] == "measured"
    # A round or two say nothing.
    few = replace(silent, num_rounds=2)
    assert joined(guess(), None, {"suffix": few})[1].accepted["suffix"] == "estimated"


def test_one_depth_that_was_timed_tells_of_deeper_ones_by_the_shape_of_the_guess() -> None:
    timed = replace(costs(0.1, name="model"), draft=((1, Curve(((2.0, 0.2),))),))
    found, _ = joined(guess(), flat(timed), {})
    (model,) = [one for one in found.drafters if one.name == "model"]
    assert model.seconds(2, 1, 0) == pytest.approx(0.2)
    assert model.seconds(8, 1, 0) == pytest.approx(0.8, rel=0.2)
