"""JSON as models write it: with line ends in strings, without quotes or last brackets, in pieces.

Values that are written as plain text are read by the types of their schema.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NoReturn, cast

# Errors that a reader of calls may raise for text that is not a call.
NOT_CALLS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_BLANKS = " \t\r\n;,"


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    """Return a number as a float. Raises ValueError if it is too large, as JSON has no infinity."""
    value = float(text)
    return value if isfinite(value) else _refuse(text[:20])


# Not strict: models write line ends and tabs in strings without escapes.
_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, strict=False)


def mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON object; for any other value, an empty one."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    return {}


def listed(value: object) -> list[Any]:
    """Return a JSON list: `value` itself if it is a list, an empty one for None, else `[value]`."""
    if isinstance(value, list):
        return cast("list[Any]", value)
    return [] if value is None else [value]


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError for other text, and for NaN and infinities."""
    value, end = _DECODER.raw_decode(text.strip())
    if text.strip()[end:].strip():
        raise ValueError("there is text behind the JSON")
    return value


def is_object(text: str) -> bool:
    """Return whether a text is one JSON object."""
    try:
        return isinstance(parse_json(text), Mapping)
    except NOT_CALLS:
        return False


_PAIRS = {"{": "}", "[": "]"}
_MARKS = re.compile(r'[\\"\[\]{}]')
_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(slots=True)
class JsonSpan:
    """The state at the end of an incomplete JSON text: the closing brackets of those that are open,
    and whether the text ends inside a string, or after a backslash in one."""

    open: list[str] = field(default_factory=list[str])
    quoted: bool = False
    escaped: bool = False

    def add(self, text: str) -> None:
        """Advance over `text`, up to the end of the first value."""
        self._scan(text, 0)

    def end(self, text: str, at: int) -> int | None:
        """Return the end of the first object or list if `text[at:]` follows; keep the state."""
        return JsonSpan([*self.open], self.quoted, self.escaped)._scan(text, at)

    def escape(self, text: str, at: int) -> tuple[str, int | None]:
        """Advance over `text[at:]`, up to the end of the first value. Return the text with control
        characters in strings escaped, and the index of that end, None if it has not come."""
        found: list[str] = []
        while True:
            control = _CONTROL.search(text, at)
            stop = len(text) if control is None else control.start()
            if (end := self._scan(text, at, stop)) is not None:
                return "".join([*found, text[at:end]]), end
            found.append(text[at:stop])
            if control is None:
                return "".join(found), None
            is_raw = self.quoted and not self.escaped
            found.append(json.dumps(control[0])[1:-1] if is_raw else control[0])
            self.escaped, at = False, control.end()

    def _scan(self, text: str, at: int, stop: int = sys.maxsize) -> int | None:
        while (mark := _MARKS.search(text, at, stop)) is not None or self.escaped:
            if self.escaped:
                if at >= min(stop, len(text)):
                    return None
                self.escaped, at = False, at + 1
                continue
            if mark is None:
                return None
            char, at = mark[0], mark.end()
            if char == "\\":
                self.escaped = self.quoted
            elif char == '"':
                self.quoted = not self.quoted
            elif not self.quoted and char in _PAIRS:
                self.open.append(_PAIRS[char])
            elif not self.quoted and self.open:
                self.open.pop()
                if not self.open:
                    return at
        return None


def in_string(body: str) -> bool:
    """Return whether a JSON text ends inside a string."""
    span, at = JsonSpan(), 0
    while (end := span.end(body, at)) is not None:
        at = end
    span.add(body[at:])
    return span.quoted


def mended_json(body: str) -> str:
    """Return a JSON text with missing last brackets added and surplus ones removed."""
    span = JsonSpan()
    end = span.end(body, 0)
    if end is not None:
        return body[:end] if not body[end:].strip("}] \t\r\n") else body
    span.add(body)
    return body if span.quoted else body + "".join(reversed(span.open))


