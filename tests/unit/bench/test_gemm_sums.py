"""What a cost study makes of its samples: cells, theory, T_SD, windows, the roofline."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cost_study.engines import CostEngine, CostNumbers, CostRun, Text, rooms
from cost_study.pair import (
    PAIRS,
    CostPair,
    Make,
    PassTimer,
    facts,
    num_weights,
    pair_shape,
    pass_names,
)
from cost_study.results import cells, draft_shares, product_rows, windows
from cost_study.study import QUICK, CostStudy, Grid, Sizes, grid_asked
from cost_study.units import CostSample, Held, SamplesFile, engines_unit, passes_unit
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import ConfigError
from outrider.estimate.acceptance import expected_tokens
from outrider_lab.bench.cost_record import Ceilings, Cell, scatter_of
from outrider_lab.models.gemm import GEMM_SHAPES, NonGemmCosts, products

AR = CostEngine(study="hits", method="ar")
SD = CostEngine(study="hits", method="sd", k=4, alpha=0.9)
SSD = CostEngine(study="hits", method="ssd", k=4, alpha=0.9, p_hit=1.0, fan_out=8)


def numbers(
    *, seconds: float, tokens: int, rounds: int, draft: float, verify: float
) -> dict[str, Any]:
    """Of rounds that each take `draft` and `verify` seconds."""
    return {
        "seconds": seconds,
        "num_tokens": tokens,
        "num_rounds": rounds,
        "num_passes": rounds,
        "num_drafted": 4 * rounds,
        "num_accepted": tokens - rounds,
        "num_refused": rounds // 2,
        "num_hits": 0,
        "num_looks": 0,
        "draft_seconds": draft * rounds,
        "verify_seconds": verify * rounds,
        "accept_seconds": 0.0,
        "token_ms_p95": 1.0,
        "ahead_over_verify": None,
        "num_ahead": None,
    }


def measured(num: int = 5) -> dict[CostEngine, dict[int, dict[str, Any]]]:
    """A plain pass takes 10 ms, a draft of four 7, a verification 12."""
    plain = numbers(seconds=1.0, tokens=100, rounds=100, draft=0.0, verify=0.010)
    turns = numbers(seconds=0.5, tokens=100, rounds=25, draft=0.007, verify=0.012)
    ahead = numbers(seconds=0.4, tokens=100, rounds=25, draft=0.0, verify=0.012)
    ahead |= {"num_hits": 24, "num_looks": 24, "ahead_over_verify": 1.5, "num_ahead": 32.0}
    visits = range(num)
    rows = ((AR, plain), (SD, turns), (SSD, ahead))
    return {one: dict.fromkeys(visits, row) for one, row in rows}


def cell(method: str, **given: Any) -> Cell:
    found = cells("8b/1b", measured(**given), {})
    return next(one for one in found if one.method == method)


def test_speed_ups_are_over_plain_decoding_of_the_same_visits() -> None:
    assert cell("ar").speed_up == 1
    assert cell("sd").speed_up == 2
    assert cell("ssd").speed_up == pytest.approx(2.5)
    assert (cell("sd").low, cell("sd").high) == (2, 2)
    assert cell("sd", num=3).low is None


def test_a_visit_that_failed_on_one_side_counts_on_neither() -> None:
    """Texts get harder from visit to visit: were the third failure closed up, ratios would be of
    different texts."""
    plain = {n: measured()[AR][0] | {"seconds": 1.0 + n} for n in range(7)}
    turns = {n: measured()[SD][0] | {"seconds": (1.0 + n) / 2} for n in range(7)}
    del plain[0], turns[6]
    found = cells("8b/1b", {AR: plain, SD: turns}, {})
    (cell,) = (one for one in found if one.method == "sd")
    assert (cell.speed_up, cell.low, cell.high) == pytest.approx((2.0, 2.0, 2.0))
    alone = {AR: {0: plain[1]}, SD: {1: turns[1]}}
    assert [one.method for one in cells("8b/1b", alone, {})] == ["ar"]


def test_a_round_has_its_parts() -> None:
    found = cell("sd")
    assert (found.draft_ms, found.verify_ms) == (pytest.approx(7), pytest.approx(12))
    assert found.rest_ms == pytest.approx(1.0)
    assert found.tokens_per_round == 4
    assert found.alpha_seen == pytest.approx(75 / 87)
    assert cell("ar").alpha_seen is None
    assert cell("ssd").p_hit_seen == 1


def test_theory_is_made_of_the_runs_own_times() -> None:
    tokens = expected_tokens(0.9, 4)
    theory = cell("sd").theory
    assert theory is not None
    assert theory.tokens == tokens
    assert theory.over_plain == pytest.approx(tokens / 1.7)
    assert theory.over_verify == pytest.approx(tokens * 10 / 19)
    hidden = cell("ssd").theory
    assert hidden is not None
    # Ahead takes 5 / 4 of 7 ms, less than the 12 of a verification.
    assert hidden.over_verify == pytest.approx(tokens * 10 / 12)
    assert hidden.over_plain == pytest.approx(tokens)
    assert cell("ar").theory is None


def test_theory_of_ssd_counts_the_pass_over_the_trunk() -> None:
    """Ahead takes 5 / 4 of 10 ms, a trunk and four passes: more than the 12 of a verification."""
    runs = measured()
    slow = {n: row | {"draft_seconds": row["num_passes"] * 0.010} for n, row in runs[SD].items()}
    found = cells("8b/1b", {**runs, SD: slow}, {})
    theory = next(one.theory for one in found if one.method == "ssd")
    assert theory is not None
    assert theory.over_verify == pytest.approx(expected_tokens(0.9, 4) * 10 / 12.5)


def test_without_hits_theory_of_ssd_is_that_of_sd() -> None:
    runs = measured()
    missed = replace(SSD, p_hit=0.0)
    found = cells("8b/1b", {**runs, missed: runs[SSD]}, {})
    by_hit = {(one.method, one.p_hit): one.theory for one in found}
    ahead, turns = by_hit["ssd", 0.0], by_hit["sd", None]
    assert ahead is not None
    assert turns is not None
    assert astuple(ahead) == pytest.approx(astuple(turns))


def test_nothing_is_said_of_visits_without_plain_decoding() -> None:
    runs = measured()
    assert not cells("8b/1b", {SD: runs[SD]}, {})
    ahead_only = cells("8b/1b", {AR: runs[AR], SSD: runs[SSD]}, {})
    assert [one.theory for one in ahead_only] == [None, None]


def test_published_shares_stand_beside_ours() -> None:
    seconds = {
        "draft chain=2": [0.004] * 5,
        "target rows=1": [0.010] * 5,
        "target rows=3": [0.011] * 5,
    }
    (row,) = draft_shares("8b/1b", [2, 4], seconds)
    assert (row.k, row.over_plain, row.published) == (2, 0.4, 0.36)
    assert row.over_verify == pytest.approx(4 / 11)
    assert (row.low, row.high, row.num_repeats) == (0.4, 0.4, 5)
    assert next(draft_shares("my/own", [2], seconds)).published is None


def test_a_window_holds_a_trunk_and_k_passes_over_all_branches() -> None:
    seconds = {
        "target rows=5": [0.012],
        "draft rows=5": [0.002],
        "draft rows=1": [0.002],
        "draft rows=8": [0.0025],
        "draft rows=32": [0.004],
    }
    found = list(windows("8b/1b", [4], [1, 8, 16, 32], seconds))
    assert [(one.branches, one.fits) for one in found] == [(1, True), (8, True), (32, False)]
    assert {one.largest_fan_out for one in found} == {8}
    assert found[0].num_passes == pytest.approx(6)
    assert scatter_of(found) == []
    late = list(windows("8b/1b", [4], [1, 8], {**seconds, "draft rows=5": [0.003]}))
    assert [(one.branches, one.fits) for one in late] == [(1, True), (8, False)]


def test_a_pass_over_fewer_branches_that_took_longer_is_told_as_noise() -> None:
    seconds = {
        "target rows=5": [0.4],
        "draft rows=5": [0.06],
        "draft rows=1": [0.075, 0.080, 0.085],
        "draft rows=8": [0.055, 0.060, 0.090],
        "draft rows=16": [0.12],
    }
    found = list(windows("8b/1b", [4], [1, 8, 16], seconds))
    assert [(row.pass_least, row.pass_most) for row in found[:2]] == [(0.075, 0.085), (0.055, 0.09)]
    (said,) = scatter_of(found)
    assert "over 1 of the branches was timed 1.33 times as long as one over 8" in said


def test_passes_are_timed_warm_and_to_and_fro(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each beside passes of its own model, and in both orders: drift would fall on some alone."""
    run: list[str] = []

    def took(_: PassTimer, name: str) -> float:
        run.append(name)
        return 9.0 if run.count(name) == 1 else 1.0

    monkeypatch.setattr(PassTimer, "_once", took)
    shape, make = pair_shape("8b/1b"), Make(costs=NonGemmCosts())
    timer = PassTimer(shape, cast("CostPair", None))
    orders: list[list[str]] = []
    for repeat in (0, 1):
        run.clear()
        unit = replace(passes_unit(make, shape, (2,), repeat), rig=("timer", lambda: timer))
        samples = unit.take(Held())
        assert [sample.key for sample in samples] == unit.keys
        assert {sample.values["seconds"] for sample in samples if sample.values} == {1.0}
        orders.append(list(dict.fromkeys(run)))
    assert orders[0] == orders[1][::-1]


