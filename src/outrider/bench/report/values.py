"""What a report is made of: parts with findings, claims, figures, tables, warnings and origins.

A part is what one results file says. A claim is a ratio with its interval and what it is a ratio
of; the summary at the top of the page is made from the claims of all parts and from nothing else.
Text is plain text: whatever a results file holds, it is escaped where the page is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.bench.figure_style import Theme
from outrider.bench.frame import Ratio

ClaimKind = Literal["speculation", "arrangement", "peer"]


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
    """`draw` makes a matplotlib figure in the colours of a theme; `alt` says what it shows, for
    those who cannot see it too. `name` is that of its files."""

    name: str
    title: str
    alt: str
    draw: Callable[[Theme], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An SVG file as somebody drew it, for light pages and for dark ones. It may hold anything, so
    a page shows it as an image, in which nothing runs and nothing is fetched."""

    title: str
    alt: str
    light: bytes
    dark: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`note` says how its numbers were made."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


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
    `about` what was measured, in a sentence each."""

    kind: str
    title: str
    place: str
    about: Sequence[str]
    findings: Sequence[str] = ()
    claims: Sequence[Claim] = ()
    figures: Sequence[Figure] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
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
