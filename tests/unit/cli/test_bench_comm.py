"""`outrider bench comm`: a table, or the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from doubles.command_line import Command
from outrider.bench.comm import CommReport, Fit, Point, Topology
from outrider.cli import bench_studies as bench_comm

REPORT = CommReport(
    Topology(2, "shared memory", ["cpu", "cpu"], 4, 2, []),
    [
        Point("all_reduce", 1024, 200, 2e-4, 1e-4, 1024.0),
        Point("send_recv", 1024, 200, 5e-5, 4e-5, 1024.0),
    ],
    [Fit("all_reduce", 1e-4, 2e9, 0.25), Fit("send_recv", 5e-5, None, 0.0)],
    0.125,
)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was asked of the benchmark, which is not run."""
    asked: list[object] = []

    def measure(**given: object) -> CommReport:
        asked.append(given)
        return REPORT

    monkeypatch.setattr(bench_comm, "measure", measure)
    return asked


def test_people_get_points_fits_and_a_forecast(outrider: Command, measured: list[object]) -> None:
    shown = outrider("bench", "comm", "--ranks", "3", "--largest-mb", "2")
    assert shown.code == 0, shown.err
    assert measured == [{"size": 3, "device": "auto", "largest_bytes": 2 << 20}]
    assert "2 over shared memory" in shown.out
    assert "2 with 4 threads" in shown.out
    assert "12 % of the CPUs" in shown.out
    assert "all_reduce: 100.0 us a message, 2.00 GB/s (off by 25 % at most)" in shown.out
    assert "send_recv: 50.0 us a message, no cost by size" in shown.out
    # Two sums a layer of 8 layers, 1 kB each: 16 times 100 us and 0.5 us.
    assert "1 rows 1.61 ms" in shown.out


def test_programs_get_everything_on_one_line_and_in_a_file(
    outrider: Command, tmp_path: Path
) -> None:
    shown = outrider("bench", "comm", "--json", "--output", "comm.json")
    assert shown.code == 0, shown.err
    record = json.loads(shown.out)
    assert record == json.loads((tmp_path / "comm.json").read_text())
    assert record["benchmark"] == "comm"
    assert record["provenance"]["packages"]["torch"]
    assert record["topology"]["ranks"] == 2
    assert record["points"][0]["gb_per_second"] == pytest.approx(1024 / 2e-4 / 1e9)
    assert [entry["rows"] for entry in record["passes"]] == [1, 8, 256]


def test_an_unknown_model_is_refused_before_anything_runs(
    outrider: Command, measured: list[object]
) -> None:
    shown = outrider("bench", "comm", "--model", "no/such/model")
    assert shown.code == 3
    assert "no model" in shown.err
    assert not measured