def test_a_product_is_held_against_the_lower_roof() -> None:
    shape = GEMM_SHAPES["llama-1b"]
    roof = Ceilings(gigabytes_per_second=10.0, gigaflops_per_second=100.0, threads=2)
    times: dict[str, float] = dict.fromkeys(products(shape), 0.01)
    assert roof.ridge == 10
    low = next(product_rows(shape, 1, [times], roof, 2.0))
    assert low.num_bytes == 2 * 2048 * 2048 + 4 * (2048 + 2048)
    assert low.num_flops == 2 * 2048 * 2048
    assert low.roof == pytest.approx(10 * low.intensity)
    assert low.share == pytest.approx(low.gigaflops_per_second / low.roof)
    high = next(product_rows(shape, 64, [times], roof, 2.0))
    assert high.roof == 100
    assert next(product_rows(shape, 1, [times], None, 2.0)).roof == 0


def test_names_of_passes_are_those_that_are_summed_up() -> None:
    names = pass_names([2], [1, 8])
    assert names == [
        "target rows=1",
        "target rows=3",
        "draft rows=1",
        "draft rows=3",
        "draft rows=8",
        "draft chain=2",
    ]


@given(
    ks=st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True),
    batches=st.lists(st.integers(1, 16), min_size=1, max_size=3, unique=True),
)
def test_every_contestant_has_room_and_one_visit_a_repeat(
    ks: list[int], batches: list[int]
) -> None:
    grid = Grid(ks=tuple(ks), batches=tuple(batches), alphas=(0.5,), hits=(0.5,), fan_outs=(3,))
    everybody, text = grid.contestants(), Text(max_tokens=8)
    assert len({one.name for one in everybody}) == len(everybody)
    target, draft = rooms(everybody, text)
    for one in everybody:
        assert target.num_slots >= one.batch * (text.most_tokens(one.k) + one.k + 1)
        assert target.max_logits >= one.batch * (one.k + 1)
        assert draft.max_rows >= one.batch * max(one.fan_out, 2)
    study = CostStudy(
        pairs=(pair_shape("8b/1b"),),
        make=Make(costs=NonGemmCosts()),
        grid=grid,
        text=text,
        sizes=Sizes(),
    )
    units = [unit for unit in replace(study, repeats=2).units() if unit.part == "engines"]
    taken = [name for unit in units for name in unit.turns]
    assert sorted(taken) == sorted(f"8b/1b {one.name}" for one in everybody * 2)
    assert all(unit.plain in unit.turns for unit in units)


