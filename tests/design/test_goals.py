"""The page of goals: a state in every row, and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "studies" / "pages" / "goals.md"
RESULTS = ROOT / "studies" / "results"


def rows(heading: str) -> list[list[str]]:
    part = PAGE.read_text(encoding="utf-8").partition(f"## {heading}")[2].partition("## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_planned_goals_have_a_bar_a_figure_and_a_state() -> None:
    found = rows("Planned")
    assert len(found) > 10
    assert [row for row in found if len(row) != 5 or not all(row)] == []
    assert [row for row in found if not re.match(r"(met|missed)\b", row[3])] == []
    assert [row for row in found if row[3] == "met" and not re.search(r"\d|hold\b", row[2])] == []


def test_figures_are_of_committed_results() -> None:
    names = {name for row in rows("Planned") for name in re.findall(r"`([^`]+)`", row[4])}
    assert [name for name in sorted(names) if not list(RESULTS.glob(f"{name}-*.json*"))] == []


@pytest.mark.parametrize("heading", ["Planned", "Hoped for"])
def test_plans_and_hopes_are_told_apart(heading: str) -> None:
    assert rows(heading)
