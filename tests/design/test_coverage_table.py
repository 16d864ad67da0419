"""`project/coverage.md` has every requirement once, and what it calls working can be found.

The ids are written here as six runs of numbers, so a row that was lost is missed by this test and
not only by a reader.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAST_ROW = {"S0": 55, "S1": 65, "S2": 60, "S3": 43, "S4": 70, "S5": 21}
STATES = ("works", "partial", "missing")
MILESTONES = ("proof", "speed", "engines", "drafters", "lab", "server")
MAX_TITLE_WORDS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One requirement as the table has it."""

    id: str
    title: str
    state: str
    shown_by: str
    file: str

    @property
    def paths(self) -> list[str]:
        """What the row claims exists: the file, and every path in what shows it."""
        words = re.findall(r"`([^`]+)`", f"{self.shown_by} {self.file}")
        return [word for word in words if " " not in word and ("/" in word or "." in word)]


def rows() -> list[Row]:
    text = (ROOT / "project" / "coverage.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if re.match(r"\| S\d\.\d", line)]
    return [Row(*(cell.strip() for cell in line.strip().strip("|").split("|"))) for line in lines]


def test_every_id_stands_in_the_table_exactly_once() -> None:
    expected = [f"{source}.{n}" for source, last in LAST_ROW.items() for n in range(1, last + 1)]
    assert Counter(row.id for row in rows()) == Counter(expected)


def test_states_are_one_of_three_words() -> None:
    assert {row.state for row in rows()} <= set(STATES)


def test_titles_are_short() -> None:
    assert [row for row in rows() if not 1 <= len(row.title.split()) <= MAX_TITLE_WORDS] == []


def test_a_missing_row_names_its_milestone() -> None:
    missing = [row for row in rows() if row.state == "missing"]
    assert [row for row in missing if row.shown_by.removeprefix("later: ") not in MILESTONES] == []


def test_a_working_row_names_something_that_shows_it_and_every_path_exists() -> None:
    working = [row for row in rows() if row.state == "works"]
    assert [row.id for row in working if "`" not in row.shown_by or not row.paths] == []
    absent = [(row.id, path) for row in working for path in row.paths if not exists(path)]
    assert absent == []


def exists(path: str) -> bool:
    return (ROOT / path).exists()


def test_a_partial_row_names_a_file_that_exists() -> None:
    partial = [row for row in rows() if row.state == "partial"]
    assert [row.id for row in partial if not row.paths or not all(map(exists, row.paths))] == []
