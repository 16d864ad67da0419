"""Engines by level: turns, failures, pairing, bounds and words; on servers without models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles.fake_server import FakeServer
from outrider.bench.engines import figures
from outrider.bench.engines.cases import (
    SCENARIOS,
    Case,
    ClosedCase,
    LoadPlan,
    PoissonCase,
    Prompts,
    most_in_flight,
    scenario,
)
from outrider.bench.engines.cells import best_fixed, cells, comparisons
from outrider.bench.engines.figures import draw_all, draw_pairs, draw_timelines
from outrider.bench.engines.findings import Evidence, findings, meets_bar, verdict
from outrider.bench.engines.load_report import load_record
from outrider.bench.engines.load_report import sections as load_sections
from outrider.bench.engines.models import (
    AheadTimes,
    BareReads,
    ahead_predictions,
    lane_bounds,
)
from outrider.bench.engines.plan import (
    ENGINES,
    LEVELS,
    Contestant,
    Plan,
    config_of,
    engines_named,
    levels_named,
    line_up,
)
from outrider.bench.engines.record import csv_text, evidence_record, request_rows, sample_record
from outrider.bench.engines.reference import PUBLISHED, published, published_gain
from outrider.bench.engines.report import sections
from outrider.bench.engines.samples import Sample, Taken, agreement, run
from outrider.bench.engines.wins import head_to_head
from outrider.bench.figure_style import Theme
from outrider.bench.interval import Ratio
from outrider.bench.load.drive import ClosedLoop, OpenLoop
from outrider.bench.pages import Page, html, markdown
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.expected import expected_tokens
from outrider.core.params import SamplingParams

TEXTS = [f"prompt {i}" for i in range(7)]
PARAMS = SamplingParams(max_tokens=4)


def plan(levels: Sequence[int] = (0, 2), repeats: int = 5, num_requests: int = 3) -> Plan:
    return Plan(
        levels=levels,
        repeats=repeats,
        num_requests=num_requests,
        max_tokens=4,
        gap_seconds=0.5,
        texts=TEXTS,
        params=PARAMS,
    )


def contestant(name: str, server: FakeServer) -> Contestant:
    found = Contestant(name, EngineConfig(), server)
    server.on_job = found.jobs.append
    return found


def field() -> list[Contestant]:
    """PDV is a tenth faster than PD; drafting ahead costs more than it brings."""
    servers = {
        "off": FakeServer(step_seconds=0.010),
        "single": FakeServer(step_seconds=0.012, tokens=2),
        "pd": FakeServer(step_seconds=0.011, tokens=2),
        "pdv": FakeServer(step_seconds=0.010, tokens=2),
        "ssd": FakeServer(step_seconds=0.016, tokens=2, ahead=True),
        "auto": FakeServer(step_seconds=0.010, tokens=2),
    }
    return [contestant(name, server) for name, server in servers.items()]


def measured(plan: Plan, contestants: Sequence[Contestant]) -> list[Taken]:
    """Each server has a clock of its own, so each is driven by its own."""
    taken: dict[str, list[Taken]] = {}
    for one in contestants:
        assert isinstance(one.server, FakeServer)
        for visit in run(plan, [one], time=one.server.time):
            taken.setdefault(one.name, []).extend(visit)
    return [t for row in zip(*taken.values(), strict=True) for t in row]


@pytest.fixture(scope="module")
def taken() -> list[Taken]:
    return measured(plan(), field())


@pytest.fixture(scope="module")
def samples(taken: list[Taken]) -> list[Sample]:
    return [one.sample for one in taken]


@pytest.fixture(scope="module")
def evidence(samples: list[Sample]) -> Evidence:
    found = cells(samples)
    return Evidence(
        cells=found,
        comparisons=comparisons(samples),
        bounds=lane_bounds(samples, BareReads(0.004, 0.0005)),
        predictions=ahead_predictions(found),
        agreement=agreement(samples),
        foreign_cpu_share=0.2,
    )


def test_engines_take_turns_over_the_same_requests() -> None:
    clock_owner = FakeServer()
    order: list[str] = []

    class Noting(FakeServer):
        name: str = ""

        def submit(self, prompt: str, params: SamplingParams, /) -> Any:
            order.append(f"{self.name}:{prompt}")
            return super().submit(prompt, params)

    contestants: list[Contestant] = []
    for name in ("a", "b", "c"):
        server = Noting(clock=clock_owner.clock)
        server.name = name
        contestants.append(contestant(name, server))
    list(run(plan(levels=(2,), repeats=3, num_requests=1), contestants, time=clock_owner.time))
    # An untimed visit each, with prompts that are nobody's yet, then a visit a repeat in an order
    # that rotates.
    assert order == [
        *("a:prompt 3", "b:prompt 3", "c:prompt 3"),
        *("a:prompt 0", "b:prompt 0", "c:prompt 0"),
        *("b:prompt 1", "c:prompt 1", "a:prompt 1"),
        *("c:prompt 2", "a:prompt 2", "b:prompt 2"),
    ]


def test_cells_have_medians_of_what_happened(samples: list[Sample]) -> None:
    found = {(cell.level, cell.engine): cell for cell in cells(samples)}
    assert list(found) == [(level, engine) for level in (0, 2) for engine in ENGINES]
    off, pd = found[0, "off"], found[2, "pd"]
    # One request at a time: four steps each. Two in flight: three requests in two turns of two.
    assert off.tokens_per_second == pytest.approx(100)
    assert pd.tokens_per_second == pytest.approx(3 * 4 / (2 * 2 * 0.011), rel=1e-3)
    assert (off.itl_p95_ms, pd.itl_p95_ms, pd.round_p50_ms) == pytest.approx((10, 5.5, 11))
    assert (off.acceptance, pd.acceptance) == (None, 0.25)
    assert off.cumulative_p95_ms == pytest.approx(40)
    # Level 0 rests half a second after each of its requests.
    assert pd.busy == pytest.approx(1)
    assert off.busy == pytest.approx(0.12 / 1.12, abs=1e-3)
    assert pd.status == "success"


def test_ratios_are_paired_and_have_intervals_from_five_repeats(samples: list[Sample]) -> None:
    found = {(c.level, c.role): c for c in comparisons(samples)}
    gain = found[2, "pdv over pd"]
    assert gain.throughput.value == pytest.approx(1.1)
    assert gain.throughput.num_pairs == 5
    assert gain.throughput.low == pytest.approx(1.1)
    assert gain.itl_p95 is not None
    assert gain.itl_p95.value == pytest.approx(1 / 1.1)
    assert best_fixed(samples, 2) == "pdv"
    assert found[2, "auto over best fixed"].theirs == "pdv"
    assert found[2, "auto over best fixed"].throughput.value == pytest.approx(1)
    assert found[2, "auto over off"].throughput.value == pytest.approx(2)
    four = [sample for sample in samples if sample.repeat < 4]
    assert all(c.throughput.low is None for c in comparisons(four))


def test_failures_have_reasons_and_take_nobody_else_along() -> None:
    broken = contestant("pd", FakeServer(broken=("prompt 1",)))
    absent = Contestant("ssd", EngineConfig(), reason="ConfigError: not here")
    whole = contestant("single", FakeServer())
    found = [
        *measured(plan(levels=(1,), repeats=1), [broken]),
        *measured(plan(levels=(1,), repeats=1), [whole]),
        *next(iter(run(plan(levels=(1,), repeats=1), [absent]))),
    ]
    by_engine = {cell.engine: cell for cell in cells([t.sample for t in found])}
    assert by_engine["single"].status == "success"
    assert by_engine["pd"].status == (
        "failure (1 of 1): 1 of 3 requests failed: ValueError: broken"
    )
    assert by_engine["pd"].tokens_per_second is None
    assert by_engine["ssd"].status == "failure (1 of 1): ConfigError: not here"
    assert comparisons([t.sample for t in found]) == []


def test_other_tokens_of_an_exact_engine_are_a_failure() -> None:
    server, liar = FakeServer(), Shortened()
    both = [contestant("off", server), contestant("single", liar)]
    liar.clock = server.clock
    (visit,) = run(plan(levels=(1,), repeats=1), both, time=server.time)
    assert visit[0].sample.reason is None
    assert visit[1].sample.reason == "DifferentTokens: not those of off"
    assert agreement([t.sample for t in visit]) == (1, 0)
    both[1].exact = False
    (visit,) = run(plan(levels=(1,), repeats=1), both, time=server.time)
    assert visit[1].sample.reason is None


class Shortened(FakeServer):
    """Ends every text a token early."""

    def submit(self, prompt: str, params: SamplingParams, /) -> Any:
        return super().submit(prompt, SamplingParams(max_tokens=params.max_tokens - 1))


def test_an_engine_that_raises_is_a_failed_sample_not_the_end() -> None:
    class Raising(FakeServer):
        def advance(self) -> None:
            if self.num_steps >= 8:
                raise RuntimeError("defect")
            super().advance()

    server = Raising()
    found = measured(plan(levels=(1,), repeats=2, num_requests=1), [contestant("pd", server)])
    assert [t.sample.reason for t in found] == [None, "RuntimeError: defect"]
    assert server.cancelled


def test_a_job_of_the_visit_before_is_nobody_s(taken: list[Taken]) -> None:
    class Late(FakeServer):
        def advance(self) -> None:
            if self.on_job is not None:
                self.on_job(replace(taken[-1].jobs[0], lane="late", began=self.clock() - 9))
            super().advance()

    (one,) = measured(plan(levels=(1,), repeats=1), [contestant("ssd", Late())])
    assert {job.lane for job in one.jobs} == {"main"}


def test_a_configuration_follows_from_the_name() -> None:
    base = EngineConfig(k=3, controller="band")
    assert config_of("off", base, own_controller=False).drafter == "none"
    assert config_of("pdv", base, own_controller=False).schedule == "pdv"
    auto = config_of("auto", base, own_controller=False)
    assert (auto.schedule, auto.controller, auto.k) == ("auto", "goodput", 3)
    assert config_of("auto", base, own_controller=True).controller == "band"


def test_an_engine_that_cannot_be_loaded_keeps_its_reason() -> None:
    def opener(one: Contestant) -> None:
        if one.name == "ssd":
            raise ConfigError("no drafter can do that.")
        one.server = FakeServer()

    found = line_up(["single", "ssd"], EngineConfig(), opener)
    assert [one.reason for one in found] == [None, "ConfigError: no drafter can do that."]


def test_words_are_checked() -> None:
    assert engines_named("pd, pdv,pd") == ("pd", "pdv")
    assert levels_named("--levels", "3,0,3") == (0, 3)
    for call, said in (
        (lambda: engines_named("pvd"), "pvd"),
        (lambda: engines_named(","), "names nothing"),
        (lambda: levels_named("--levels", "1,-2"), "whole numbers"),
        (lambda: levels_named("--concurrency", "0", lowest=1), "from 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            call()


def test_no_arrangement_of_the_same_passes_beats_the_bare_reads(samples: list[Sample]) -> None:
    """Level 0: 3 requests of 2 passes, each with a draft of 4, in 6 x 12 ms."""
    bounds = {bound.level: bound for bound in lane_bounds(samples, BareReads(0.004, 0.0005))}
    assert bounds[0].eta == pytest.approx((6 * 0.004 + 24 * 0.0005) / 0.072, rel=1e-3)
    assert bounds[0].gain == pytest.approx(2, rel=1e-3)
    assert lane_bounds(samples, BareReads(0.004, 0.0005), engine="nobody") == []


# T_SD of 8B with 1B at K = 6, acceptance 0.9: S over plain at p_hit 0, .5, .7, .9 and 1.
@pytest.mark.parametrize(("p", "speed"), [(0, 2.58), (0.5, 3.43), (0.7, 3.95), (0.9, 4.66)])
def test_theorem_7_gives_the_model_table(p: float, speed: float) -> None:
    tokens = expected_tokens(0.9, 6)
    assert AheadTimes(p, tokens, tokens, 1.02, 1.02).speed == pytest.approx(speed, abs=0.006)


@given(
    p=st.floats(0, 1),
    ahead=st.floats(0, 3),
    fallback=st.floats(0, 3),
    batch=st.floats(1, 32),
    tokens=st.floats(1, 8),
)
def test_prediction_lies_between_missing_and_hitting_always(
    p: float, ahead: float, fallback: float, batch: float, tokens: float
) -> None:
    speed = AheadTimes(p, tokens, tokens, ahead, fallback, batch).speed
    ends = tokens / (1 + fallback), tokens / max(1.0, ahead)
    assert min(ends) - 1e-9 <= speed <= max(ends) + 1e-9
    alone = AheadTimes(p, tokens, tokens, ahead, fallback).speed
    if ends[1] >= ends[0]:
        assert speed <= alone + 1e-9


def test_a_prediction_needs_hits_and_a_window(samples: list[Sample], evidence: Evidence) -> None:
    """The servers' only lane never drafts ahead, so there is no T_ahead to reckon with."""
    assert evidence.predictions == []
    hits = [cell.p_hit for cell in cells(samples) if cell.engine == "ssd"]
    assert all(hit is not None and 0 < hit < 1 for hit in hits)


