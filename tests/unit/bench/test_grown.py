"""Files that runs append to: half a line goes, and nothing that somebody else wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from doubles.sweeps import circumstances
from outrider.bench.gemm.samples import Sample, SamplesFile
from outrider.bench.peers.journal import FILE_NAME, Journal
from outrider.bench.plan_cells.record import Study
from outrider.bench.store import AppendLog
from outrider.bench.studies.sweep_record import ResultsFolder
from outrider.core.errors import ConfigError, MachineError

LINE = b'{"record": "run"}\n'


def test_half_a_line_of_ours_is_dropped_with_the_next_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.jsonl"
    file, lines, _ = AppendLog.read(path)
    assert not lines
    file.add(LINE)
    with path.open("ab") as stream:
        stream.write(LINE[:9])
    again, lines, end_is_ours = AppendLog.read(path)
    assert (lines, end_is_ours) == ([LINE[:-1]], True)
    again.add(LINE)
    again.add(LINE)
    assert path.read_bytes() == 3 * LINE


def test_of_two_runs_in_one_folder_the_later_loses_nothing_of_the_other(tmp_path: Path) -> None:
    first, second = (Journal.open(tmp_path / "peers") for _ in range(2))
    first.begin({"machine": "m"}, {})
    with pytest.raises(MachineError, match="has changed"):
        second.begin({"machine": "m"}, {})
    assert len(Journal.open(tmp_path / "peers").sessions) == 1
    sample = Sample(part="passes", name="a", repeat=0, values={"seconds": 1.0})
    one, other = (SamplesFile.open(tmp_path / "ssd", {"seed": 0}) for _ in range(2))
    one.add([sample], {"seed": 0})
    with pytest.raises(MachineError, match="has changed"):
        other.add([sample], {"seed": 0})
    assert SamplesFile.open(tmp_path / "ssd", {"seed": 0}).samples == {sample.key: sample}


def test_nor_do_two_sweeps_or_studies(tmp_path: Path) -> None:
    earlier, later = (ResultsFolder.open(tmp_path / "k") for _ in range(2))
    earlier.prepare()
    later.prepare()
    assert earlier.add_run(circumstances(), {}) == 1
    with pytest.raises(MachineError, match="has changed"):
        later.add_run(circumstances(), {})
    assert len(ResultsFolder.open(tmp_path / "k").runs) == 1
    path = tmp_path / "study.jsonl"
    ours, theirs = (Study.open(path) for _ in range(2))
    ours.cells_drawn((), {"seed": 0})
    with pytest.raises(MachineError, match="has changed"):
        theirs.cells_drawn((), {"seed": 1})
    assert [line["seed"] for line in Study.open(path).lines] == [0]


@pytest.mark.parametrize("text", ["my notes, without an end", '{"runs": []}'])
def test_a_file_of_somebody_else_without_an_end_is_left_alone(tmp_path: Path, text: str) -> None:
    for name in (FILE_NAME, "samples.jsonl"):
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="line 1 that this version did not write"):
        Journal.open(tmp_path)
    with pytest.raises(ConfigError, match="line 1 that this version did not write"):
        SamplesFile.open(tmp_path, {"seed": 0})
    assert (tmp_path / FILE_NAME).read_text() == text
