"""The results folder: nothing is lost, nothing is mixed, a cut-off line is no harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.sweeps import SETTINGS, circumstances, folder_of, numbers, sample
from outrider.bench.sweep_results import FILE_NAME, ResultsFolder
from outrider.core.errors import ConfigError, MachineError


def two(path: Path) -> ResultsFolder:
    return folder_of(path, sample(0, 0, numbers(0, 1.0)), sample(2, 0, numbers(2, 0.5)))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    written = two(tmp_path)
    failed = sample(2, 1, None, reason="CapacityError: full")
    written.add([failed])
    read = ResultsFolder.read(tmp_path)
    assert read.runs == written.runs
    assert [one.to_dict() for one in read.samples] == [one.to_dict() for one in written.samples]
    assert read.samples[-1].reason == "CapacityError: full"
    assert not read.samples[-1].ok


def test_every_line_says_what_it_is_of(tmp_path: Path) -> None:
    two(tmp_path)
    run, plain, drafted = map(json.loads, (tmp_path / FILE_NAME).read_text().splitlines())
    assert run["record"] == "run"
    assert {"schema", "version", "machine", "settings", "weights"} <= run.keys()
    assert (plain["label"], drafted["label"]) == ("AR", "SD-K2")
    assert drafted["config"]["k"] == 2
    assert len(drafted["config_hash"]) == 12


def test_a_cut_off_line_is_dropped_and_written_over(tmp_path: Path) -> None:
    two(tmp_path)
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert len(ResultsFolder.read(tmp_path).samples) == 1
    assert path.read_bytes() == whole[:-20]
    folder = ResultsFolder.open(tmp_path)
    folder.add([sample(2, 0, numbers(2, 0.5))])
    assert path.read_bytes() == whole


def test_the_newest_sample_counts(tmp_path: Path) -> None:
    folder = two(tmp_path)
    folder.add([sample(2, 0, numbers(2, 0.7), visit=2)])
    found = folder.current()
    assert len(found) == 2
    newest = [one.numbers for one in found.values() if one.config.k == 2]
    assert [n.seconds for n in newest if n] == [0.7]
    assert folder.next_visit() == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"machine": {"cpu": "loom"}}, "cpu 'abacus', not 'loom'"),
        ({"settings": SETTINGS | {"max_tokens": 9}}, "max_tokens 8, not 9"),
        ({"settings": SETTINGS | {"top_k": 4}}, "top_k the default, not 4"),
        ({"weights": {"target": "zz"}}, "weights of target 'aa', not 'zz'"),
        ({"prompt_sets": {"code": "zz"}}, "prompts of code 'cc', not 'zz'"),
    ],
)
def test_other_circumstances_are_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    folder = two(tmp_path / "out")
    before = (folder.path / FILE_NAME).read_bytes()
    with pytest.raises(ConfigError, match=words) as caught:
        folder.check(circumstances(**changes))
    assert str(folder.path) in str(caught.value)
    assert "--output-dir" in str(caught.value.hint)
    assert (folder.path / FILE_NAME).read_bytes() == before


def test_what_may_differ(tmp_path: Path) -> None:
    folder = two(tmp_path)
    folder.check(circumstances())
    folder.check(circumstances(prompt_sets={"conversation": "new"}))
    folder.check(
        circumstances(pair="another", settings={"max_tokens": 99}, weights={"target": "z"})
    )
    folder.check(circumstances(weights={"target": "aa"}))


@pytest.mark.parametrize("field", ["version", "schema"])
def test_another_version_is_refused(tmp_path: Path, field: str) -> None:
    two(tmp_path)
    path = tmp_path / FILE_NAME
    first, rest = path.read_text().split("\n", 1)
    record: dict[str, Any] = json.loads(first) | {field: "0.0.0"}
    path.write_text(json.dumps(record) + "\n" + rest)
    with pytest.raises(ConfigError, match=r"0\.0\.0") as caught:
        ResultsFolder.open(tmp_path)
    assert "--output-dir" in str(caught.value.hint)


@pytest.mark.parametrize(
    "text", ["nonsense\n", "[]\n", "{}\n", '{"record": "sample"}\n', '{"record": "run"}\n']
)
def test_foreign_lines_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ConfigError, match="holds"):
        ResultsFolder.open(tmp_path)


def test_a_folder_or_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="other files"):
        ResultsFolder.open(tmp_path)
    with pytest.raises(ConfigError, match="other files"):
        ResultsFolder.open(tmp_path / "thesis.txt")
    (tmp_path / "empty").mkdir()
    assert ResultsFolder.open(tmp_path / "empty").samples == []
    assert list((tmp_path / "empty").iterdir()) == []


def test_an_unusable_folder_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = ResultsFolder(tmp_path / "file" / "below")
    with pytest.raises(MachineError, match="cannot be used"):
        folder.add([sample(0, 0, None)])
