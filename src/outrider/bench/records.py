"""JSON that anybody may have edited, as dataclasses: believed only if all of it fits.

Results and prompt sets are files that people look into, copy and change. What is read from one is
checked once, here, against the types of the fields it becomes; the rest of the program then relies
on them. What does not fit is a RecordError, which says what is wrong in the file's own words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

# More than any count or time, and little enough to calculate with.
_MAX_NUMBER = 2**63


class RecordError(ValueError):
    """Something that the program did not write; the message says what."""


def parse(text: str) -> dict[str, Any]:
    """The JSON object that `text` is. Raises RecordError."""
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


def made(kind: type[T], given: Mapping[str, Any]) -> T:
    """A dataclass from its fields. Raises RecordError for one that is missing, unknown or of
    another type. No number of a record is negative."""
    names = _hints(kind).keys()
    for name in sorted(names ^ given.keys()):
        raise RecordError(f"{name} is {'missing' if name in names else 'unknown'}")
    for name, hint in _hints(kind).items():
        if not _fits(given[name], hint):
            raise RecordError(f"{name} is {given[name]!r:.40}")
    return kind(**given)


def _fits(value: object, hint: Any) -> bool:
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return value in parts
    if kind is Sequence:
        items = cast("list[object]", value)
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in items)
    if hint in (int, float):
        right = type(value) in (int, hint)
        return right and 0 <= cast("float", value) < _MAX_NUMBER
    return isinstance(value, kind or hint)


@lru_cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _no_number(text: str) -> float:
    """NaN and infinities, which JSON has not and Python reads."""
    raise ValueError(text)
