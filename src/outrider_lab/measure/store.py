"""Results on disk: files written in one piece, and files of JSON lines that runs append to.

A run may be stopped in the midst of a line: half a line of ours is dropped with the next lines that
are added, and nothing else is ever cut off. A file is accepted only if all of it is valid, because
people look into results, copy and change them. Results that could mean different things never share
a file: another version, schema or circumstance is an error, and nothing is overwritten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from outrider import __version__
from outrider.api.result import page_template
from outrider.core.errors import ConfigError, MachineError
from outrider.core.files import FileKind, read_bytes, replacing

T = TypeVar("T")
# A JSON value that contains no others.
Plain = str | int | float | bool | None

# More than any count or time, and small enough for calculations.
_MAX_NUMBER = 2**63
# The beginning of every line of ours.
_START = b'{"record": "'


# The results of a run in its folder, and a table with a row per request.
RESULTS, REQUESTS = "results.json", "requests.csv"


def write_json(path: Path, record: dict[str, object]) -> None:
    """Write `record` in one piece: a reader never sees half a file."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` in one piece, making the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


class RecordError(ValueError):
    """A record that the program did not write; the message says what is wrong."""


def parse(text: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises RecordError."""
    try:
        record: object = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise RecordError("not JSON") from None
    return entries("it", record)


def entries(name: str, value: object) -> dict[str, Any]:
    """`value` as a JSON object. Raises RecordError, which calls it `name`."""
    if not isinstance(value, dict):
        raise RecordError(f"{name} is {value!r:.40}")
    return cast("dict[str, Any]", value)


def made(kind: type[T], given: Mapping[str, Any], *, tolerant: bool = False) -> T:
    """A dataclass from the JSON values of its fields, including dataclasses within it. Raises
    RecordError for a field that is missing, unknown or of another type. Numbers are never negative.

    With `tolerant`, records of other versions are read as far as possible: an unknown field is left
    out, and a missing or null one has its default, or is None.
    """
    hints = _hints(kind)
    if tolerant:
        defaults = {n: v for n, v in _defaults(kind).items() if given.get(n) is None}
        given = {name: given.get(name) for name in hints if name not in defaults}
        hints = {name: hints[name] for name in given}
    else:
        defaults = {}
    for name in sorted(hints.keys() ^ given.keys()):
        raise RecordError(f"{name} is {'missing' if name in hints else 'unknown'}")
    values = {name: _value(name, given[name], hint, tolerant) for name, hint in hints.items()}
    try:
        return kind(**defaults, **values)
    except ValueError as error:
        raise RecordError(str(error)) from None


def _value(name: str, value: Any, hint: Any, tolerant: bool) -> Any:
    """A field's value from JSON: objects become dataclasses, and lists of objects lists of them."""
    kind, parts = get_origin(hint), get_args(hint)
    inner = next((part for part in (hint, *parts) if is_dataclass(part)), None)
    if inner is not None and kind is not Sequence and isinstance(value, dict):
        return made(cast("type[Any]", inner), cast("dict[str, Any]", value), tolerant=tolerant)
    if inner is not None and kind is Sequence and isinstance(value, list):
        return _each(name, cast("list[object]", value), cast("type[Any]", inner), tolerant)
    if not fits(value, hint):
        raise RecordError(f"{name} is {value!r:.40}")
    as_tuple = kind is tuple and isinstance(value, list)
    return tuple(cast("list[object]", value)) if as_tuple else cast("object", value)


def _each(name: str, values: list[object], kind: type[T], tolerant: bool) -> list[T]:
    """Dataclasses from a list. A RecordError has the number of the bad entry."""
    found: list[T] = []
    for number, value in enumerate(values, start=1):
        try:
            found.append(made(kind, entries("it", value), tolerant=tolerant))
        except RecordError as error:
            raise RecordError(f"{name} {number}: {error}") from None
    return found


def fits(value: object, hint: Any) -> bool:
    """True if a JSON value has this type."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if kind is Literal:
        return value in parts
    if kind is Sequence or (kind is tuple and isinstance(value, list)):
        items = cast("list[object]", value)
        return isinstance(value, list) and all(fits(item, parts[0]) for item in items)
    if hint in (int, float):
        right = type(value) in (int, hint)
        return right and 0 <= cast("float", value) < _MAX_NUMBER
    return isinstance(value, kind or hint)


@lru_cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _defaults(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in fields(cast("Any", kind)):
        if item.default_factory is not MISSING:
            found[item.name] = item.default_factory()
        elif item.default is not MISSING:
            found[item.name] = item.default
    return found


def _no_number(text: str) -> float:
    """Refuse NaN and infinities, which are not JSON but which Python reads."""
    raise ValueError(text)


@dataclass(slots=True)
class AppendLog:
    """A file of lines: `num_whole` bytes of whole lines, `num_bytes` in all when last used."""

    path: Path
    num_whole: int = 0
    num_bytes: int = 0

    @classmethod
    def read(cls, path: Path) -> tuple[AppendLog, list[bytes], bool]:
        """The file, its whole lines, and True if the rest can be half of ours. Raises OSError."""
        data = read_bytes(path, FileKind.RESULTS) if path.exists() else b""
        whole = data.rfind(b"\n") + 1
        end = data[whole:]
        log = cls(path, num_whole=whole, num_bytes=len(data))
        return log, data[:whole].split(b"\n")[:-1], end.startswith(_START[: len(end)])

    @property
    def torn(self) -> bool:
        """True if the file ends in half a line, which the next lines replace."""
        return self.num_bytes > self.num_whole

    def add(self, lines: bytes) -> None:
        """Append whole lines, creating the folder if need be. Raises OSError, and MachineError if
        another program wrote to the file: lines of two runs would be attributed to one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer, so that the written bytes are known when a disk is full.
        with self.path.open("ab", buffering=0) as file:
            if file.seek(0, 2) != self.num_bytes:
                raise MachineError(
                    f"{self.path} has changed since this run last wrote to it, so nothing was "
                    "added.",
                    hint="let one run at a time write into a folder; the same command goes on",
                )
            if self.torn:
                file.truncate(self.num_whole)
                self.num_bytes = self.num_whole
            left = memoryview(lines)
            while left:
                num_written = file.write(left)
                self.num_bytes += num_written
                left = left[num_written:]
        self.num_whole = self.num_bytes


@dataclass(slots=True)
class Store:
    """The results file of a study, to which a run appends and which a later run continues.

    A line of kind `head` has the circumstances under which the lines after it were measured, the
    schema and, if `is_versioned`, the version of the program. `take` gets every line with its kind
    when it is read; a RecordError, KeyError, TypeError or ValueError means that this version did
    not write it. The folder may have other files if they are `allowed`.
    With `is_single_file` the user names a file instead of a folder.
    """

    path: Path
    schema: str
    head: str
    take: Callable[[str, dict[str, Any]], None]
    allowed: Collection[str] = ()
    is_versioned: bool = True
    is_single_file: bool = False
    heads: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    log: AppendLog = field(init=False)

    def __post_init__(self) -> None:
        self.log = AppendLog(self.path)

    @property
    def location(self) -> Path:
        """The path that the user named."""
        return self.path if self.is_single_file else self.path.parent

    def open(self) -> None:
        """Read the file, to continue it. Raises ConfigError if it is not ours, and for a folder
        with other files and no results, whose circumstances are unknown; MachineError if it cannot
        be read. Nothing is created or changed."""
        try:
            if self._is_among_others():
                raise self.refusal(f"other files and no {self.path.name}")
        except OSError as error:
            raise self._unusable(error) from None
        self.read()

    def _is_among_others(self) -> bool:
        folder = self.path.parent
        if self.is_single_file or self.path.exists() or not folder.exists():
            return False
        return not folder.is_dir() or any(
            other.name not in self.allowed for other in folder.iterdir()
        )

    def read(self) -> None:
        """Pass every line to `take`, in order; nothing is created or changed. Raises ConfigError
        with the number of the first line that this version did not write, and MachineError."""
        try:
            self.log, lines, end_is_ours = AppendLog.read(self.path)
        except OSError as error:
            raise self._unusable(error) from None
        for number, line in enumerate(lines, start=1):
            try:
                self._take(parse(line.decode()))
            except ConfigError:
                raise
            except (KeyError, TypeError, ValueError) as error:
                raise self.refusal(_unknown_line(number, f" ({error})")) from None
        if not end_is_ours:
            raise self.refusal(_unknown_line(len(lines) + 1))

    def check(self, difference: Callable[[dict[str, Any]], str | None]) -> None:
        """Raises ConfigError if an earlier run had other circumstances; `difference` describes the
        difference of its head line in words."""
        for head in self.heads:
            found = difference(head)
            if found is not None:
                raise self.refusal(found)

    def begin(self, facts: Mapping[str, object]) -> int:
        """Append a head line. Returns its number, from 1. Raises MachineError."""
        marks = {"record": self.head, "schema": self.schema}
        if self.is_versioned:
            marks["version"] = __version__
        head: dict[str, Any] = {**marks, **facts}
        self._append([head])
        self.heads.append(json.loads(json.dumps(head)))
        return len(self.heads)

    def add(self, kind: str, records: Iterable[Mapping[str, object]]) -> None:
        """Append records of one kind, all or none; without any, create the file and check that it
        can be written. Raises MachineError."""
        self._append([{"record": kind, **record} for record in records])

    def refusal(self, found: str) -> ConfigError:
        """The error for results that a run must not be mixed with."""
        flag = "--output" if self.is_single_file else "--output-dir"
        path = self.location
        another = path.with_name(f"{path.stem}-2{path.suffix}")
        return ConfigError(
            f"{path} holds {found}. They are not mixed, and nothing was changed.",
            hint=f"choose another path, such as {flag} {another}",
        )

    def _take(self, record: dict[str, Any]) -> None:
        kind = record.get("record")
        if not isinstance(kind, str):
            raise RecordError(f"record is {kind!r:.40}")
        if kind == self.head:
            self._check_version(record)
        elif not self.heads:
            raise RecordError(f"no line of kind {self.head!r} before it")
        self.take(kind, record)
        if kind == self.head:
            self.heads.append(record)

    def _check_version(self, head: Mapping[str, Any]) -> None:
        schema, version = head.get("schema"), head.get("version")
        if schema != self.schema or (self.is_versioned and version != __version__):
            raise self.refusal(
                f"results of outrider {version} ({schema}); this is {__version__} ({self.schema})"
            )

    def _append(self, records: Iterable[Mapping[str, object]]) -> None:
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        try:
            self.log.add(text.encode())
        except OSError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: OSError) -> MachineError:
        what, flag = ("file", "--output") if self.is_single_file else ("folder", "--output-dir")
        return MachineError(
            f"the results {what} {self.location} cannot be used: {error.strerror or error}.",
            hint=f"name a {what} that you may write with {flag}",
        )