def test_a_prediction_from_known_times(samples: list[Sample]) -> None:
    """With hits always and a window that is long enough, drafting costs nothing."""
    found = cells(samples)
    known = {
        "single": {"draft_ms": 2.0, "verify_ms": 8.0, "tokens_per_round": 2.0},
        "ssd": {
            "p_hit": 0.5,
            "hit_tokens_per_round": 3.0,
            "miss_tokens_per_round": 1.0,
            "ahead_over_verify": 0.5,
            "mean_batch": 2.0,
        },
    }
    changed = [replace(cell, **known.get(cell.engine, {})) for cell in found if cell.level == 2]
    (one,) = ahead_predictions(changed)
    # 2 tokens over 0.25 x 1 + 0.75 x 1.25, against 2 over 1.25.
    assert one.ratio == pytest.approx(1.25 / (0.25 + 0.75 * 1.25), abs=1e-4)
    assert one.ratio_apart == pytest.approx(1.25 / (0.5 + 0.5 * 1.25), abs=1e-4)
    text = "\n".join(
        findings(
            Evidence(cells=changed, comparisons=comparisons(samples), bounds=[], predictions=[one])
        )
    )
    assert "its own times predict 1.053× where rows wait" in text


def test_sentences_follow_the_numbers(evidence: Evidence) -> None:
    text = "\n".join(findings(evidence))
    assert "All engines wrote the same tokens in 10 of 10 visits." in text
    assert "auto over off: at 2 of 2 levels" in text
    assert "Level 2: pdv has 1.100× (1.100 to 1.100) the throughput of pd (gain)" in text
    assert "at most 2.00× to gain here" in text
    assert "Level 0: ssd has 0.750× (0.750 to 0.750) the throughput of single (loss)" in text
    assert "Acceptance is 25.0 to 25.0 %" in text
    assert "do not rely on these times" in text
    assert "the source's own table has 0.988×" in text


