"""What tests read of pages of the documentation, and what a viewer needs of a trace file."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Folders of pages: for users of the program, of what was measured, of the project.
FOLDERS = ("docs", "studies/pages", "project")
PAGES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))]


@dataclass(frozen=True)
class Document:
    """One page's text."""

    text: str

    @classmethod
    def named(cls, name: str) -> Document:
        """The page of that path from the root."""
        return cls((ROOT / name).read_text(encoding="utf-8"))

    @cached_property
    def prose(self) -> str:
        """Without line breaks: lines are wrapped anywhere."""
        return " ".join(self.text.split())

    def between(self, start: str, end: str) -> Document:
        """From the heading `start` to the heading `end`."""
        return Document(self.text[self.text.index(start) : self.text.index(end)])

    def rows_under(self, header: str) -> list[list[str]]:
        """The cells of the table whose header line begins so."""
        lines = self.text[self.text.index(header) :].splitlines()[2:]
        table = lines[: next((i for i, line in enumerate(lines) if not line), len(lines))]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]

    @property
    def numbers(self) -> set[str]:
        """Numbers in prose that say something: with a point, or of two digits and more."""
        text = "\n".join(line for line in self.text.splitlines() if not line.startswith(("|", "#")))
        return set(re.findall(r"(?<![\w.])\d+\.\d+|(?<![\w.])\d\d+", text))


Event = dict[str, Any]
KEYS = {"ph", "name", "ts", "pid", "tid"}
EXTRA = {"X": {"dur", "cat"}, "C": {"args"}, "M": {"args"}, "s": {"id", "cat"}}
EXTRA["f"] = {"id", "cat", "bp"}


def check_trace(text: str) -> list[Event]:
    """`text` is a whole file; its events."""
    record = json.loads(text)
    assert set(record) == {"displayTimeUnit", "otherData", "traceEvents"}
    events: list[Event] = record["traceEvents"]
    for event in events:
        assert set(event) >= KEYS | EXTRA[event["ph"]], event
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    named = [e["tid"] for e in events if e["name"] == "thread_name"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["outrider"]
    assert len(named) == len(set(named))
    assert {e["tid"] for e in events if e["ph"] in "Xsf"} == set(named)
    _check_slices([event for event in events if event["ph"] == "X"])
    _check_arrows(events)
    return events


def nanoseconds(event: Event) -> tuple[int, int]:
    """When it began and ended, in the whole numbers that were written."""
    began = round(1000 * event["ts"])
    return began, began + round(1000 * event.get("dur", 0))


def _check_slices(events: list[Event]) -> None:
    """Jobs of a lane come one after another, stages inside their job, the outer one first."""
    by_lane = sorted(events, key=lambda event: event["tid"])
    for _, found in groupby(by_lane, key=lambda event: event["tid"]):
        lane = list(found)
        jobs = [nanoseconds(event) for event in lane if event["cat"] == "job"]
        assert all(before[1] <= after[0] for before, after in pairwise(jobs))
        outer = (0, 0)
        for event in lane:
            began, ended = nanoseconds(event)
            if event["cat"] == "job":
                outer = began, ended
            assert outer[0] <= began <= ended <= outer[1]


def _check_arrows(events: list[Event]) -> None:
    """Each goes forward in time, from a job of its sequence to one on another lane."""
    arrows = [event for event in events if event["ph"] in "sf"]
    assert set(Counter(event["id"] for event in arrows).values()) <= {2}
    jobs = [event for event in events if event["ph"] == "X" and event["cat"] == "job"]
    for _, two in groupby(sorted(arrows, key=lambda e: (e["id"], e["ts"])), key=lambda e: e["id"]):
        start, end = two
        assert (start["ph"], end["ph"]) in (("s", "f"), ("f", "s"))
        assert start["ts"] <= end["ts"]
        assert start["tid"] != end["tid"]
        assert start["name"] == end["name"]
        seq_id = int(start["name"].removeprefix("sequence "))
        for event in (start, end):
            assert any(_runs(job, event, seq_id) for job in jobs)


def _runs(job: Event, event: Event, seq_id: int) -> bool:
    began, ended = nanoseconds(job)
    inside = began <= nanoseconds(event)[0] <= ended
    return inside and job["tid"] == event["tid"] and seq_id in job["args"]["sequences"]