def difference(
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    *,
    words: str = "{}",
    of_both_only: bool = False,
) -> str | None:
    """The first entry that differs, as in "results with threads 2, not 4", or None. `words` is a
    format for the name of an entry; with `of_both_only` a missing entry is no difference."""
    names = theirs.keys() & ours.keys() if of_both_only else theirs.keys() | ours.keys()
    for name in sorted(names):
        if name not in theirs or name not in ours or theirs[name] != ours[name]:
            before, now = (
                f"{side[name]!r:.80}" if name in side else "unset" for side in (theirs, ours)
            )
            return f"results with {words.format(name)} {before}, not {now}"
    return None


def _unknown_line(number: int, why: str = "") -> str:
    return f"a line {number} that this version did not write{why}"


# A page of results, written as Markdown or as one HTML file without scripts.
#
# The templates are in templates/; the shell of all pages is an asset of `outrider.api`. The content
# of a page is text: HTML escapes it on insertion, for any content of a results file, and shows
# pictures for light and for dark screens.
_NUMBER = re.compile(r"[+-]?[\d.,]+×?( \([\d.]+ to [\d.]+\)| ± [\d.]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture. `light` and `dark` are addresses: files in the page's folder, or the data
    themselves. `words` describe it, also for readers who cannot see it."""

    title: str
    light: str
    dark: str
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of a page, in this order, any part may be empty: paragraphs, warnings, a table, a
    list, pictures, sections one level down, and facts (a name and a value each) that are folded
    away. `source` is the origin of all of it."""

    title: str
    source: str = ""
    text: Sequence[str] = ()
    warnings: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    points: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    sections: Sequence[Section] = ()
    facts: Sequence[Sequence[tuple[str, str]]] = ()

    @property
    def numeric(self) -> list[bool]:
        """True for each column that holds only numbers, with their intervals."""
        return [_is_numeric([row[i] for row in self.rows]) for i in range(len(self.header))]


@dataclass(frozen=True, slots=True)
class Page:
    """A page. If it is `whole`, it contains its pictures, so that its policy allows no requests,
    and lists its sections after the first, the summary."""

    title: str
    sections: Sequence[Section]
    whole: bool = False


def number(value: float | None, digits: int) -> str:
    """A number as a cell of a table."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """A percentage as a cell of a table."""
    return "-" if share is None else f"{100 * share:.1f}"


def plain_table(title: str, records: Sequence[Mapping[str, Any]], *, note: str = "") -> Section:
    """A table with a row per object, and a column per field that never holds a list or object."""
    names = list(dict.fromkeys(name for record in records for name in record))
    plain = [
        name for name in names if not any(isinstance(r.get(name), dict | list) for r in records)
    ]
    return Section(
        title=title,
        text=[note] if note else [],
        header=[name.replace("_", " ") for name in plain],
        rows=[[shown(record.get(name)) for name in plain] for record in records],
    )


def shown(value: object) -> str:
    """A value of a results file as a cell of a table: numbers short, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return str(value)


def write_page(folder: Path, page: Page) -> None:
    """Write `report.md` and `report.html`."""
    write_text(folder / "report.md", markdown(page))
    write_text(folder / "report.html", html(page))


def markdown(page: Page) -> str:
    return page_template("page.md.j2", "outrider_lab.measure").render(page=page)


def html(page: Page) -> str:
    return page_template("page.html.j2", "outrider_lab.measure").render(page=page)


def _is_numeric(column: Sequence[str]) -> bool:
    found = [text for text in column if text not in ("", "-")]
    return bool(found) and all(_NUMBER.fullmatch(text) for text in found)
