"""JSON on the way in and out: a body becomes a Struct, and what it has besides becomes warnings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar, cast, get_args

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from outrider.core.fields import shown
from outrider.server.errors import ApiError

T = TypeVar("T", bound=msgspec.Struct)
# Of a body: how deep its lists and objects may be within each other.
MOST_DEPTH = 64
_MOST_WARNINGS = 16
_HALVED = "the body has half of a surrogate pair; U+FFFD was read in its place"
# Half of a surrogate pair, among the escapes of JSON.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
# How msgspec says where a value is.
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")

_written = msgspec.json.Encoder().encode
# What JSON may hold as it is, and some readers of event streams take for the end of a line.
_LINE_ENDS = tuple((one.encode(), f"\\u{ord(one):04x}".encode()) for one in "\x85\u2028\u2029")


def encode(value: object) -> bytes:
    data = _written(value)
    if data.isascii():
        return data
    for line_end, escaped in _LINE_ENDS:
        if line_end in data:
            data = data.replace(line_end, escaped)
    return data


async def read(kind: type[T], request: Request) -> tuple[T, list[str]]:
    """The body as a `kind`, and a warning for each key that a `kind` has not. Raises ApiError."""
    try:
        body = await request.body()
    except ClientDisconnect:
        # Its client may have left, or have written lengths that are none.
        raise ApiError(400, "the body breaks off.", code="bad_body") from None
    return parsed(kind, body)


def parsed(kind: type[T], body: bytes) -> tuple[T, list[str]]:
    halved = False
    try:
        try:
            record = msgspec.json.decode(body)
        except msgspec.DecodeError:
            # A character that a client cut in two would end its conversation.
            record = msgspec.json.decode(_without_halves(body))
            halved = True
    except (msgspec.DecodeError, RecursionError, UnicodeError, ValueError) as error:
        raise ApiError(400, f"the body is no JSON: {shown(str(error))}.", code="bad_json") from None
    if not isinstance(record, dict):
        raise ApiError(400, "the body is no JSON object.", code="bad_json")
    given = cast("dict[str, Any]", record)
    _check_depth(given)
    for name in _whole(kind).intersection(given):
        if isinstance(value := given[name], float) and value.is_integer():
            given[name] = int(value)
    try:
        found = msgspec.convert(given, kind)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise _mistake(str(error)) from None
    _check_numbers(given)
    warnings = _warnings(kind, given)
    return found, [*warnings, _HALVED] if halved else warnings


@cache
def _whole(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The fields of whole numbers: in JSON Schema 4.0 is one."""
    types = {item.encode_name: get_args(item.type) for item in msgspec.structs.fields(kind)}
    return frozenset(name for name, of in types.items() if int in of and float not in of)


def _without_halves(body: bytes) -> bytes:
    """With U+FFFD for every half of a surrogate pair that is written as an escape."""
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found["half"] else found[0], body)


def _check_depth(record: object) -> None:
    level: list[Any] = [record]
    for _ in range(MOST_DEPTH):
        level = [item for parent in level for item in _within(parent) if _is_nested(item)]
        if not level:
            return
    raise ApiError(400, f"the body is nested more than {MOST_DEPTH} levels deep.", code="too_deep")


def _check_numbers(record: dict[str, Any]) -> None:
    """Those beyond 64 bits cannot be sent to an engine."""
    for name, value in record.items():
        level: list[Any] = [value]
        while level:
            if any(type(item) is int and not -(2**63) <= item < 2**63 for item in level):
                words = f"{name}: a whole number is beyond 64 bits."
                raise ApiError(400, words, param=name, code="invalid_value")
            level = [item for one in level if _is_nested(one) for item in _within(one)]


def _is_nested(item: object) -> bool:
    return isinstance(item, dict | list)


def _within(parent: Any) -> Iterable[Any]:
    return cast("dict[str, Any]", parent).values() if isinstance(parent, dict) else parent


def _mistake(words: str) -> ApiError:
    """As "temperature: Expected `float`, got `str`"."""
    place = _PLACE.search(words)
    param = place[1] if place else ""
    text = words[: place.start()] if place else words
    named = f"{param}: {text}." if param else f"{text}."
    return ApiError(400, named, param=param or None, code="invalid_type")


def _warnings(kind: type[msgspec.Struct], given: dict[str, Any]) -> list[str]:
    known = kind.__struct_encode_fields__
    unknown = [name for name in given if name not in known]
    told = [f"{shown(name)} is not known here and was ignored" for name in unknown]
    return told[:_MOST_WARNINGS]


def json_response(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")