def test_a_row_of_ssd_is_one_that_drafts_ahead() -> None:
    """Without forced hits too, in the studies of alpha and of fan-out."""
    asked = Grid(ks=(2,), alphas=(0.9,), fan_outs=(2,)).contestants()
    ahead = [one.config() for one in asked if one.method == "ssd"]
    assert {config.force_hits for config in ahead} > {-1.0}
    assert all(config.hybrid_threshold == 0 for config in ahead)


def test_a_grid_is_what_words_ask_for() -> None:
    axes = {"ks": (2, 6), "alphas": (0.7,), "hits": (0.25,)}
    grid = grid_asked(Grid(), ["hits"], axes)
    assert {one.study for one in grid.contestants()} == {"hits"}
    assert (grid.ks, grid.alpha, grid.k) == ((2, 6), 0.7, 2)
    assert [one.p_hit for one in grid.contestants() if one.method == "ssd"] == [0.25]
    assert grid_asked(QUICK, [], {}) == QUICK


@pytest.mark.parametrize(
    "wrong",
    [
        {"hitz": ()},
        {"ks": (0,)},
        {"alphas": (1.5,)},
        {"hits": (-0.1,)},
        {"fan_outs": (0,)},
        {"batches": (0,)},
    ],
)
def test_a_grid_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    studies = [name for name in wrong if name == "hitz"]
    with pytest.raises(ConfigError) as caught:
        grid_asked(Grid(), studies, {} if studies else wrong)
    assert caught.value.hint


