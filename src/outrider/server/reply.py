"""Bodies of requests, and responses to clients: whole, or as server-sent events while written.

A body is parsed into a Struct; its unknown fields become warnings.

A disconnect of the client cancels its work. An error before the first byte has its own status. An
error after it is sent as one `error` event, without the events that mark a normal end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from functools import cache
from itertools import islice
from typing import Any, Protocol, TypeVar, cast, get_args

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.core.fields import shown
from outrider.server.errors import ApiError, api_error, error_response
from outrider.server.site import Limits, Site, key_of

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
_MISSING = re.compile(r"Object missing required field `(\w+)`")

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
    if missing := _MISSING.fullmatch(text):
        param, text = f"{param}.{missing[1]}" if param else missing[1], "it is missing"
    named = f"{param}: {text}" if param else text
    words = f"{named}. GET /openapi.json lists all fields."
    return ApiError(400, words, param=param or None, code="invalid_type")


def _warnings(kind: type[msgspec.Struct], given: dict[str, Any]) -> list[str]:
    known = kind.__struct_encode_fields__
    unknown = islice((name for name in given if name not in known), MOST_WARNINGS)
    return [f"{shown(name)} is not known here and was ignored" for name in unknown]


def json_response(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientGoneError(Exception):
    """The client left, or was cut off because it did not read for too long."""


class Reply(Response):
    """Runs `work` with a slot among the requests in flight, and sends its response."""

    def __init__(
        self, site: Site, request: Request, work: Callable[[], Awaitable[Response]]
    ) -> None:
        super().__init__()
        self._site, self._request, self._work = site, request, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def run() -> None:
            try:
                async with self._site.held():
                    response = await self._work()
            except Exception as error:  # noqa: BLE001 - sent to the client
                response = error_response(error, scope["path"])
            await response(scope, receive, send)

        await _admitted(self._site, self._request, receive, send, run)


class Waiting(Protocol):
    """Events of an API that are not part of the answer."""

    def waiting(self) -> bytes:
        """A heartbeat: the beginning of the answer if it was not sent yet, else an event that
        changes nothing. It is an event because clients ignore comments in their timeouts."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        ...


class EventReply(Response):
    """Sends the events of `make`, each piece of bytes in one write. Heartbeats of `extra` between
    them keep clients from mistaking a long wait for an end."""

    def __init__(
        self,
        site: Site,
        request: Request,
        make: Callable[[], Awaitable[AsyncGenerator[bytes]]],
        extra: Waiting,
    ) -> None:
        super().__init__()
        self._site, self._request, self._make, self._extra = site, request, make, extra

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        writer = EventWriter(send, self._site.limits, self._extra.waiting)

        async def run() -> None:
            try:
                async with self._site.held(), aclosing(await self._make()) as pieces:
                    writer.opened()
                    async for piece in pieces:
                        await writer.write(piece)
                await writer.end()
            except ClientGoneError:
                raise
            except asyncio.CancelledError:
                # A heartbeat stalled while the engine worked.
                writer.check()
                raise
            except Exception as error:  # noqa: BLE001 - sent to the client
                if not writer.has_begun:
                    writer.stop()
                    await error_response(error, path)(scope, receive, send)
                    return
                await writer.write(self._extra.failure(api_error(error, path)))
                await writer.end()
            finally:
                writer.stop()

        writer.start()
        try:
            await _admitted(self._site, self._request, receive, send, run)
        finally:
            writer.stop()


class EventWriter:
    """Writes events to one client, from one task. Headers are sent with the first piece or with the
    first heartbeat, which `waiting` makes. A heartbeat follows `ping_seconds` without a piece; the
    first one follows `begin_seconds` after the engine accepted the request. One timer watches all
    this: a timer for each write would cost more than the write."""

    def __init__(self, send: Send, limits: Limits, waiting: Callable[[], bytes]) -> None:
        self._send, self._limits, self._waiting = send, limits, waiting
        self._silence = limits.ping_seconds
        self._loop = asyncio.get_running_loop()
        self._owner = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Task[None] | None = None
        self._last = self._loop.time()
        # When the write that waits for the client began.
        self._since: float | None = None
        self._is_stalled = False
        self.has_begun = False

    def start(self) -> None:
        wait = min(self._silence, self._limits.write_seconds)
        self._timer = self._loop.call_later(wait, self._look)

    def opened(self) -> None:
        """Note that the engine has the request, which it would refuse soon (`begin_seconds`)."""
        if not self.has_begun:
            self.stop()
            self._last = self._loop.time()
            self._silence = min(self._limits.begin_seconds, self._limits.ping_seconds)
            self.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ping is not None:
            self._ping.cancel()
            self._ping = None

    async def write(self, piece: bytes) -> None:
        """Send a piece. Raises ClientGoneError if the client does not read."""
        if not piece:
            return
        if self._ping is not None:
            await self._watched(self._ping)
            self._ping = None
        await self._watched(self._written(piece))

    async def end(self) -> None:
        if self._ping is not None:
            await self._watched(self._ping)
        await self._watched(
            self._send({"type": "http.response.body", "body": b"", "more_body": False})
        )
        self.stop()

    def check(self) -> None:
        """Raise ClientGoneError if the task was cancelled because its client does not read."""
        if self._is_stalled and self._owner is not None:
            self._is_stalled = False
            self._owner.uncancel()
            raise ClientGoneError from None

    async def _written(self, piece: bytes) -> None:
        self._since = self._loop.time()
        try:
            if not self.has_begun:
                self.has_begun = True
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                )
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            self._since, self._last = None, self._loop.time()

    async def _watched(self, work: Awaitable[None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            self.check()
            raise
        except (OSError, RuntimeError):
            # ASGI servers raise these errors after the connection has ended.
            raise ClientGoneError from None

    def _look(self) -> None:
        """Cut off a client that does not read; send a heartbeat to one that waits."""
        limits, now = self._limits, self._loop.time()
        if self._since is not None and now - self._since >= limits.write_seconds:
            self._is_stalled = True
            if self._owner is not None:
                self._owner.cancel()
            return
        if self._since is None and now - self._last >= self._silence:
            self._ping = self._loop.create_task(self._written(self._waiting()))
            self._ping.add_done_callback(_retrieve)
            self._last, self._silence = now, limits.ping_seconds
        if self._since is None:
            wait = min(self._last + self._silence - now, limits.write_seconds)
        else:
            wait = self._since + limits.write_seconds - now
        self._timer = self._loop.call_later(max(0.0, wait), self._look)


async def _admitted(
    site: Site, request: Request, receive: Receive, send: Send, run: Callable[[], Awaitable[None]]
) -> None:
    try:
        with site.slot(key_of(request), is_in=request.scope.get("outrider.is_in", False)):
            await while_connected(receive, run)
    except ClientGoneError:
        return
    except Exception as error:  # noqa: BLE001 - no slot was free, and nothing was sent
        await error_response(error, request.scope["path"])(request.scope, receive, send)


def _retrieve(task: asyncio.Future[None]) -> None:
    """Retrieve a task's error so that asyncio does not log it: the next write raises it again."""
    if not task.cancelled():
        task.exception()


async def while_connected(receive: Receive, run: Callable[[], Awaitable[None]]) -> None:
    """Run `run`, and cancel it when the client leaves. Raises ClientGoneError then."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("no task")
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    watcher.add_done_callback(_retrieve)
    try:
        await run()
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watcher.cancel()
