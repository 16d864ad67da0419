"""`outrider batch --ray`: the answers are those of one process, line for line. Parquet files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

import pyarrow
import pyarrow.parquet
from ray_batch import answers, kill_a_worker

LINES: list[dict[str, Any]] = [
    {"prompt": f"def part_{number}(self", "max_tokens": 12, "temperature": 0.8}
    for number in range(24)
]
LINES[5] = {"prompt": "x = ", "max_tokens": 8, "temprature": 1}


def outrider(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider", "batch", *words, "--threads", "1"]
    return subprocess.run(
        [*command, "--read-ahead", "4", "--json"], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("batch")
    (made / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert outrider(str(made / "in.jsonl"), str(made / "one.jsonl")).returncode == 1
    return made


def test_a_worker_that_is_killed_changes_no_answer(folder: Path) -> None:
    expected = (folder / "one.jsonl").read_bytes()
    # As if it had been stopped in the middle of a line before.
    (folder / "out.jsonl").write_bytes(expected[: len(expected) // 4])
    found = kill_a_worker(folder / "in.jsonl", folder / "out.jsonl", "--read-ahead", "4")
    assert found.was_killed
    assert found.code == 1, found.log
    assert answers(folder / "out.jsonl") == answers(folder / "one.jsonl")


def test_rows_of_a_parquet_file_are_lines(folder: Path) -> None:
    rows = [line for line in LINES if "temprature" not in line][:6]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "in.parquet")
    done = outrider(str(folder / "in.parquet"), str(folder / "rows.jsonl"))
    assert done.returncode == 0, done.stderr
    told, one = answers(folder / "rows.jsonl"), answers(folder / "one.jsonl")
    assert [line["text"] for line in told[:5]] == [line["text"] for line in one[:5]]
    assert json.loads(done.stdout)["answered"] == 6


def test_a_model_that_is_not_there_is_an_error_before_a_cluster_starts(folder: Path) -> None:
    done = outrider(str(folder / "in.jsonl"), str(folder / "no.jsonl"), "--ray", "--target", "/no")
    assert done.returncode == 3
    assert "/no" in done.stderr
