"""Numbers of docs/algorithms/planner.md, computed again."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from checks.documents import Document
from doubles.planned import costs, flat
from outrider.core.spec import ModelSpec
from outrider.estimate.forecast import PassWork, sheets
from outrider_lab.planner.advise import Question, advise
from outrider_lab.planner.candidates import DraftOption, PlannedJob
from outrider_lab.planner.roofline import calibrate, device_sheet, ridge_rows

PAGE = Document.named("docs/algorithms/planner.md")
LLAMA = ModelSpec(
    *("8b", "llama", 128_256, 4096, 32, 32, 8, 128, 14_336, 8192, 8_030_261_248, 2, 2)
)


def test_the_table_of_sheets() -> None:
    rows = PAGE.rows_under("| sheet | GB/s")
    assert [row[0] for row in rows] == list(sheets())
    for name, *cells in rows:
        sheet = sheets()[name]
        target = calibrate(LLAMA, None, sheet).target
        wanted = [
            sheet.bandwidth / 1e9,
            sheet.flops["bfloat16"] / 1e12,
            sheet.memory_bytes / 1e9,
            round(ridge_rows(PassWork(LLAMA), sheet)),
            *(1e3 * target.seconds(count, 0, 0) for count in (1, 8, 64, 512)),
        ]
        for cell, number in zip(cells, wanted, strict=True):
            digits = len(cell.replace(".", "").lstrip("0"))
            assert f"{float(cell):.{digits}g}" == f"{number:.{digits}g}", (name, cell, number)


def test_the_sheet_that_is_shown_is_one(tmp_path: Path) -> None:
    text = PAGE.text.split("```yaml\n")[1].split("```")[0]
    for suffix, shown in (("yaml", text), ("json", json.dumps(yaml.safe_load(text)))):
        path = tmp_path / f"mine.{suffix}"
        path.write_text(shown)
        sheet = device_sheet(str(path))
        assert (sheet.bandwidth, sheet.overhead, sheet.memory_bytes) == (1.6e12, 4e-5, 48 * 10**9)


def test_a_batch_that_ends_apart_gains_a_fifth_less() -> None:
    assert "gain a fifth less than one long text" in PAGE.prose
    question = Question(job=PlannedJob(8, 0, 64), candidates=(DraftOption("model", 8),))
    best = advise(flat(costs(0.1, [0.8] * 8)), question).best
    assert best is not None
    assert round(best.speed_up / best.steady, 1) == 0.8