@pytest.mark.parametrize(
    ("ratio", "word", "met"),
    [
        (Ratio(1.1, 1.05, 1.2, 5), "gain", True),
        (Ratio(0.98, 0.96, 1.01, 5), "no measurable difference", True),
        (Ratio(0.96, 0.955, 0.99, 5), "loss", False),
        (Ratio(0.99, 0.94, 1.05, 5), "no measurable difference", False),
        (Ratio(2.0, None, None, 4), "not judged", None),
    ],
)
def test_a_ratio_is_judged_by_its_interval(ratio: Ratio, word: str, met: bool | None) -> None:
    assert (verdict(ratio), meets_bar(ratio)) == (word, met)


def test_the_source_s_table_is_whole() -> None:
    assert {(p.level, p.engine) for p in PUBLISHED} == {
        (level, engine) for level in LEVELS for engine in ("single", "pd", "pdv")
    }
    five = published(5, "pdv")
    assert five is not None
    assert (five.tokens_per_second, five.cumulative_p95_ms) == (51.27, 16670.6)
    assert published_gain(5) == pytest.approx(1.115, abs=5e-4)
    assert published_gain(4) is None


def test_a_page_says_everything_twice(evidence: Evidence) -> None:
    page = Page("Engines <1>", list(sections(evidence)))
    text, web = markdown(page), html(page)
    assert text.startswith("# Engines <1>\n\n## Engines by level\n")
    assert "<h1>Engines &lt;1&gt;</h1>" in web
    for cell in evidence.cells:
        assert f"| {cell.level} | {cell.engine} | {cell.tokens_per_second:.1f} |" in text
        assert f"<td>{cell.level}</td><td>{cell.engine}</td>" in web
    assert "The source's own figures: other engines" in text
    assert "cumulative token time p95 ms" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| level | engine")}
    assert len(widths) >= 1


