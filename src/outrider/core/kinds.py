"""The kinds of values that settings have, and how each is read from text or from a parsed file.

A reader raises ValueError or OverflowError for what it cannot read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

Value: TypeAlias = bool | int | float | str | tuple[str, ...] | Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Kind:
    """What values of one type are called, and how to read one: from text or as a file has it."""

    noun: str
    read: Callable[[object], Value]


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(value)
    return int(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    lowered = _text(value).strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(value)


def _texts(value: object) -> tuple[str, ...]:
    """A list of texts; given as text, a JSON list or the one entry itself."""
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith("[") else [value]
    if not isinstance(value, list | tuple):
        raise ValueError(value)
    return tuple(_text(entry) for entry in cast("list[object] | tuple[object, ...]", value))


def _numbers_by_id(value: object) -> Mapping[int, float]:
    """A mapping; given as text, a JSON object or ID=NUMBER entries between commas."""
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith("{") else _entries(value)
    if not isinstance(value, dict):
        raise ValueError(value)
    entries = cast("dict[object, object]", value)
    return {_integer(key): _number(number) for key, number in entries.items()}


def _entries(text: str) -> dict[str, str]:
    pairs = [entry.partition("=") for entry in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(text)
    return {key.strip(): number for key, _, number in pairs}


KINDS: Mapping[type, Kind] = {
    bool: Kind("a switch (1 or 0)", _switch),
    int: Kind("an integer", _integer),
    float: Kind("a number", _number),
    str: Kind("text", _text),
    tuple: Kind("a list of texts", _texts),
    Mapping: Kind("entries ID=NUMBER", _numbers_by_id),
}
