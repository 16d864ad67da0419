"""JSON as models write it: with line ends in strings, without quotes or last brackets, in pieces.

What stands for a value is read by the types that a schema names.
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

# What a reader of calls may raise for text that is none.
NOT_CALLS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_BLANKS = " \t\r\n;,"


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    """Raises ValueError for a number that no float holds: JSON could not tell it again."""
    value = float(text)
    return value if isfinite(value) else _refuse(text[:20])


# Models write line ends and tabs in strings as they are.
_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, strict=False)


def mapping(value: object) -> Mapping[str, Any]:
    """An object of JSON; an empty one for anything else."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    return {}


def listed(value: object) -> list[Any]:
    """A list of JSON; one of `value` alone if that is none, and of nothing for None."""
    if isinstance(value, list):
        return cast("list[Any]", value)
    return [] if value is None else [value]


def parse_json(text: str) -> Any:
    """Raises ValueError for what is no JSON, NaN and infinities among it."""
    value, end = _DECODER.raw_decode(text.strip())
    if text.strip()[end:].strip():
        raise ValueError("there is text behind the JSON")
    return value


def is_object(text: str) -> bool:
    """Whether a text is one object of JSON."""
    try:
        return isinstance(parse_json(text), Mapping)
    except NOT_CALLS:
        return False


_PAIRS = {"{": "}", "[": "]"}
_MARKS = re.compile(r'[\\"\[\]{}]')
_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(slots=True)
class JsonSpan:
    """How far a text of JSON is: the brackets that are open, whether it is in a string, and at a
    backslash there."""

    open: list[str] = field(default_factory=list[str])
    quoted: bool = False
    escaped: bool = False

    def add(self, text: str) -> None:
        """Go on behind `text`, or to its first value's end."""
        self._scan(text, 0)

    def end(self, text: str, at: int) -> int | None:
        """The end of the first object or list if `text[at:]` comes next; changes nothing."""
        return JsonSpan([*self.open], self.quoted, self.escaped)._scan(text, at)

    def escape(self, text: str, at: int) -> tuple[str, int | None]:
        """`text[at:]`, up to the end of the first value, which is the second, with the control
        characters in its strings escaped; goes on behind it."""
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
    """True for a text of JSON that ends within a string."""
    span, at = JsonSpan(), 0
    while (end := span.end(body, at)) is not None:
        at = end
    span.add(body[at:])
    return span.quoted


def mended_json(body: str) -> str:
    """A text of JSON with the last brackets that a model left out, without surplus ones."""
    span = JsonSpan()
    end = span.end(body, 0)
    if end is not None:
        return body[:end] if not body[end:].strip("}] \t\r\n") else body
    span.add(body)
    return body if span.quoted else body + "".join(reversed(span.open))


def before_begun(body: str) -> int:
    """Where an object begins that has no end, behind whole ones; 0 if there is none."""
    at = 0
    with suppress(*NOT_CALLS):
        while body.startswith("{", at):
            _, at = _DECODER.raw_decode(body, at)
            at = len(body) - len(body[at:].lstrip(_BLANKS))
    return at if body.startswith("{", at) else 0


def _stored(text: str, begin: str, end: str, kept: list[str]) -> str:
    first, *rest = text.split(begin)
    pieces = [first]
    for piece in rest:
        inside, sign, behind = piece.partition(end)
        if not sign:
            raise ValueError("a string without an end")
        kept.append(inside)
        pieces.append(f"\x01{len(kept) - 1}\x02{behind}")
    return "".join(pieces)


def lax_json(text: str, *, unquoted: bool, strings: tuple[tuple[str, str], ...]) -> Any:
    """JSON whose keys may have no quotes, and whose strings may stand between other signs."""
    kept: list[str] = []
    for begin, end in strings:
        pieces = text.split(begin) if begin == end else None
        if pieces is None:
            text = _stored(text, begin, end, kept)
            continue
        if len(pieces) % 2 == 0:
            raise ValueError("a string without an end")
        for i in range(1, len(pieces), 2):
            kept.append(pieces[i])
            pieces[i] = f"\x01{len(kept) - 1}\x02"
        text = "".join(pieces)
    if unquoted:
        text = _KEY.sub(r'\1"\2":', text)
    return parse_json(_STORED.sub(lambda found: json.dumps(kept[int(found[1])]), text))


_KEY = re.compile(r"([{,]\s{0,9})(\w{1,99}):")
_STORED = re.compile("\x01([0-9]{1,9})\x02")


def typed(text: str, schema: object) -> Any:
    """The value that `text` stands for where its schema wants something else than text."""
    for name in dict.fromkeys(schema_types(schema)):
        value = _read_as(text.strip(), name)
        if value is not _NONE:
            return value
    return text


_NONE = object()
# Under JSON Schema's names, and Python's that clients send.
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
    """The types that a schema names, those of its alternatives too."""
    entry = mapping(schema)
    yield from (one for one in listed(entry.get("type")) if isinstance(one, str))
    for name in ("anyOf", "oneOf"):
        for choice in listed(entry.get(name)):
            yield from schema_types({"type": mapping(choice).get("type")})
    if entry.get("nullable"):
        yield "null"


_PYTHON_NAMES = {"true": True, "false": False, "null": None}


def python_value(node: ast.expr) -> Any:
    """A literal; JSON's names for constants too. Raises ValueError for another expression."""
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
    """JSON values, one after the other."""
    at, text = 0, body.strip(_BLANKS)
    if not text:
        raise ValueError("there is nothing")
    while at < len(text):
        value, at = _DECODER.raw_decode(text, at)
        yield value
        while at < len(text) and text[at] in _BLANKS:
            at += 1
