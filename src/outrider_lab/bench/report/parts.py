"""What a report is made of: parts with findings, claims, figures, tables, warnings and origins.

A part is what one results file says. A claim is a ratio with its interval and what it is a ratio
of; the summary at the top of the page is made from the claims of all parts and from nothing else.
Anybody may have edited a results file: what is not as it should be is a RecordError
(measure/store.py), which says what is wrong in the file's own words.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from outrider.core.files import FileKind, read_bytes
from outrider.plugins.measure.turns import MIN_PAIRS, OTHERS_USED, Ratio, is_busy, said_of
from outrider_lab.bench.charts import Chart
from outrider_lab.measure.store import Picture, RecordError, Section, fits

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
    """Where numbers come from (measure/machine.py), with what is unknown left out."""

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


T = TypeVar("T")

_SHOWN_COMMIT = 12
_ORIGIN_FACTS = ("command", "utc", "python", "cpu", "cores", "physical_cores", "torch_threads")
_MAX_PICTURE_BYTES = 400_000
_MAX_PICTURES = 8


def part_of(source: Source, record: Record | None = None, **given: Any) -> Part:
    """A part with the origin that `record`, by itself the whole of the source, names, and why its
    numbers should be read with care; what is `given` goes before both."""
    record = source.record if record is None else record
    origins = given.setdefault("origins", [origin_of(record)])
    doubted = doubts(record, given.get("claims", ()), origins)
    given["warnings"] = [*given.get("warnings", ()), *doubted]
    return Part(place=source.place, **given)


def text_of(record: Record, name: str, default: str = "") -> str:
    """A string, or a number as it is written; `default` if there is none."""
    value = _read(record, name, str | int | float)
    return default if value is None else str(value)


def number_of(record: Record, name: str) -> float | None:
    return _read(record, name, float)


def count_of(record: Record, name: str) -> int:
    return _required(name, _read(record, name, int))


def positive_of(record: Record, name: str) -> float:
    return _required(name, _read(record, name, float) or None)


def object_of(record: Record, name: str) -> Record:
    """A JSON object; empty if there is none."""
    return _read(record, name, dict) or {}


def objects_of(record: Record, name: str) -> list[Record]:
    """A list of JSON objects; empty if there is none."""
    return _read(record, name, Sequence[dict[str, Any]]) or []


def texts_of(record: Record, name: str) -> list[str]:
    """A list of strings; empty if there is none."""
    return _read(record, name, Sequence[str]) or []


def by_tier(record: Record) -> list[tuple[Record, str]]:
    """What a results file says of each tier of a committed benchmark, or of the pair that it is of,
    each with its name."""
    tiers = objects_of(record, "tiers")
    if not tiers:
        return [(record, text_of(record, "pair", "a pair"))]
    head = {name: value for name, value in record.items() if name != "tiers"}
    return [({**head, **tier}, f"tier {text_of(tier, 'tier', '?').upper()}") for tier in tiers]


def origin_of(record: Record) -> Origin:
    """Of the object that measure/machine.py made; empty facts are left out."""
    given = object_of(record, "provenance")
    versions = [f"{k} {v}" for k, v in object_of(given, "packages").items()]
    commit, dirty = given.get("commit"), given.get("dirty") is True
    known = isinstance(commit, str)
    facts = {
        **{name.replace("_", " "): text_of(given, name) for name in _ORIGIN_FACTS},
        "instructions": text_of(given, "isa"),
        "GPU": text_of(given, "cuda"),
        "packages": ", ".join(versions),
        "commit": f"{commit}{' with changes' if dirty else ''}" if known else "",
        "run": text_of(record, "run_id"),
        "pair": text_of(record, "pair"),
    }
    cores = text_of(given, "cores")
    machine = [text_of(given, "cuda"), text_of(given, "cpu"), f"{cores} cores" if cores else ""]
    return Origin(
        facts=[(name, value) for name, value in facts.items() if value],
        machine=", ".join(part for part in machine if part),
        commit=commit[:_SHOWN_COMMIT] if isinstance(commit, str) else None,
        dirty=dirty,
    )


def doubts(record: Record, claims: Sequence[Claim], origins: Sequence[Origin]) -> list[str]:
    """Why the numbers of a results file should be read with care."""
    share = number_of(record, "foreign_cpu_share")
    unjudged = sum(claim.ratio.low is None for claim in claims)
    said = {
        "A quick run, to see that it works: its numbers say little.": record.get("quick") is True,
        "The run was interrupted: this is what it had measured until then.": (
            record.get("complete") is False
        ),
        said_of(share) or "": is_busy(share),
        "Files had been changed since the commit that is named, so it is not the code.": any(
            origin.dirty for origin in origins
        ),
        "No commit is named, so it cannot be said which code this was.": not any(
            origin.commit for origin in origins
        ),
        f"{unjudged} of {len(claims)} ratios have no interval: they are of fewer than {MIN_PAIRS} "
        "pieces of work, or it was not kept.": unjudged > 0,
    }
    return [text for text, holds in said.items() if text and holds]


def own_words(findings: Sequence[str]) -> list[str]:
    """Without the sentence about a busy machine, which is among the warnings."""
    return [text for text in findings if not text.startswith(OTHERS_USED)]


def tables_of(sections: Iterable[Section]) -> list[Section]:
    """Those that have rows, without sentences, which are the findings of a part."""
    return [
        Section(title=one.title, text=one.text, header=one.header, rows=one.rows)
        for one in sections
        if one.rows
    ]


def stored(folder: Path, prefix: str, words: str) -> list[Picture]:
    """Figures that a run drew itself, by the beginning of their name; `words` stand before the rest
    of it. They may hold anything, so a page shows them as images, in which nothing runs."""
    found: list[Picture] = []
    paths = sorted((folder / "figures").glob(f"{prefix}*.svg"))
    for path in [path for path in paths if not path.stem.endswith("-dark")][:_MAX_PICTURES]:
        light, dark = _bytes(path), _bytes(path.with_stem(f"{path.stem}-dark"))
        if light is not None:
            title = f"{words} {path.stem.removeprefix(prefix)}"
            said = f"{title}, as the run drew it."
            found.append(picture(title, light, light if dark is None else dark, said))
    return found


def picture(title: str, light: bytes, dark: bytes, words: str) -> Picture:
    """SVG files inside a page."""
    light_url, dark_url = (
        f"data:image/svg+xml;base64,{b64encode(svg).decode('ascii')}" for svg in (light, dark)
    )
    return Picture(title=title, light=light_url, dark=dark_url, words=words)


def _read(record: Record, name: str, kind: Any) -> Any:
    """None if there is none. Raises RecordError for one of another type."""
    value = record.get(name)
    if value is not None and not fits(value, kind):
        raise RecordError(f"{name} is {value!r:.40}")
    return value


def _required(name: str, value: T | None) -> T:
    if value is None:
        raise RecordError(f"{name} is missing or 0")
    return value


def _bytes(path: Path) -> bytes | None:
    """None for a file that is missing, a link, or larger than such a figure is."""
    try:
        if path.is_symlink() or path.stat().st_size > _MAX_PICTURE_BYTES:
            return None
        return read_bytes(path, FileKind.PICTURE)
    except OSError:
        return None