def test_records_have_plain_values(evidence: Evidence, taken: list[Taken]) -> None:
    import json

    record = json.loads(json.dumps(evidence_record(evidence), allow_nan=False))
    assert len(record["cells"]) == 12
    assert record["reference"]["label"].startswith("The source's own figures")
    sample = json.loads(json.dumps(sample_record(taken[-1].sample), allow_nan=False))
    assert sample["numbers"]["num_tokens"] == 12
    assert sample["lanes"]["lanes"]["main"]["num_jobs"] > 0
    rows = request_rows(taken)
    assert len(rows) == 2 * 5 * 6 * 3
    lines = csv_text(rows).splitlines()
    assert len(lines) == len(rows) + 1
    assert lines[0].startswith("level,engine,repeat,number,request,arrived_s")
    assert csv_text([]) == ""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def save(_: object, folder: Path, name: str, theme: Theme) -> list[Path]:
        names.append(name + theme.suffix)
        return [folder / f"{name}{theme.suffix}.svg"]

    monkeypatch.setattr(figures, "save", save)
    return names


def test_there_is_a_figure_for_each_question(
    evidence: Evidence, drawn: list[str], tmp_path: Path
) -> None:
    draw_all(evidence.cells, "small print", tmp_path)
    assert [name for name in drawn if not name.endswith("-dark")] == list(figures.FIGURES)
    assert len(drawn) == 2 * len(figures.FIGURES)
    drawn.clear()
    draw_pairs({"one": evidence.cells, "two": evidence.cells}, "pdv", "small print", tmp_path)
    assert drawn[0] == "pairs_itl_p95_vs_concurrency"


