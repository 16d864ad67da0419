"""Files that runs append to: half a line goes, nothing that somebody else wrote, nothing mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.sweeps import circumstances
from outrider import __version__
from outrider.core.errors import ConfigError, MachineError
from outrider_lab.bench.studies.sweep_record import ResultsFolder
from outrider_lab.measure.store import AppendLog, Store, difference

LINE = b'{"record": "run"}\n'


def store(path: Path, taken: list[dict[str, Any]] | None = None, **options: Any) -> Store:
    """Its lines have a number `n`; `taken` gets what is read."""

    def take(kind: str, record: dict[str, Any]) -> None:
        if kind == "sample":
            assert record["n"] >= 0
            if taken is not None:
                taken.append(record)

    return Store(path, "toy/1", "run", take, **options)


def test_half_a_line_of_ours_is_dropped_with_the_next_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.jsonl"
    log, lines, _ = AppendLog.read(path)
    assert not lines
    log.add(LINE)
    with path.open("ab") as stream:
        stream.write(LINE[:9])
    again, lines, end_is_ours = AppendLog.read(path)
    assert (lines, end_is_ours, again.torn) == ([LINE[:-1]], True, True)
    again.add(LINE)
    again.add(LINE)
    assert path.read_bytes() == 3 * LINE


@pytest.mark.parametrize("options", [{}, {"is_single_file": True, "is_versioned": False}])
def test_a_later_run_goes_on_where_one_was_stopped(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    first = store(path, **options)
    first.open()
    assert first.begin({"machine": {"cores": 2}}) == 1
    first.add("sample", [{"n": 1}, {"n": 2}])
    with path.open("a") as stream:
        stream.write('{"record": "sam')
    taken: list[dict[str, Any]] = []
    later = store(path, taken, **options)
    later.open()
    assert [one["n"] for one in taken] == [1, 2]
    assert later.heads == first.heads
    assert ("version" in later.heads[0]) is not bool(options)
    later.add("sample", [{"n": 3}])
    kinds = [json.loads(line)["record"] for line in path.read_text().splitlines()]
    assert kinds == ["run", "sample", "sample", "sample"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["nonsense"], "line 1 that this version did not write (not JSON)"),
        ([{"record": "sample", "n": 1}], "(no line of kind 'run' before it)"),
        ([{"record": "run", "schema": "toy/1", "version": "0"}], "outrider 0 (toy/1)"),
        ([{"record": "run", "schema": "toy/2", "version": __version__}], "(toy/2)"),
        ([dict[str, str]()], "record is None"),
    ],
)
def test_what_is_not_ours_is_refused_and_left_alone(
    tmp_path: Path, lines: list[object], said: str
) -> None:
    path = tmp_path / "runs.jsonl"
    text = "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines)
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        store(path).open()
    assert said in str(caught.value)
    assert f"--output-dir {tmp_path}-2" in str(caught.value.hint)
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["my notes, without an end", '{"runs": []}'])
def test_a_file_of_somebody_else_without_an_end_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line 1 that this version did not write"):
        store(path).open()
    assert path.read_text() == text


def test_a_folder_with_other_files_is_refused_unless_they_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    path = tmp_path / "runs.jsonl"
    with pytest.raises(ConfigError, match=r"other files and no runs\.jsonl"):
        store(path).open()
    store(path, allowed=("logs",)).open()
    store(path, is_single_file=True).open()


def test_of_two_runs_in_one_folder_the_later_loses_nothing_of_the_other(tmp_path: Path) -> None:
    earlier, later = (ResultsFolder.open(tmp_path / "k") for _ in range(2))
    earlier.prepare()
    later.prepare()
    assert earlier.add_run(circumstances(), {}) == 1
    with pytest.raises(MachineError, match="has changed"):
        later.add_run(circumstances(), {})
    assert len(ResultsFolder.open(tmp_path / "k").runs) == 1


def test_a_difference_is_said_in_words() -> None:
    theirs, ours = {"threads": 2, "seed": 0}, {"threads": 4, "k": 1}
    assert difference(theirs, theirs) is None
    assert difference(theirs, ours) == "results with k unset, not 1"
    assert difference(theirs, ours, of_both_only=True) == "results with threads 2, not 4"
    found = difference({"target": "aa"}, {"target": "zz"}, words="weights of {}")
    assert found == "results with weights of target 'aa', not 'zz'"
