"""Files that are whole or absent, tables that are never cut, and what is wrapped for a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outrider.cli.output import check_writable, json_line, prose, screen_table, table, write_whole
from outrider.core.errors import MachineError
from outrider.core.fields import size


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


def test_tables_align_and_keep_every_word() -> None:
    assert table([("a", 1), ("bbb", "long words")], header=("x", "y")) == (
        "x    y\na    1\nbbb  long words"
    )
    assert table([]) == ""


def test_a_folder_is_refused_with_the_flag_that_named_it(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as caught:
        check_writable(tmp_path, flag="--save")
    assert caught.value.hint == "name a file with --save"


GRID = [("code", 2, "1.46", "76.3"), ("code", 4, "1.53", "68.5"), ("maths", 2, "1.51", "65.9")]


def test_a_wide_table_is_folded_behind_what_tells_its_rows_apart() -> None:
    header = ("domain", "k", "speed-up", "accepted %")
    whole = table(GRID, header=header)
    assert screen_table(GRID, header=header, width=80) == whole
    folded = screen_table(GRID, header=header, width=22)
    assert folded.split("\n\n") == [
        "domain  k  speed-up\ncode    2  1.46\ncode    4  1.53\nmaths   2  1.51",
        "domain  k  accepted %\ncode    2  76.3\ncode    4  68.5\nmaths   2  65.9",
    ]
    # A column that is too wide by itself stands alone, and loses nothing.
    assert [block.split()[-1] for block in screen_table(GRID, width=1).split("\n\n")] == [
        *("2", "1.51", "65.9")
    ]


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, text = [("a" * 30, "b" * 30)], "others used 84 % of it"
    assert (screen_table(rows), prose(text)) == (table(rows), text)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "14")
    assert prose(text) == "others used\n84 % of it"
    assert screen_table([("a", "b" * 8, "c" * 8)]) == f"a  {'b' * 8}\n\na  {'c' * 8}"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (15_999_488, "16 MB"), (18.5e9, "18.5 GB")]
)
def test_sizes_are_decimal(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text
