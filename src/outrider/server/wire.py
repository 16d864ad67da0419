"""JSON of requests and responses. A body is parsed into a Struct; its unknown fields become
warnings."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack, suppress
from functools import cache
from itertools import islice
from typing import Any, TypeVar, cast, get_args

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from outrider.core.fields import shown
from outrider.server.errors import ApiError
from outrider.server.site import Site, key_of

T = TypeVar("T", bound=msgspec.Struct)
# Maximum nesting depth of lists and objects in a body.
MOST_DEPTH = 64
# The first bytes of a body, which are read without waiting for memory.
FREE_BYTES = 64 << 10
# Structure costs the event loop up to a hundred times as much time as text of the same size.
MOST_LISTS, MOST_STRINGS, MOST_VALUES = 10_000, 60_000, 500_000
MOST_WARNINGS = 16
_HALVED = "the body has half of a surrogate pair; it was replaced by U+FFFD"
# Runs of surrogate pairs, and halves of them, in a text without escaped backslashes.
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_SURROGATES = re.compile(
    rb"\\u[dD](?:([89abAB][0-9a-fA-F]{2}%b(?:\\u[dD][89abAB][0-9a-fA-F]{2}%b)*+)"
    rb"|[89a-fA-F][0-9a-fA-F]{2})" % (_LOW, _LOW)
)
_MOST_SURROGATES = 20_000
_BRACES = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
# A whole number beyond 64 bits has at least this many digits.
_LONG_NUMBER = b"0" * 19
# The path of a value in msgspec's messages.
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")

_written = msgspec.json.Encoder().encode
# Characters that JSON need not escape, but that some readers of event streams treat as line ends.
_LINE_ENDS = tuple((one.encode(), f"\\u{ord(one):04x}".encode()) for one in "\x85\u2028\u2029")


def encode(value: object) -> bytes:
    data = _written(value)
    if data.isascii():
        return data
    for line_end, escaped in _LINE_ENDS:
        if line_end in data:
            data = data.replace(line_end, escaped)
    return data


async def read(kind: type[T], request: Request, site: Site) -> tuple[T, list[str]]:
    """Read the body as a `kind`; return it with a warning for each unknown field. Reading takes a
    slot of the key, and a long body waits for memory. Raises ApiError."""
    try:
        with site.slot(key_of(request)):
            found = await _read(kind, request, site)
            # No other task runs before the answer takes the same slot.
            request.scope["outrider.is_in"] = True
            return found
    except ClientDisconnect:
        # The client may have left, or its chunked encoding is malformed.
        raise ApiError(400, "the body breaks off.", code="bad_body") from None
    except ApiError as error:
        if error.status in (429, 503):
            # Read to the end: a client that still sends would miss the error.
            with suppress(ApiError, ClientDisconnect):
                async for _ in request.stream():
                    pass
        raise


async def _read(kind: type[T], request: Request, site: Site) -> tuple[T, list[str]]:
    key, pieces, num_bytes = key_of(request), list[bytes](), 0
    length = int(request.headers.get("content-length", 0))
    async with AsyncExitStack() as memory:
        if length > FREE_BYTES:
            await memory.enter_async_context(site.body(key, length))
        async for piece in request.stream():
            pieces.append(piece)
            if num_bytes <= FREE_BYTES < num_bytes + len(piece) and not length:
                await memory.enter_async_context(site.body(key, site.limits.body_bytes))
            num_bytes += len(piece)
        return parsed(kind, b"".join(pieces))


def parsed(kind: type[T], body: bytes) -> tuple[T, list[str]]:
    bare = _bare(body)
    _check_counts(bare)
    halved = False
    try:
        try:
            record = msgspec.json.decode(body)
        except msgspec.DecodeError:
            # A client may have cut a character in two; its conversation should not fail for that.
            record = msgspec.json.decode(_without_halves(body))
            halved = True
    except (msgspec.DecodeError, RecursionError, UnicodeError, ValueError) as error:
        raise ApiError(400, f"the body is no JSON: {shown(str(error))}.", code="bad_json") from None
    if not isinstance(record, dict):
        raise ApiError(400, "the body is no JSON object.", code="bad_json")
    given = cast("dict[str, Any]", record)
    _check_depth(bare)
    has_long = _LONG_NUMBER in bare.translate(_DIGITS)
    for name in _whole(kind).intersection(given):
        if isinstance(value := given[name], float) and value.is_integer():
            given[name], has_long = int(value), True
    try:
        found = msgspec.convert(given, kind)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise _mistake(str(error)) from None
    if has_long:
        _check_numbers(given)
    warnings = _warnings(kind, given)
    return found, [*warnings, _HALVED] if halved else warnings


@cache
def _whole(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the fields of integers. JSON Schema counts 4.0 as an integer, so they accept it."""
    types = {item.encode_name: get_args(item.type) for item in msgspec.structs.fields(kind)}
    return frozenset(name for name, of in types.items() if int in of and float not in of)


def _without_halves(body: bytes) -> bytes:
    """Replace escaped halves of surrogate pairs by U+FFFD, up to a maximum number."""
    if b"\0" in body:
        # Not JSON. The code below hides escaped backslashes as this character.
        return body
    hidden = body.replace(rb"\\", b"\0\0")
    whole = _SURROGATES.sub(
        lambda found: found[0] if found[1] else rb"\ufffd", hidden, _MOST_SURROGATES
    )
    return whole.replace(b"\0\0", rb"\\")


def _bare(body: bytes) -> bytes:
    """Return JSON without its strings. Raises ApiError if there are too many of them."""
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if body.count(b'"') > 2 * MOST_STRINGS:
        raise _too_many(MOST_STRINGS, "strings")
    return b"".join(body.split(b'"')[::2])


def _check_counts(bare: bytes) -> None:
    """Check the number of values. Raises ApiError for a body that would block the event loop."""
    num_lists = bare.count(b"[") + bare.count(b"{")
    if num_lists > MOST_LISTS:
        raise _too_many(MOST_LISTS, "lists and objects")
    if num_lists + bare.count(b",") > MOST_VALUES:
        raise _too_many(MOST_VALUES, "values")


def _too_many(most: int, of: str) -> ApiError:
    return ApiError(400, f"the body has more than {most:,} {of}. Send less.", code="too_many")


def _check_depth(bare: bytes) -> None:
    brackets = bare.translate(_BRACES, _NO_BRACKETS)
    for _ in range(MOST_DEPTH + 1):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        words = f"the body is nested more than {MOST_DEPTH} levels deep."
        raise ApiError(400, words, code="too_deep")


def _check_numbers(record: dict[str, Any]) -> None:
    """Check that integers fit into 64 bits, as engines require. Raises ApiError."""
    for name, value in record.items():
        try:
            msgspec.msgpack.encode(value)
        except OverflowError:
            words = f"{name}: a whole number is beyond 64 bits."
            raise ApiError(400, words, param=name, code="invalid_value") from None


def _mistake(words: str) -> ApiError:
    """Return msgspec's message as "temperature: Expected `float`, got `str`."."""
    path = _PATH.search(words)
    param = path[1] if path else ""
    text = words[: path.start()] if path else words
    named = f"{param}: {text}." if param else f"{text}."
    return ApiError(400, named, param=param or None, code="invalid_type")


def _warnings(kind: type[msgspec.Struct], given: dict[str, Any]) -> list[str]:
    known = kind.__struct_encode_fields__
    unknown = islice((name for name in given if name not in known), MOST_WARNINGS)
    return [f"{shown(name)} is not known here and was ignored" for name in unknown]


def json_response(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")