def test_pairs_are_known_or_written() -> None:
    for name in PAIRS:
        shape = pair_shape(name)
        assert shape.target.is_whole
        assert shape.draft.name == "llama-1b"
    own = pair_shape("llama-8b/512x1024x8x8x4")
    assert own.draft.hidden_size == 512
    for wrong in ("8b", "llama-8b/", "/llama-1b", "8b/2b"):
        with pytest.raises(ConfigError):
            pair_shape(wrong)


def test_facts_say_what_is_missing() -> None:
    make = Make(costs=NonGemmCosts(), quantise="int8")
    shape = pair_shape("8b/1b").sampled(Fraction(1, 16), 4)
    target, draft = facts(shape, make, "engines")
    assert (target["num_layers"], draft["num_layers"]) == (2, 1)
    assert (target["factor"], draft["factor"]) == (16, 16)
    assert target["sampled"] == "layer-sampled: 2 of 32 layers; scaled: widths over 4"
    assert (
        target["weight_bytes"] == target["num_parameters"] == num_weights(shape.target, make.costs)
    )
    assert draft["weight_bytes"] == 2 * num_weights(shape.draft, make.costs)


CIRCUMSTANCES = {"seed": 0, "machine": {"cpu": "toy"}}


def sample(repeat: int = 0, **given: Any) -> CostSample:
    values = given.pop("values", {"seconds": 1.0})
    return CostSample(part="passes", name="a", repeat=repeat, values=values, **given)


class TwoTexts:
    """A bed on which drafting in turns writes another text than the others."""

    def run(self, one: CostEngine, *, repeat: int = 0) -> CostRun:
        del repeat
        row = CostNumbers(**measured()[AR][0])
        return CostRun(row, ((1, 2, 3),) if one.method == "sd" else ((1, 2),))

    def wrong(self, one: CostEngine, *, repeat: int = 0) -> CostRun:
        taken = self.run(one, repeat=repeat)
        return replace(taken, texts=((1, 3),)) if one.method == "sd" else taken


@pytest.mark.parametrize(("name", "failing"), [("run", []), ("wrong", ["sd"])])
def test_an_engine_that_writes_another_text_is_a_failure(name: str, failing: list[str]) -> None:
    """A text that goes on farther is the same."""
    contestants = (AR, SD, SSD)
    bed = SimpleNamespace(run=getattr(TwoTexts(), name))
    unit = engines_unit("8b/1b", contestants, 0, ("bed", lambda: bed))
    taken = zip(contestants, unit.take(Held()), strict=True)
    assert [one.method for one, sample in taken if sample.reason] == failing


def test_samples_are_found_again_and_failures_taken_anew(tmp_path: Path) -> None:
    file = SamplesFile.open(tmp_path / "run", CIRCUMSTANCES)
    file.add([sample(0), sample(1, values=None, reason="broke")], CIRCUMSTANCES)
    again = SamplesFile.open(tmp_path / "run", CIRCUMSTANCES)
    assert again.done(("passes", "a", 0))
    assert not again.done(("passes", "a", 1))
    assert again.num_failures("passes", "a") == 1
    again.add([sample(1, values={"seconds": 2.0})], CIRCUMSTANCES)
    last = SamplesFile.open(tmp_path / "run", CIRCUMSTANCES)
    assert last.by_repeat("passes") == {"a": {0: {"seconds": 1.0}, 1: {"seconds": 2.0}}}
    assert last.num_failures("passes", "a") == 0


def test_samples_of_other_circumstances_are_left_alone(tmp_path: Path) -> None:
    SamplesFile.open(tmp_path, CIRCUMSTANCES).add([sample()], CIRCUMSTANCES)
    with pytest.raises(ConfigError, match="seed 0, not 1"):
        SamplesFile.open(tmp_path, {**CIRCUMSTANCES, "seed": 1})


@pytest.mark.parametrize(
    "line", ['{"record": "sample"}', '{"record": "sample", "part": "passes"}', '{"record": "x"}']
)
def test_a_line_that_nobody_measured_is_refused(tmp_path: Path, line: str) -> None:
    SamplesFile.open(tmp_path, CIRCUMSTANCES).add([sample()], CIRCUMSTANCES)
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ConfigError, match="line 3"):
        SamplesFile.open(tmp_path, CIRCUMSTANCES)


def test_a_line_is_what_was_measured(tmp_path: Path) -> None:
    file = SamplesFile.open(tmp_path, CIRCUMSTANCES)
    file.add([sample(foreign_cpu_share=0.25)], CIRCUMSTANCES)
    line = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[1])
    assert line == {"record": "sample", **asdict(sample(foreign_cpu_share=0.25))}
