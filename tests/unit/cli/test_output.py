"""Files that are whole or absent, and JSON that is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli.output import check_writable, json_line, write_whole
from outrider.core.errors import MachineError


def test_json_is_one_ascii_line() -> None:
    line = json_line({"text": "é\n\U0001f600"})
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line) == {"text": "é\n\U0001f600"}


def test_not_a_number_is_never_written() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        json_line({"x": float("nan")})


def test_a_file_is_replaced_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    check_writable(path)
    assert list(tmp_path.iterdir()) == []
    write_whole(path, "one")
    write_whole(path, "two")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("x.json", "two")]


@pytest.mark.parametrize("path", ["absent/x.json", ".", "x" * 300])
def test_what_cannot_be_written_is_refused_early(tmp_path: Path, path: str) -> None:
    with pytest.raises(MachineError):
        check_writable(tmp_path / path)


def test_a_folder_is_refused_with_the_flag_that_named_it(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as caught:
        check_writable(tmp_path, flag="--save")
    assert caught.value.hint == "name a file with --save"