@pytest.mark.slow
def test_lanes_are_drawn_for_every_engine(taken: list[Taken], tmp_path: Path) -> None:
    two = [t for t in taken if t.sample.engine in ("pd", "ssd")]
    names = {path.name for path in draw_timelines(two, "small print", tmp_path)}
    assert {"lanes_pd.svg", "lanes_ssd-dark.png"} <= names


def load_plan(cases: Sequence[Case], repeats: int = 2) -> LoadPlan:
    prompts = Prompts(texts=TEXTS, max_tokens=4, seed=3)
    return LoadPlan(cases=cases, repeats=repeats, prompts=prompts, params=PARAMS)


def test_scenarios_are_the_four() -> None:
    found = [scenario(name, 10) for name in SCENARIOS]
    assert [most_in_flight(case) for case in found] == [1, 3, 5, 10]
    assert [isinstance(case.loop, OpenLoop) for case in found] == [False, True, True, True]
    rates = [case.rate for case in found if isinstance(case, PoissonCase)]
    assert rates == [2, 5, 10]
    load = load_plan(found)
    assert len(list(load.requests(0, 0))) == 1
    first, again, other = (list(load.requests(2, repeat)) for repeat in (0, 0, 1))
    assert first == again
    assert [r.arrival_seconds for r in first] != [r.arrival_seconds for r in other]
    assert load.most_in_flight == 10


def test_a_closed_case_may_last_for_a_time() -> None:
    case = ClosedCase(name="closed-2", num_in_flight=2, duration=0.1)
    assert case.loop == ClosedLoop(num_in_flight=2, duration=0.1)
    server = FakeServer()
    (first, _) = (
        visit[0] for visit in run(load_plan([case]), [contestant("pd", server)], time=server.time)
    )
    assert first.sample.numbers is not None
    assert first.sample.numbers.num_requests == 6


def test_wins_are_counted_where_both_served_everything() -> None:
    plan_of_two = load_plan(
        [scenario("single", 1), ClosedCase(name="closed-2", num_in_flight=2, num_requests=4)]
    )
    found: list[Sample] = []
    for name, step, broken in (("pd", 0.01, ()), ("pdv", 0.02, ()), ("ssd", 0.01, ("prompt 4",))):
        server = FakeServer(step_seconds=step, broken=broken)
        for visit in run(plan_of_two, [contestant(name, server)], time=server.time):
            found += [t.sample for t in visit]
    rows = {(row.metric, row.first, row.second): row for row in head_to_head(found)}
    row = rows["throughput", "pd", "pdv"]
    assert (row.first_wins, row.second_wins, row.ties) == (4, 0, 0)
    row = rows["end-to-end", "pdv", "ssd"]
    assert (row.first_wins, row.second_wins, row.ties) == (0, 3, 0)
    assert rows["ITL p95", "pd", "ssd"].ties == 3
    shown = list(load_sections(plan_of_two.cases, found, cells(found)))
    assert [section.title for section in shown] == ["Load", "Head to head", "Failures"]
    assert shown[2].points == [
        "closed-2, ssd: 1 of 2 failed: 1 of 4 requests failed: ValueError: broken"
    ]
    record = load_record(plan_of_two, found)
    assert [case["name"] for case in record["cases"]] == ["single", "closed-2"]  # pyright: ignore
