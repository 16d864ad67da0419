"""What a report finds in folders, what it makes of each kind, and what it says of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from doubles import report_results
from doubles.study_results import cell, study
from doubles.sweeps import circumstances, folder_of, numbers, sample, small_sweep
from outrider.plugins.measure.turns import Ratio
from outrider_lab.bench.charts import Dots, Lines
from outrider_lab.bench.report.build import build
from outrider_lab.bench.report.page import summary
from outrider_lab.bench.report.parts import Claim, Part, Report
from outrider_lab.bench.report.plots import MAX_ROWS, claims_chart
from outrider_lab.bench.report.views.study_charts import OF_CELLS
from outrider_lab.bench.studies.sweep_record import SWEEP, ResultsFolder

COMMITTED = Path(__file__).parents[3] / "studies" / "results"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return build([report_results.everything(tmp_path_factory.mktemp("results"))])


def part_of(report: Report, kind: str) -> Part:
    return next(part for part in report.parts if part.kind == kind)


def test_a_folder_has_a_part_for_every_kind_of_results(report: Report) -> None:
    assert report.skipped == []
    kinds = sorted(part.kind for part in report.parts)
    assert kinds[:7] == ["K sweep", "certificate", "cost study", *["costs"] * 3, "drafters"]
    assert kinds[7:11] == ["engines", "equal tokens", "load", "peers"]
    assert kinds[11:] == ["prediction", "prediction", "quality"]
    for part in report.parts:
        assert part.title
        assert part.about
        assert part.tables
        assert all(len(row) == len(t.header) for t in part.tables for row in t.rows), part.kind


def test_everything_that_is_committed_can_be_shown() -> None:
    found = build([COMMITTED])
    assert found.skipped == []
    assert len(found.parts) >= len(list(COMMITTED.glob("*.json")))


def test_parts_warn_of_what_makes_their_numbers_doubtful(tmp_path: Path) -> None:
    record = report_results.limits()
    record["provenance"] = {**record["provenance"], "dirty": True}
    record |= {"quick": True, "foreign_cpu_share": 0.4}
    report_results.write(tmp_path, "limits", record)
    warnings = "\n".join(build([tmp_path]).parts[0].warnings)
    for words in ("quick run", "40.0 % of the CPUs", "Files had been changed"):
        assert words in warnings
    del record["provenance"]
    report_results.write(tmp_path, "limits", record)
    assert any("No commit is named" in w for w in build([tmp_path]).parts[0].warnings)


def test_claims_are_judged_by_their_intervals_alone(report: Report) -> None:
    sweep = {claim.where: claim.verdict for claim in part_of(report, "K sweep").claims}
    assert sweep["toy, code, K=2"] == "gain"
    assert sweep["toy, maths, K=4"] == "loss"
    drafters = {claim.where: claim.verdict for claim in part_of(report, "drafters").claims}
    assert (drafters["code, good"], drafters["maths, bad"]) == ("gain", "loss")
    engines = part_of(report, "engines").claims
    kinds = {claim.where.partition(", ")[0]: claim.kind for claim in engines}
    assert kinds["pd"] == "speculation"
    assert kinds["pdv over pd"] == kinds["auto over best fixed"] == "arrangement"
    peers = [(claim.kind, claim.verdict) for claim in part_of(report, "peers").claims]
    assert peers == [("peer", "gain"), ("peer", "not judged"), ("speculation", "gain")]


def test_the_summary_is_made_of_claims(report: Report) -> None:
    found = summary(report)
    assert "Measured on abacus, 2 cores. All numbers are of commit fea27747ffc0." in found.text[0]
    gains, losses, table = found.sections
    assert any(gain.startswith("K sweep: toy: in 2 of 4 cells; 2.000×") for gain in gains.points)
    assert any(loss.startswith("Drafters: toy: in 2 of 4 cells; 0.5") for loss in losses.points)
    losing = [p.title for p in report.parts if any(c.verdict == "loss" for c in p.claims)]
    assert {line.partition(": in ")[0] for line in losses.points} <= set(losing)
    assert {row[0] for row in table.rows} == {p.title for p in report.parts if p.claims}


def test_committed_results_have_a_part_for_each_tier(tmp_path: Path) -> None:
    tier = report_results.drafters()
    head = {name: tier.pop(name) for name in ("benchmark", "provenance")}
    del tier["schema"], tier["pair"]
    tiers = [{"tier": name, **tier} for name in "ab"]
    report_results.write(tmp_path, "drafters", {**head, "tiers": tiers})
    found = build([tmp_path])
    assert [part.title for part in found.parts] == ["Drafters: tier A", "Drafters: tier B"]
    assert all(part.claims and part.origins[0].commit for part in found.parts)


def test_a_new_benchmark_of_ours_is_a_table(tmp_path: Path) -> None:
    record = {**report_results.limits(), "benchmark": "brand_new"}
    report_results.write(tmp_path, "new", record)
    (part,) = build([tmp_path]).parts
    assert (part.title, part.tables[0].rows) == ("brand new", [["a", "1.25"]])


def test_the_level_of_drafting_in_turns_is_that_of_the_same_study() -> None:
    """Each study has plain decoding of its own visits; a ratio over another's is another ratio."""
    cells = [
        cell("hits", "sd", 4, speed_up=1.1),
        *(cell("hits", "ssd", 4, p_hit=p, speed_up=1.2 + p) for p in (0.0, 1.0)),
    ]
    study, _, draw = OF_CELLS["fig2_hits"]
    ((panel,),) = draw(cells, "toy").panels
    assert study == "hits"
    assert isinstance(panel, Lines)
    named = {line.name: list(line.points) for line in panel.lines if line.name}
    assert named["SD, K=4, alpha=0.9"] == [(0.0, 1.1), (1.0, 1.1)]
    assert named["SSD, K=4, alpha=0.9"] == [(0.0, 1.2), (1.0, 2.2)]
    assert panel.levels == [("plain decoding", 1.0)]


