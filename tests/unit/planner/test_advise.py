"""Plans: the best way is found, refusals have reasons, and every sentence has its numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from doubles.planned import costs, flat, sloped
from outrider.core.errors import CapacityError, ConfigError
from outrider.core.spec import ModelSpec
from outrider.estimate.cost import Curve
from outrider.estimate.forecast import PassWork, Power
from outrider_lab.planner.advise import AdvisedPlan, Question, advise
from outrider_lab.planner.calibration import Calibration, DrafterCosts, PassCosts, RoundStats
from outrider_lab.planner.candidates import DraftOption, Engines, PlannedJob, gain
from outrider_lab.planner.overlap import AheadWays
from outrider_lab.planner.roofline import Energy
from outrider_lab.planner.rounds import Rates, round_stats

FAR = 100_000


def asked(*candidates: DraftOption, **job: int) -> Question:
    return Question(job=PlannedJob(**{"new_tokens": FAR, **job}), candidates=candidates)


def chains(name: str = "model", most: int = 12) -> tuple[DraftOption, ...]:
    return tuple(DraftOption(name, k) for k in range(1, most + 1))


def test_the_best_of_two_drafters() -> None:
    """0.9 at a tenth of a pass: K = 6 at least, 3.4 times; 0.6 for nothing: at most 2.5 times."""
    calibration = flat(costs(0.1, [0.9] * 12), costs(0.0, [0.6] * 12, name="ngram"))
    plan = advise(calibration, asked(*chains(), *chains("ngram")))
    assert plan.speculate
    assert plan.best is not None
    assert (plan.best.drafter, plan.best.k) == ("model", 10)
    assert plan.best.speed_up == pytest.approx(3.43, abs=0.01)
    assert plan.best.low < plan.best.speed_up < plan.best.high
    assert plan.plain_tokens_per_second == 1
    assert plan.verdict == (
        f"Speculate: model with K = 10, engine single, {plan.best.speed_up:.2f} times as fast as "
        f"plain decoding ({plan.best.low:.2f} to {plan.best.high:.2f}, 95 %)."
    )
    assert [one.speed_up for one in plan.options] == sorted(
        (one.speed_up for one in plan.options), reverse=True
    )
    assert plan.reasons[0].startswith("A round emits 6.86 tokens: 5.86 of its draft")
    assert "2.00 plain rounds of 1e+03 ms: 1.00 for drafting, 1.00 for the pass" in plan.reasons[1]
    assert plan.reasons[3].startswith("By engine: single 3.43 (model with K = 10); pd 3.43 (")
    assert plan.break_even_batch is None
    assert "at any batch up to 256" in plan.reasons[2]
    assert plan.reasons[2].endswith("No pass of more than 1 rows was measured: beyond, a line.")


def test_not_when_nothing_pays() -> None:
    """Every second draft refused, and a draft token costs half a pass."""
    plan = advise(flat(costs(0.5, [0.5] * 4)), asked(*chains(most=4)))
    assert not plan.speculate
    assert plan.best is not None
    assert plan.best.speed_up < 1.01
    assert plan.verdict.startswith("Do not speculate, because ")
    assert f"model with K = 1, would be {plan.best.speed_up:.2f} times as fast" in plan.verdict
    assert plan.break_even_batch == 1


def test_not_when_it_may_cost_time() -> None:
    """A gain of 5 % from times that scatter by 10 %."""
    calibration = flat(costs(0.7, [0.8] * 2), scatter=0.1)
    plan = advise(calibration, asked(DraftOption("model", 1)))
    assert plan.best is not None
    assert plan.best.speed_up == pytest.approx(1.06, abs=0.01)
    assert plan.best.low < 1
    assert not plan.speculate
    assert f"its interval reaches down to {plan.best.low:.2f}" in plan.verdict


def test_estimates_advise_neither_for_nor_against() -> None:
    calibration = flat(costs(0.1, [0.9] * 4), costs(0.5, [0.5] * 4, name="slow"))
    question = replace(asked(*chains(most=4), *chains("slow", 4)))
    # Nobody measured the better one: what was measured loses, and no more is known.
    unsure = advise(calibration, replace(question, estimated=frozenset({"model"})))
    assert (unsure.speculate, unsure.known) == (False, False)
    assert unsure.best is not None
    assert unsure.best.drafter == "slow"
    assert unsure.verdict.startswith(
        "Whether to speculate is not known: figures of model are estimates, by which model with "
        "K = 4 would be "
    )
    assert {one.drafter for one in unsure.engines} == {"slow"}
    # The rows are sorted all the same.
    assert unsure.options[0].drafter == "model"
    # An estimate that loses decides nothing either.
    lost = advise(
        flat(costs(0.5, [0.1])),
        replace(question, estimated=frozenset({"model"}), candidates=chains(most=1)),
    )
    assert lost.options[0].high < 1
    assert not lost.known
    # What was measured and pays is advised, whatever others may bring.
    sure = advise(calibration, replace(question, estimated=frozenset({"slow"})))
    assert (sure.speculate, sure.known) == (True, True)
    assert sure.best is not None
    assert sure.best.drafter == "model"
    assert "slow" not in sure.reasons[3]


def test_a_disturbed_measurement_decides_only_where_its_interval_does() -> None:
    unsure = flat(costs(0.7, [0.8] * 2), scatter=0.1)
    question = asked(DraftOption("model", 1))
    assert advise(unsure, question).known
    plan = advise(unsure, replace(question, others=0.6))
    assert (plan.speculate, plan.known) == (False, False)
    assert plan.verdict.endswith("while others used 60 % of the CPU.")
    for step, rate, pays in ((0.1, 0.9, True), (0.9, 0.1, False)):
        plan = advise(flat(costs(step, [rate]), scatter=0.1), replace(question, others=0.6))
        assert (plan.speculate, plan.known) == (pays, True)


def test_without_a_drafter() -> None:
    plan = advise(flat(), Question())
    assert (plan.best, plan.options, plan.speculate) == (None, (), False)
    assert plan.verdict == "Do not speculate, because no drafter is known for this target."
    assert all(point.name.startswith("plain") for point in plan.frontier)


@examples(8)
@given(
    rates=st.lists(st.floats(0.05, 0.98), min_size=1, max_size=6),
    step=st.floats(0.01, 0.8),
    per_row=st.floats(0, 0.2),
    batch=st.integers(1, 8),
    new_tokens=st.integers(1, 200),
)
def test_no_option_beats_the_best_and_bounds_hold(
    rates: list[float], step: float, per_row: float, batch: int, new_tokens: int
) -> None:
    calibration = sloped(costs(step, rates), per_row=per_row)
    question = asked(*chains(most=3), batch=batch, new_tokens=new_tokens)
    plan = advise(calibration, question)
    best = plan.best
    assert best is not None
    assert plan.speculate == (best.low > 1)
    for option in plan.options:
        assert option.speed_up <= best.speed_up
        assert option.low <= option.high
        assert 1 <= option.tokens <= option.k + 1


def test_batch_and_context_at_which_it_stops_paying() -> None:
    calibration = sloped(costs(0.05, [0.8] * 4), per_row=0.02)
    calibration = replace(
        calibration, target=replace(calibration.target, per_context=1e-4, per_read=1e-3)
    )
    plan = advise(calibration, asked(DraftOption("model", 4), new_tokens=64))
    drafter, stats = calibration.drafters[0], round_stats(Rates((0.8,)), 4)
    batch, context = plan.break_even_batch, plan.break_even_context
    assert batch is not None
    assert context is not None
    for job, less in (
        (PlannedJob(batch=batch, new_tokens=64), PlannedJob(batch=batch - 1, new_tokens=64)),
        (
            PlannedJob(context=context, new_tokens=64),
            PlannedJob(context=context - 1, new_tokens=64),
        ),
    ):
        assert gain(calibration, drafter, job, stats) <= 1 + 1e-3
        assert gain(calibration, drafter, less, stats) > 1 - 1e-3
    assert f"it stops paying at a batch of {batch}" in plan.reasons[2]
    assert f"it stops paying at {context} tokens of context" in plan.reasons[2]
    assert "measured" not in plan.reasons[2]


def test_short_texts_and_batches_that_end_apart_gain_less() -> None:
    calibration = flat(costs(0.1, [0.8] * 8))
    speeds: list[float] = []
    for job in (PlannedJob(1, 0, FAR), PlannedJob(1, 0, 16), PlannedJob(8, 0, 64)):
        plan = advise(calibration, Question(job=job, candidates=(DraftOption("model", 8),)))
        assert plan.best is not None
        speeds.append(plan.best.speed_up / plan.best.steady)
    assert speeds[0] == pytest.approx(1, abs=1e-3)
    assert speeds[1] < 0.97
    assert speeds[2] < 0.92


def test_what_was_replayed_goes_before_places() -> None:
    drafter = replace(costs(0.1, [0.5] * 4), laws=(RoundStats((0.9,), 1.0, 1.0),))
    plan = advise(flat(drafter), asked(DraftOption("model", 1), DraftOption("model", 2)))
    tokens = {option.k: option.tokens for option in plan.options}
    assert tokens[1] == 1.9
    assert tokens[2] == pytest.approx(1.75, abs=1e-3)
    one = next(option for option in plan.options if option.k == 1)
    assert one.low < one.speed_up < one.high


def test_trees_where_ranks_were_counted() -> None:
    """A sibling that is right in half of refusals, and rows that are free up to a tile."""
    rows = Curve(((1.0, 1.0), (16.0, 1.0), (17.0, 2.0), (64.0, 4.0)))
    drafter = replace(costs(0.05, [0.6] * 4), chances=((0.6, 0.2),) * 4)
    calibration = replace(flat(drafter), target=PassCosts(rows))
    plan = advise(calibration, Question(job=PlannedJob(new_tokens=FAR)))
    assert plan.best is not None
    assert plan.best.num_nodes == 15
    assert "trees of 15 nodes" in plan.verdict


def test_a_tree_is_named_where_long_texts_gain_by_it() -> None:
    """15 nodes cost as many rows as a chain of 4; with dear rows they do not pay."""
    rows = Curve(((1.0, 1.0), (16.0, 1.0), (17.0, 2.0), (64.0, 4.0)))
    cheap = replace(flat(costs(0.05, [0.6] * 4)), target=PassCosts(rows))
    question = Question(job=PlannedJob(new_tokens=FAR), trees=("model",))
    plan = advise(cheap, question)
    assert plan.tree is not None
    assert plan.best is not None
    assert plan.best.num_nodes == 0
    assert (plan.tree.num_nodes, plan.tree.is_guess) == (15, True)
    assert plan.tree.speed_up > plan.best.steady
    assert plan.reasons[-1].startswith("In long texts trees of 15 nodes, ")
    assert plan.reasons[-1].endswith("guessed, not counted.")
    assert "--tree-nodes 15" in plan.reasons[-1]
    for less in (
        advise(cheap, replace(question, trees=("suffix",))),
        advise(sloped(costs(0.05, [0.6] * 4), per_row=0.1), question),
    ):
        assert less.speculate
        assert less.tree is None


def everything(contention: float, batch: int) -> AdvisedPlan:
    engines = Engines(
        names=("single", "pd", "pdv", "ssd"),
        ways=AheadWays(contention=contention, p_hit=0.9),
    )
    job = PlannedJob(batch=batch, new_tokens=FAR)
    question = Question(job=job, candidates=(DraftOption("model", 4),), engines=engines)
    return advise(flat(costs(0.2, [0.9] * 4)), question)


def test_engines_on_one_device_and_on_two() -> None:
    one, two = everything(1.0, 1), everything(0.0, 1)
    assert one.best is not None
    assert two.best is not None
    assert (one.best.engine, two.best.engine) == ("single", "ssd")
    assert two.best.fallback == "jit"
    assert two.best.speed_up / one.best.speed_up == pytest.approx(1.8 / 1.08, rel=1e-3)
    assert two.reasons[-2].startswith("By engine: ssd ")
    assert two.reasons[-1] == (
        "Drafting ahead predicts 90 % of verdicts and goes on with a new draft after the others; a "
        "new draft is better up to a batch of 1; drafts of up to K = 4 fit into a verification."
    )
    assert [option.engine for option in one.options] == ["single"]
    many = {option.engine: option.speed_up for option in everything(0.0, 8).engines}
    assert many["pdv"] < many["single"] == many["pd"]


def test_joules_of_drafting_ahead_are_not_told() -> None:
    spec = ModelSpec("t", "llama", 1000, 64, 2, 2, 2, 32, 256, 512, 10**6, 2, 2)
    energy = Energy(Power(1.0, 1e-7, 1e-9), PassWork(spec), PassWork(spec))
    engines = Engines(names=("single", "ssd"), ways=AheadWays(contention=0.0))
    question = replace(asked(DraftOption("model", 4)), engines=engines, energy=energy)
    spent = {one.engine: one.joules for one in advise(flat(costs(0.1, [0.9])), question).engines}
    assert spent["single"] is not None
    assert spent["ssd"] is None


def test_only_some_drafters_draft_ahead() -> None:
    engines = Engines(names=("single", "ssd"), ways=AheadWays(contention=0.0))
    question = replace(asked(*chains("ngram", 2)), engines=engines)
    plan = advise(flat(costs(0.1, [0.8] * 2, name="ngram")), question)
    assert [option.engine for option in plan.engines] == ["single"]


def sized(calibration: Calibration) -> Calibration:
    return replace(calibration, memory_bytes=16 * 10**9, kv_bytes_per_token=10**6)


def test_a_target_that_does_not_fit() -> None:
    calibration = sized(flat(costs(0.1, [0.9])))
    with pytest.raises(CapacityError, match=r"16.2 GB \(16 GB of weights, 0.228 GB") as caught:
        advise(calibration, Question(job=PlannedJob(context=100), memory_limit=10**10))
    assert "--quantise int8" in str(caught.value.hint)
    with pytest.raises(CapacityError, match=r"4 x 1128 tokens") as caught:
        advise(calibration, Question(job=PlannedJob(4, 1000), memory_limit=17 * 10**9))
    assert "lower --batch" in str(caught.value.hint)


def test_a_drafter_that_does_not_fit_beside_it() -> None:
    heavy = replace(costs(0.1, [0.9] * 4), memory_bytes=10**10, kv_bytes_per_token=10**5)
    light = costs(0.3, [0.8] * 4, name="mtp")
    calibration = sized(flat(heavy, light))
    plan = advise(calibration, Question(job=PlannedJob(context=100), memory_limit=20 * 10**9))
    assert plan.best is not None
    assert plan.best.drafter == "mtp"
    assert plan.left_out == ("model: with it 26.3 GB are needed, and there are 20 GB",)
    assert plan.memory_bytes == 16_228_000_000
    roomy = advise(calibration, Question(job=PlannedJob(context=100), memory_limit=30 * 10**9))
    assert roomy.memory_bytes == 16_228_000_000 + 10**10 + 228 * 10**5


def test_drafters_of_whom_nothing_is_known() -> None:
    calibration = flat(DrafterCosts("model", ((1, Curve(((1.0, 0.1),))),)), costs(0.1, [0.9] * 4))
    plan = advise(flat(calibration.drafters[0]), Question())
    assert plan.left_out == ("model: the acceptance of its drafts was never counted",)
    assert not plan.speculate
    silent = DrafterCosts("ngram", calibration.drafters[0].draft, num_rounds=40)
    assert advise(flat(silent), Question()).left_out == ("ngram: it drafted nothing in 40 rounds",)
    with pytest.raises(ConfigError, match="no drafter 'modle'") as caught:
        advise(calibration, asked(DraftOption("modle", 2)))
    assert "'model'" in str(caught.value.hint)


def test_questions_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="no engine is called 'sdd'") as caught:
        Engines(names=("sdd",))
    assert "'ssd'" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="0 tokens deep"):
        DraftOption("model", 0)
    with pytest.raises(ConfigError, match="a batch of 0"):
        PlannedJob(batch=0)


def test_joules_where_somebody_gave_an_energy() -> None:
    spec = ModelSpec("t", "llama", 1000, 64, 2, 2, 2, 32, 256, 512, 10**6, 2, 2)
    energy = Energy(Power(1.0, 1e-7, 1e-9), PassWork(spec))
    question = replace(asked(DraftOption("model", 4), new_tokens=200), energy=energy)
    plan = advise(flat(costs(0.1, [0.9] * 4)), question)
    assert plan.best is not None
    assert plan.best.joules is not None
    assert plan.plain_joules is not None
    assert plan.plain_joules / plan.best.joules == pytest.approx(plan.best.steady, rel=0.1)
    assert advise(flat(costs(0.1, [0.9] * 4)), asked(DraftOption("model", 4))).plain_joules is None


def test_only_the_draft_model_spends_its_joules() -> None:
    spec = ModelSpec("t", "llama", 1000, 64, 2, 2, 2, 32, 256, 512, 10**6, 2, 2)
    energy = Energy(Power(0.0, 1e-7, 0.0), PassWork(spec), PassWork(spec))
    both = flat(costs(0.1, [0.9] * 4), costs(0.1, [0.9] * 4, name="ngram"))
    ways = DraftOption("model", 4), DraftOption("ngram", 4)
    plan = advise(both, replace(asked(*ways), energy=energy))
    spent = {one.drafter: one.joules for one in plan.options}
    assert spent["model"] == pytest.approx(5 * (spent["ngram"] or 0.0), rel=0.1)


def test_a_record_for_programs() -> None:
    plan = advise(flat(costs(0.1, [0.9] * 4)), asked(*chains(most=4)))
    record = json.loads(json.dumps(plan.as_record()))
    assert record["best"]["k"] == 4
    assert len(record["options"]) == 4
    assert record["speculate"] is True
    names = [point["name"] for point in record["frontier"]]
    assert names[0] == "model with K = 4, batch 1"


def test_a_plan_needs_no_tensors() -> None:
    script = (
        "import sys, outrider_lab.planner.advise, outrider_lab.planner.roofline\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=240).returncode == 0