def before_begun(body: str) -> int:
    """Return the index of an unfinished object after finished ones; 0 if there is none."""
    at = 0
    with suppress(*NOT_CALLS):
        while body.startswith("{", at):
            _, at = _DECODER.raw_decode(body, at)
            at = len(body) - len(body[at:].lstrip(_BLANKS))
    return at if body.startswith("{", at) else 0


def lax_json(text: str, *, unquoted: bool, strings: tuple[tuple[str, str], ...]) -> Any:
    """Parse JSON with unquoted keys, if allowed, and with strings between other delimiters."""
    kept: list[str] = []

    def stored(found: re.Match[str]) -> str:
        kept.append(found[1])
        return f"\x01{len(kept) - 1}\x02"

    for begin, end in strings:
        first, last = re.escape(begin), re.escape(end)
        # No second begin inside a string: each is looked for once.
        text = re.sub(rf"{first}((?:(?!{first}).)*?){last}", stored, text, flags=re.DOTALL)
        if begin in text:
            raise ValueError("a string without an end")
    if unquoted:
        text = _KEY.sub(r'\1"\2":', text)
    return parse_json(_STORED.sub(lambda found: json.dumps(kept[int(found[1])]), text))


_KEY = re.compile(r"([{,]\s{0,9})(\w{1,99}):")
_STORED = re.compile("\x01([0-9]{1,9})\x02")


def typed(text: str, schema: object) -> Any:
    """Return the value of `text` if its schema requires another type than a string."""
    for name in dict.fromkeys(schema_types(schema)):
        value = _read_as(text.strip(), name)
        if value is not _NONE:
            return value
    return text


_NONE = object()
# Names of types: those of JSON Schema, and Python's, which some clients send.
_WANTED: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "int": (int,),
    "number": (int, float),
    "float": (int, float),
    "boolean": (bool,),
    "bool": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "dict": (dict,),
    "array": (list,),
    "list": (list,),
}


def _read_as(text: str, name: str) -> object:
    words = {"True": "true", "False": "false", "None": "null"}
    try:
        value = parse_json(words.get(text, text))
    except NOT_CALLS:
        try:
            value = python_value(ast.parse(text, mode="eval").body)
        except (*NOT_CALLS, SyntaxError, MemoryError):
            return _NONE
    if name in ("integer", "int") and isinstance(value, float) and value.is_integer():
        value = int(value)
    is_flag = isinstance(value, bool) and name not in ("boolean", "bool")
    return value if isinstance(value, _WANTED.get(name, ())) and not is_flag else _NONE


def schema_types(schema: object) -> Iterator[str]:
    """Yield the types of a schema and of its alternatives."""
    entry = mapping(schema)
    yield from (one for one in listed(entry.get("type")) if isinstance(one, str))
    for name in ("anyOf", "oneOf"):
        for choice in listed(entry.get(name)):
            yield from schema_types({"type": mapping(choice).get("type")})
    if entry.get("nullable"):
        yield "null"


_PYTHON_NAMES = {"true": True, "false": False, "null": None}


def python_value(node: ast.expr) -> Any:
    """Return the value of a Python literal, with JSON's constants too. Raises ValueError."""
    match node:
        case ast.Name(id=name) if name in _PYTHON_NAMES:
            return _PYTHON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_python_key(key): python_value(value) for key, value in pairs}
        case _:
            value = ast.literal_eval(node)
            json.dumps(value, allow_nan=False)
            return value


def _python_key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key that is no text")


def json_values(body: str) -> Iterator[Any]:
    """Yield the JSON values of a text, one after another. Raises ValueError."""
    at, text = 0, body.strip(_BLANKS)
    if not text:
        raise ValueError("there is nothing")
    while at < len(text):
        value, at = _DECODER.raw_decode(text, at)
        yield value
        while at < len(text) and text[at] in _BLANKS:
            at += 1