def test_a_figure_that_is_cut_shows_no_better_half() -> None:
    claims = [
        Claim(kind="peer", where=f"{i}", against="x", ratio=Ratio(1 + i / 10, None, None, 2))
        for i in range(3 * MAX_ROWS)
    ]
    chart = claims_chart(claims, "title", "label", "foot")
    ((dots,),) = chart.panels
    assert isinstance(dots, Dots)
    half = MAX_ROWS // 2
    assert dots.names == [str(i) for i in (*range(half), *range(5 * half, 6 * half))]
    assert f"{2 * MAX_ROWS} more are in the table" in chart.foot


def test_a_window_that_scatter_alone_decides_says_so(tmp_path: Path) -> None:
    record = study()
    for row in record["windows"]:
        row["pass_seconds"] = 0.02 if row["branches"] == 1 else 0.015
    report_results.write(tmp_path, "ssd", record)
    (part,) = build([tmp_path]).parts
    assert sum("smaller differences in the verification window" in w for w in part.warnings) == 1
    assert not any("verification window are noise" in w for w in part_of_study(study(), tmp_path))


def part_of_study(record: dict[str, object], folder: Path) -> Sequence[str]:
    report_results.write(folder, "ssd", record)
    return build([folder]).parts[0].warnings


def test_closed_loops_are_drawn_by_requests_in_flight(tmp_path: Path, report: Report) -> None:
    assert [f.name for f in part_of(report, "load").figures] == ["load_by_case"]
    report_results.write(tmp_path, "load", report_results.load(closed=True))
    names = [figure.name for figure in build([tmp_path]).parts[0].figures]
    assert {"itl_p95_vs_concurrency", "throughput_vs_concurrency", "pareto"} <= set(names)


def test_a_failed_check_is_the_first_thing_said(tmp_path: Path) -> None:
    bad = report_results.certificate()
    bad["holds"] = bad["checks"][0]["holds"] = False
    report_results.write(tmp_path, "a", bad)
    report_results.write(tmp_path, "b", {**report_results.parity(), "num_equal": 7})
    parted = report_results.quality()
    parted["rules"][0]["num_same"] = 5
    report_results.write(tmp_path, "c", parted)
    first, second, third = build([tmp_path]).parts
    assert third.warnings == ["block broke its promise."]
    assert first.warnings == ["Checks that failed: algebra."]
    assert "1 tokens differ." in second.warnings
    assert "is NOT the same" in second.findings[0]


def test_a_sweep_in_which_everything_failed_is_a_part_without_claims(tmp_path: Path) -> None:
    failed = [sample(k, 0, None, reason="<b>broke</b>") for k in (0, 2)]
    folder_of(tmp_path, *failed, sample(0, 1, numbers(0, 1.0)))
    (part,) = build([tmp_path]).parts
    assert part.claims == []
    assert any("<b>broke</b>" in text for text in part.findings)


def test_a_study_of_predictions_is_shown_as_far_as_it_went(report: Report) -> None:
    part = next(part for part in report.parts if part.title == "The planner's promises")
    assert part.about == [
        "2 of 3 drawn cells were predicted, then measured; in 1 of them speculation was slower."
    ]
    text = " ".join(part.findings)
    assert "off by 9.4 % in the median of 2 cells" in text
    assert "foreseen in 100 % of the cells, and in 100 % of 2 that are sure" in text
    assert part.warnings == ["In 1 cells the text was not that of plain decoding."]
    assert part.claims == ()
    assert [figure.name for figure in part.figures] == ["planned_and_measured"]


def test_a_sweep_over_other_axes_has_its_own_tables(tmp_path: Path) -> None:
    made = small_sweep(tmp_path / "old")
    folder = ResultsFolder.open(tmp_path / "new", SWEEP)
    folder.add_run(circumstances(), {"notes": [], "axes": {"k": [2, 4], "domain": ["code"]}})
    folder.add(made.samples)
    (part,) = build([tmp_path / "new"]).parts
    assert part.kind == "sweep"
    assert {claim.verdict for claim in part.claims} >= {"gain", "loss"}
    assert [figure.name for figure in part.figures] == ["by_domain", "by_k"]
    assert any("2" in row for table in part.tables for row in table.rows)
