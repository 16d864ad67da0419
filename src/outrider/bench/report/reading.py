"""Results that anybody may have edited, as the values that parts are made of.

Files of other versions are read as far as they go: a field that this version does not know is left
out, and one that it misses has its default, or is None where None is allowed. Everything else is a
RecordError (bench/store.py), which says what is wrong in the file's own words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, cast

from outrider.bench.frame import MIN_PAIRS, Ratio
from outrider.bench.machine import is_busy, said_of
from outrider.bench.report.values import Claim, Origin
from outrider.bench.store import RecordError, entries, made

T = TypeVar("T")
Record = Mapping[str, Any]

_SHOWN_COMMIT = 12
_ORIGIN_FACTS = ("command", "utc", "python", "cpu", "cores", "physical_cores", "torch_threads")


def text_of(record: Record, name: str, default: str = "") -> str:
    """A string, or a number as it is written; `default` if there is none."""
    value = record.get(name)
    if value is None:
        return default
    if isinstance(value, str | int | float):
        return str(value)
    raise RecordError(f"{name} is {value!r:.40}")


def number_of(record: Record, name: str) -> float | None:
    """A finite number, or None if there is none."""
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RecordError(f"{name} is {value!r:.40}")
    return float(value)


def count_of(record: Record, name: str) -> int:
    """A whole number that is there. Raises RecordError."""
    value = number_of(record, name)
    if value is None or value != int(value):
        raise RecordError(f"{name} is {record.get(name)!r:.40}")
    return int(value)


def positive_of(record: Record, name: str) -> float:
    """A number above 0 that is there. Raises RecordError."""
    value = number_of(record, name)
    if value is None or value <= 0:
        raise RecordError(f"{name} is {record.get(name)!r:.40}")
    return value


def object_of(record: Record, name: str) -> Record:
    """A JSON object; empty if there is none."""
    value = record.get(name)
    return {} if value is None else entries(name, value)


def objects_of(record: Record, name: str) -> list[Record]:
    """A list of JSON objects; empty if there is none."""
    return [entries(name, item) for item in _list_of(record, name)]


def texts_of(record: Record, name: str) -> list[str]:
    """A list of strings; empty if there is none."""
    found = _list_of(record, name)
    for item in found:
        if not isinstance(item, str):
            raise RecordError(f"{name} has {item!r:.40}")
    return cast("list[str]", found)


def shares_of(record: Record, name: str) -> list[float | None]:
    """A list of numbers from 0 to 1, with None for what could not be told."""
    found = _list_of(record, name)
    for item in found:
        if item is not None and not (isinstance(item, int | float) and 0 <= item <= 1):
            raise RecordError(f"{name} has {item!r:.40}")
    return cast("list[float | None]", found)


def value_of(kind: type[T], record: Record, **changed: object) -> T:
    """A dataclass from the fields of `record` that it knows; `changed` replaces some."""
    given = {item.name: record.get(item.name, _default(item)) for item in fields(cast("Any", kind))}
    return made(kind, given | changed)


def ratio_of(record: Record, name: str, *, value: str = "value") -> Ratio | None:
    """A ratio with its interval, or None if there is none."""
    found = record.get(name)
    return None if found is None else flat_ratio(entries(name, found), value=value)


def flat_ratio(record: Record, *, value: str = "value", pairs: str = "num_pairs") -> Ratio:
    """Of fields named `value`, low, high and `pairs`. Raises RecordError unless it is above 0 and
    its interval is whole."""
    low, high = number_of(record, "low"), number_of(record, "high")
    if (low is None) != (high is None):
        raise RecordError("an interval has one end only")
    num = number_of(record, pairs)
    return Ratio(positive_of(record, value), low, high, int(num or 0))


def several(name: str, given: Sequence[Record], read: Callable[[Record], T]) -> list[T]:
    """Each of `given` as `read` reads it. A RecordError says which of them it was."""
    found: list[T] = []
    for number, record in enumerate(given, start=1):
        try:
            found.append(read(record))
        except RecordError as error:
            raise RecordError(f"{name} {number}: {error}") from None
    return found


def origin_of(record: Record) -> Origin:
    """Of the object that bench/machine.py made; empty facts are left out."""
    given = object_of(record, "provenance")
    versions = [f"{k} {v}" for k, v in object_of(given, "packages").items()]
    commit, dirty = given.get("commit"), given.get("dirty") is True
    known = isinstance(commit, str)
    code = f"{commit}{' with changes' if dirty else ''}" if known else ""
    facts = {
        **{name.replace("_", " "): text_of(given, name) for name in _ORIGIN_FACTS},
        "instructions": text_of(given, "isa"),
        "GPU": text_of(given, "cuda"),
        "packages": ", ".join(versions),
        "commit": code,
        "run": text_of(record, "run_id"),
        "pair": text_of(record, "pair"),
    }
    cores = text_of(given, "cores")
    parts = [text_of(given, "cuda"), text_of(given, "cpu"), f"{cores} cores" if cores else ""]
    return Origin(
        facts=[(name, value) for name, value in facts.items() if value],
        machine=", ".join(part for part in parts if part),
        commit=commit[:_SHOWN_COMMIT] if isinstance(commit, str) else None,
        dirty=dirty,
    )


def doubts(record: Record, claims: Sequence[Claim], origins: Sequence[Origin]) -> list[str]:
    """Why the numbers of a results file should be read with care."""
    found: list[str] = []
    if record.get("quick") is True:
        found.append("A quick run, to see that it works: its numbers say little.")
    if record.get("complete") is False:
        found.append("The run was interrupted: this is what it had measured until then.")
    share = number_of(record, "foreign_cpu_share")
    if is_busy(share) and (said := said_of(share)):
        found.append(said)
    if any(origin.dirty for origin in origins):
        found.append(
            "Files had been changed since the commit that is named, so it is not the code."
        )
    if not any(origin.commit for origin in origins):
        found.append("No commit is named, so it cannot be said which code this was.")
    unjudged = sum(claim.ratio.low is None for claim in claims)
    if unjudged:
        found.append(
            f"{unjudged} of {len(claims)} ratios have no interval: they are of fewer than "
            f"{MIN_PAIRS} pieces of work, or it was not kept."
        )
    return found


def shown(value: object) -> str:
    """A value of a results file in a cell of a table: numbers short, nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return str(value)


def _default(item: Field[Any]) -> object:
    """What a field is in a file of before it was there."""
    return None if item.default is MISSING else item.default


def _list_of(record: Record, name: str) -> list[object]:
    value = record.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RecordError(f"{name} is {value!r:.40}")
    return cast("list[object]", value)
