"""What a report is made of: parts with findings, claims, figures, tables, warnings and origins.

A part is what one results file says. A claim is a ratio with its interval and what it is a ratio
of; the summary at the top of the page is made from the claims of all parts and from nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.bench.charts import Chart
from outrider.bench.frame import Ratio
from outrider.bench.pages import Picture, Section

Record = Mapping[str, Any]
ClaimKind = Literal["speculation", "arrangement", "peer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that says it is of `kind`. `record` is the object of a JSON file and the first line of
    a JSON-lines file; `place` is how a report names it."""

    path: Path
    place: str
    kind: str
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """`ratio` above 1 is better. `speculation` is over plain decoding; `arrangement` compares ways
    to run it, and `peer` is over another program."""

    kind: ClaimKind
    where: str
    against: str
    ratio: Ratio

    @property
    def verdict(self) -> str:
        return self.ratio.verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`words` say what it shows, for those who cannot see it too; `name` is that of its files."""

    name: str
    chart: Chart
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where numbers come from (bench/machine.py), with what is unknown left out."""

    facts: Sequence[tuple[str, str]]
    machine: str
    commit: str | None
    dirty: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one results file or folder says. `place` is its path below what the user named, and
    `about` what was measured, in a sentence each. `pictures` are figures that the run drew."""

    kind: str
    title: str
    place: str
    about: Sequence[str]
    findings: Sequence[str] = ()
    claims: Sequence[Claim] = ()
    figures: Sequence[Figure] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Section] = ()
    warnings: Sequence[str] = ()
    origins: Sequence[Origin] = ()


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that is in no part, and why."""

    place: str
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    parts: Sequence[Part]
    skipped: Sequence[Skipped]
