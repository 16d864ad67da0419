"""Drafters compared: who takes part, turns, pairing, verdicts; with writers that have no model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doubles.clocks import FakeClock
from doubles.report_results import FakeWriter
from outrider.core.config import DRAFTERS, EngineConfig
from outrider.core.errors import CapacityError, CheckpointError, ConfigError
from outrider.core.params import SamplingParams
from outrider_lab.bench.studies import drafters_lineup as lineup_of_bench
from outrider_lab.bench.studies.drafters import (
    DrafterSample,
    Race,
    RacePlan,
    best_of_copy,
    bounds_of_copies,
    pieces_of,
)
from outrider_lab.bench.studies.drafters_lineup import (
    OFF,
    Contestant,
    Drafts,
    Lineup,
    Runner,
    available,
    contestants_named,
    is_common,
    known,
    line_up,
)
from outrider_lab.bench.studies.drafters_report import (
    DrafterCell,
    DraftersEvidence,
    SameTokens,
    agreement,
    cells,
    charts,
    evidence_of,
    evidence_record,
    plan_record,
    sample_rows,
)
from outrider_lab.measure.frame import csv_text

pytestmark = pytest.mark.wide

TEXTS = {"code": [f"code {i}" for i in range(6)], "maths": [f"maths {i}" for i in range(6)]}
PARAMS = SamplingParams(max_tokens=12)


def plan(repeats: int = 1, at_once: int = 1) -> RacePlan:
    return RacePlan(pieces=pieces_of(TEXTS, at_once=at_once), repeats=repeats, params=PARAMS)


def field(clock: FakeClock) -> list[Runner]:
    """Off takes 10 ms a token, `good` 12 ms for four, `bad` 20 ms for one."""
    return [
        FakeWriter(clock, 0.010).runner(OFF),
        FakeWriter(clock, 0.012, drafted=4, kept=3, draft_seconds=0.003).runner("good"),
        FakeWriter(clock, 0.020, drafted=4, kept=0, draft_seconds=0.010).runner("bad"),
    ]


def run(plan: RacePlan, runners: list[Runner], clock: FakeClock) -> list[DrafterSample]:
    return [sample for visit in Race(plan, runners, clock).run() for sample in visit]


@pytest.fixture(scope="module")
def samples() -> list[DrafterSample]:
    clock = FakeClock()
    return run(plan(), field(clock), clock)


@pytest.fixture(scope="module")
def found(samples: list[DrafterSample]) -> dict[tuple[str, str], DrafterCell]:
    return {(cell.domain, cell.contestant): cell for cell in cells(samples)}


def test_a_word_names_drafter_draft_depth_and_nodes() -> None:
    off, *rest = contestants_named("ngram, model=a/b:8, model=c:/d+24,ngram,model:2+7")
    assert (off.name, off.drafter) == (OFF, "none")
    assert [(c.drafter, c.draft, c.k, c.tree_nodes) for c in rest] == [
        ("ngram", None, None, 0),
        ("model", "a/b", 8, 0),
        ("model", "c:/d", None, 24),
        ("model", None, 2, 7),
    ]
    base = EngineConfig(k=5)
    configs = [contestant.config(base) for contestant in rest]
    assert [(c.k, c.tree_nodes, c.profile) for c in configs] == [
        (5, 0, True),
        (8, 0, True),
        (23, 24, True),
        (2, 7, True),
    ]
    assert off.config(base).drafter == "none"


def test_all_is_every_common_drafter_of_this_version_and_trees_of_those_that_branch() -> None:
    drafted = {(c.drafter, c.tree_nodes > 0) for c in contestants_named("all")} - {("none", False)}
    common = {name for name in DRAFTERS if name not in ("auto", "none") and is_common(name)}
    assert {name for name, _ in drafted} == common
    assert {name for name, tree in drafted if tree} == {n for n in common if known(n).branches}
    assert {"bridge", "prediction"} <= set(available()) - common


def test_drafts_are_those_that_belong_to_the_target() -> None:
    drafts = Drafts("a-model", {"eagle": Path("heads/eagle")})
    assert drafts.of_drafter("model") == "a-model"
    assert drafts.of_drafter("eagle") == str(Path("heads/eagle"))
    assert drafts.of_drafter("ngram") is None
    assert Drafts(None, {}, own_mtp=True).of_drafter("mtp") is None
    with pytest.raises(ConfigError, match="no draft model"):
        Drafts(None, {}).of_drafter("model")
    with pytest.raises(ConfigError, match="no eagle heads"):
        Drafts(None, {}).of_drafter("eagle")


def test_who_cannot_run_is_skipped_by_name_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lineup_of_bench, "resolve", Path)
    monkeypatch.setattr(lineup_of_bench, "weights_digest", str)
    opened: list[tuple[str | None, str]] = []

    class Stub:
        """Stands for an LLM that was loaded."""

        def __init__(self, config: EngineConfig) -> None:
            self.config, self.drafter, self.exact = config, config.drafter, True
            self.k = config.most_k
            self.kernels = type("Kernels", (), {"exact": True, "choices": ()})()
            self.notes = ("a note",)

        def close(self) -> None:
            opened.clear()

    def open_one(target: str, draft: str | None, config: EngineConfig) -> Any:
        assert target == "t"
        opened.append((draft, config.drafter))
        if config.drafter == "ngram":
            raise CheckpointError("broken file", hint="download it again")
        return Stub(config)

    chosen = contestants_named("ngram,model,model=b,eagle")
    lineup = line_up(chosen, "t", Drafts("d", {}), EngineConfig(), opener=open_one)
    assert opened == [(None, "none"), (None, "ngram"), ("d", "model"), ("b", "model")]
    assert [runner.name for runner in lineup.present] == [OFF, "model", "model=b"]
    assert lineup.skipped["ngram"] == "broken file (download it again)"
    assert "no eagle heads" in lineup.skipped["eagle"]
    assert lineup.notes[0] == "a note"
    assert [runner.facts["draft_weights"] for runner in lineup.present] == [None, "d", "b"]
    lineup.close()
    assert not opened
    with pytest.raises(ConfigError, match="no eagle heads"):
        line_up(contestants_named("eagle"), "t", Drafts(None, {}), EngineConfig(), opener=open_one)

    def refuse(one: Contestant) -> None:
        if one.name not in (OFF, "model"):
            raise CapacityError("no time is left.")

    chosen = contestants_named("model,suffix,recycling")
    lineup = line_up(chosen, "t", Drafts("d", {}), EngineConfig(), opener=open_one, admit=refuse)
    assert lineup.notes == ["a note", "suffix, recycling are skipped: no time is left."]


def test_pieces_are_cut_and_domains_take_turns() -> None:
    pieces = pieces_of(TEXTS, at_once=4)
    assert [(p.domain, p.number, len(p.prompts)) for p in pieces] == [
        ("code", 0, 4),
        ("maths", 0, 4),
        ("code", 1, 2),
        ("maths", 1, 2),
    ]


def test_what_was_written_is_forgotten_before_every_repeat() -> None:
    clock = FakeClock()
    writer = FakeWriter(clock, 0.01)
    runners = [writer.runner(OFF)]
    run(RacePlan(pieces=pieces_of(TEXTS, at_once=1), repeats=3, params=PARAMS), runners, clock)
    assert writer.num_forgotten == 3


def test_contestants_take_turns_over_the_same_pieces() -> None:
    clock = FakeClock()
    runners = field(clock)
    order: list[str] = []

    class Noting(FakeWriter):
        name: str = ""

        def generate(self, prompts: Any, params: SamplingParams, /) -> Any:
            order.append(f"{self.name} {prompts[0]}")
            return super().generate(prompts, params)

    for runner in runners:
        writer = Noting(clock, 0.01)
        writer.name = runner.name
        runner.writer = writer
    texts = {"code": TEXTS["code"][:3]}
    run(RacePlan(pieces=pieces_of(texts, at_once=1), repeats=1, params=PARAMS), runners, clock)
    assert [line.split()[0] for line in order] == [
        *("off", "good", "bad"),
        *("off", "good", "bad"),
        *("good", "bad", "off"),
        *("bad", "off", "good"),
    ]
    assert [line.split()[2] for line in order] == [*"000", *"000", *"111", *"222"]


def test_cells_have_ratios_shares_and_positions(found: dict[tuple[str, str], DrafterCell]) -> None:
    good, bad, off = (found["code", name] for name in ("good", "bad", OFF))
    assert off.tokens_per_second == pytest.approx(100)
    assert (off.speedup, off.verdict, off.acceptance) == (None, "", None)
    assert good.speedup is not None
    assert good.speedup.value == pytest.approx(10 / 3)
    assert (good.verdict, bad.verdict) == ("gain", "loss")
    assert good.tokens_per_round == 4
    assert good.acceptance == 0.75
    assert good.by_position == (1, 1, 1, 0)
    assert bad.by_position == (0, 0, 0, 0)
    assert (good.draft_share, bad.draft_share) == (0.25, 0.5)
    assert good.num_pieces == 6
    assert found["all", "good"].num_pieces == 12
    assert bad.speedup is not None
    assert bad.speedup.value == pytest.approx(0.5)


def test_a_piece_of_several_prompts_counts_them_all() -> None:
    clock = FakeClock()
    (cell,) = [
        cell
        for cell in cells(run(plan(at_once=3), field(clock), clock))
        if (cell.domain, cell.contestant) == ("maths", "good")
    ]
    assert (cell.num_pieces, cell.verdict) == (2, "not judged")
    assert cell.tokens_per_second == pytest.approx(1000 / 3)


def test_other_tokens_are_a_failure_unless_they_may_differ() -> None:
    clock = FakeClock()
    off, liar, lossy = (
        FakeWriter(clock, 0.01).runner(OFF),
        FakeWriter(clock, 0.01, drafted=2, lie=(1, 2)).runner("liar"),
        FakeWriter(clock, 0.01, drafted=2, lie=(3,)).runner("lossy"),
    )
    lossy.exact = False
    taken = run(plan(), [off, liar, lossy], clock)
    assert agreement(taken) == SameTokens(24, 12)
    by_name = {cell.contestant: cell for cell in cells(taken) if cell.domain == "code"}
    assert by_name["liar"].status.startswith("6 failed: DifferentTokens: not those of off from ")
    assert by_name["liar"].speedup is None
    assert by_name["lossy"].status == "success"


def test_one_that_fails_takes_nobody_along() -> None:
    clock = FakeClock()
    runners = field(clock)
    runners[1] = FakeWriter(clock, 0.01, drafted=1, broken=("code 2",)).runner("good")
    taken = run(plan(), runners, clock)
    failed = [(s.domain, s.piece, s.reason) for s in taken if not s.ok]
    assert failed == [("code", 2, "ValueError: cannot write code 2")]
    by_name = {c.contestant: c for c in cells(taken) if c.domain == "code"}
    assert by_name["good"].num_pieces == 5
    assert by_name["bad"].num_pieces == 6


def evidence(taken: list[DrafterSample], skipped: dict[str, str] | None = None) -> DraftersEvidence:
    runners = [Runner(name, reason=reason) for name, reason in (skipped or {}).items()]
    return evidence_of(plan(), Lineup(runners, ()), taken)


def test_records_are_json_and_rows_are_csv(samples: list[DrafterSample]) -> None:
    record = {**evidence_record(evidence(samples)), "plan": plan_record(plan())}
    again = json.loads(json.dumps(record, allow_nan=False))
    assert {cell["verdict"] for cell in again["cells"]} == {"", "gain", "loss"}
    assert again["plan"]["prompts"] == {"code": 6, "maths": 6}
    rows = csv_text(sample_rows(samples)).splitlines()
    assert len(rows) == 1 + 2 * 6 * 3
    assert rows[0].startswith("domain,piece,repeat,drafter,status,seconds")


def test_there_are_figures_where_something_was_drafted(samples: list[DrafterSample]) -> None:
    assert list(charts(cells(samples), "x")) == ["speedup_by_drafter", "acceptance_by_position"]
    assert charts([c for c in cells(samples) if c.contestant == OFF], "x") == {}


def test_what_a_copy_could_bring_at_most_is_told_beside_what_it_brought() -> None:
    """A token of its draft takes 0.75 ms, one of the target 10 ms; three of four are kept."""
    clock = FakeClock()
    copy = FakeWriter(clock, 0.012, drafted=4, kept=3, draft_seconds=0.003)
    runners = [FakeWriter(clock, 0.010).runner(OFF), copy.runner("quantised-self:4")]
    found = cells(run(plan(), runners, clock))
    mine = next(cell for cell in found if cell.contestant != OFF and cell.domain == "code")
    bound = best_of_copy(mine, 100.0)
    assert bound is not None
    assert bound == (pytest.approx(0.075), 3, pytest.approx(4 / 1.225))
    told = list(bounds_of_copies(found))
    assert len(told) == 3
    assert "a draft token of quantised-self:4 takes 0.0" in told[0]
    assert "3.27× at K = 3 is the most" in told[0]
    # Others are not copies, and a tree's rows are not told apart.
    assert best_of_copy(replace(mine, most_nodes=9), 100.0) is None
    assert best_of_copy(mine, None) is None


def test_what_drafts_by_itself_takes_part_where_it_is_compared() -> None:
    _, found = contestants_named("auto:5", auto=True)
    assert (found.name, found.drafter, found.config(EngineConfig()).k) == ("auto:5", "auto", 5)
    with pytest.raises(ConfigError, match="unknown drafter 'auto'"):
        contestants_named("auto,ngram")
