"""The table of studies/pages/measured.md is made of the committed results by a script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_table.py"
PAGE = "studies/pages/measured.md"
PROVENANCE = {"cores": 4, "cpu": "A processor", "utc": "2026-12-01T00:00:00+00:00"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the script in a project that has no results yet."""
    (tmp_path / "scripts").mkdir()
    for script in (SCRIPT, SCRIPT.with_name("generated.py")):
        (tmp_path / "scripts" / script.name).write_bytes(script.read_bytes())
    (tmp_path / "studies" / "results").mkdir(parents=True)
    begin, end = (
        "<!-- Written by scripts/bench_table; do not edit. -->",
        "<!-- End of the table. -->",
    )
    (tmp_path / PAGE).parent.mkdir()
    (tmp_path / PAGE).write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "scripts" / SCRIPT.name), *words]
    return subprocess.run(command, check=False, timeout=240, capture_output=True, text=True)


def result(folder: Path, name: str, **facts: Any) -> None:
    path = folder / "studies" / "results" / f"{name}.json"
    path.write_text(json.dumps({"provenance": PROVENANCE} | facts))


def test_an_argument_that_is_not_known_changes_nothing(folder: Path) -> None:
    before = (folder / PAGE).read_text()
    done = run(folder, "--chek")
    assert (done.returncode, done.stderr) == (
        2,
        "scripts/bench_table: unknown argument --chek; known: --check\n",
    )
    assert (folder / PAGE).read_text() == before


def test_the_table_is_up_to_date() -> None:
    assert run(ROOT, "--check").returncode == 0, "run scripts/bench_table"


def test_a_row_has_a_figure_of_each_machine(folder: Path) -> None:
    result(folder, "parity-small", num_equal=1000, num_tokens=1001)
    result(folder, "parity-large", num_equal=5, num_tokens=5)
    cells = [{"sequences": 16, "decode_ratio": 9.876}]
    result(folder, "batch-large", cells=cells)
    assert run(folder, "--check").returncode == 1
    assert run(folder).returncode == 0
    assert run(folder, "--check").returncode == 0
    lines = (folder / PAGE).read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    table = [line for line in lines if line.startswith("|")]
    assert table == [
        "|  | large | small |",
        "| --- | --: | --: |",
        "| Throughput of 16 sequences over 1, plain, tier B | 9.88× |  |",
        "| Greedy tokens equal with and without speculation | 5 of 5 | 1,000 of 1,001 |",
    ]
    assert "`small` is 4 cores of A processor" in " ".join(lines)


def test_figures_of_several_requests_are_marked_if_schedules_changed_since(folder: Path) -> None:
    cells = [{"sequences": 16, "decode_ratio": 9.88}]
    old = PROVENANCE | {"utc": "2026-11-21T20:25:44+00:00"}
    result(folder, "batch-large", cells=cells, provenance=old)
    result(folder, "batch-small", cells=cells)
    result(folder, "parity-large", num_equal=5, num_tokens=5, provenance=old)
    assert run(folder).returncode == 0
    text = (folder / PAGE).read_text()
    assert "tier B | 9.88× † | 9.88× |" in text
    assert "| 5 of 5 |" in text
    assert "measured before the schedules last changed" in text


def test_quick_runs_other_files_and_local_machines_are_left_out(folder: Path) -> None:
    result(folder, "parity-quick", num_equal=5, num_tokens=5, quick=True)
    result(folder, "parity-local", num_equal=5, num_tokens=5)
    result(folder, "certificate-large", holds=True)
    assert run(folder).returncode == 0
    assert "|" not in (folder / PAGE).read_text()


def test_formats_are_rows_from_wide_to_narrow(folder: Path) -> None:
    for scheme, name in (("int4", "int4"), ("none", "bfloat16"), ("int8", "int8")):
        cells = [{"context": 256, "rows": 16, "against_one_row": 1.5}]
        result(folder, f"verify_cost-0.4b-{name}-large", quantise=scheme, cells=cells)
    assert run(folder).returncode == 0
    rows = [line for line in (folder / PAGE).read_text().splitlines() if "1.50×" in line]
    assert [row.split(",")[2].split()[0] for row in rows] == ["bfloat16", "int8", "int4"]


def test_peers_are_compared_like_with_like(folder: Path) -> None:
    scores = [{"contestant": "them plain", "peer": "llama.cpp"}]
    scores.append({"contestant": "us plain", "peer": "outrider"})
    ratio = {"what": "plain", "format": "bf16", "temperature": 0.0, "faster": 1.25}
    ratios = [ratio | {"theirs": "them plain"}, ratio | {"theirs": "us plain"}]
    ratios.append(ratio | {"theirs": "them plain", "temperature": 0.8})
    result(folder, "vs_peers-b-bf16-large", tier="b", scores=scores, ratios=ratios)
    assert run(folder).returncode == 0
    rows = [line for line in (folder / PAGE).read_text().splitlines() if "1.25×" in line]
    assert rows == ["| Against llama.cpp, tier B, bf16: plain | 1.25× |"]


def test_a_page_without_the_marks_is_an_error(folder: Path) -> None:
    (folder / PAGE).write_text("nothing\n")
    done = run(folder)
    assert done.returncode == 1
    assert f"{PAGE} lacks the line" in done.stderr
