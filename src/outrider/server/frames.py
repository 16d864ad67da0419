"""What the server and its engine process tell each other: frames of msgpack with their length.

They travel over a pair of connected sockets without a name, one end of which the child inherits, so
nobody else can reach either. Nothing is unpickled; a frame is one of these structs or an error.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from typing import Any, TypeAlias, cast

import msgspec
from msgspec import Struct

from outrider.api.prompts import ChatIds
from outrider.api.result import GenerationResult, TextEvent
from outrider.core import errors
from outrider.core.budget import RoundTrace
from outrider.core.config import EngineConfig
from outrider.core.errors import OutriderError, words_of
from outrider.core.params import SamplingParams
from outrider.server.placement import ALONE, Placement
from outrider.server.port import ChatPrompt, EngineCard, EngineRequest, EngineStatus

# A prompt of a million ids has 5 MB.
MOST_BYTES = 1 << 28
_LENGTH = struct.Struct("!I")
# What a request has left whose time is up: no time at all would mean no bound.
LEAST_SECONDS = 1e-6


class Failure(Struct, frozen=True):
    """An error, to be raised elsewhere."""

    kind: str
    message: str
    hint: str | None = None
    numbers: tuple[int, ...] = ()


# From the server to the engine.


class Load(Struct, frozen=True, tag=True):
    """The first frame: what to load. Where, the process knows already (placed.py). An engine that
    `is_tried` writes a text of its own before it is ready: what ends it then is no request."""

    model: str
    draft: str | None
    config: EngineConfig
    max_queued: int
    placement: Placement = ALONE
    is_tried: bool = False


class Submit(Struct, frozen=True, tag=True):
    """The fields of an EngineRequest, and the tokens that its text has already."""

    number: int
    prompt_ids: list[int]
    params: SamplingParams
    structure: dict[str, Any]
    sample: int
    cache_salt: str
    key: str
    weight: float
    written: list[int]


class Cancel(Struct, frozen=True, tag=True):
    number: int


class Encode(Struct, frozen=True, tag=True):
    """Asks for the ids of a text or of a conversation."""

    number: int
    text: str
    add_special: bool
    chat: ChatPrompt | None = None


Command: TypeAlias = Load | Submit | Cancel | Encode

# From the engine to the server.


class Ready(Struct, frozen=True, tag=True):
    card: EngineCard


class Lost(Struct, frozen=True, tag=True):
    """Loading failed, and the process ends."""

    error: Failure


class Encoded(Struct, frozen=True, tag=True):
    number: int
    found: ChatIds
    error: Failure | None = None


class Wrote(Struct, frozen=True, array_like=True):
    """An event of a request, and of one that may go on elsewhere the rounds it is of."""

    number: int
    event: TextEvent
    rounds: list[RoundTrace] = []


class Told(Struct, frozen=True, tag=True):
    """What a round wrote and ended, of all requests, and how the engine fares. It is sent once a
    second besides, so that a process which hangs is noticed: `job_seconds` is how long the engine
    has been at its present job."""

    events: list[Wrote]
    ended: list[tuple[int, GenerationResult | None, Failure | None]]
    status: EngineStatus
    job_seconds: float


Report: TypeAlias = Ready | Lost | Encoded | Told

_encoder = msgspec.msgpack.Encoder()
COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def frame(message: Command | Report) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The body of the next one. Raises EOFError at the end, or where the other side is no engine
    of ours."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > MOST_BYTES:
            raise EOFError(f"a frame of {size} bytes")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError("the other side has ended") from error


async def read_report(reader: asyncio.StreamReader) -> Report:
    """The next one of an engine. Raises EOFError at the end, or for what is none."""
    body = await read_frame(reader)
    try:
        return REPORTS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EOFError(f"a frame that is no report: {error}") from error


def submit_of(
    number: int, request: EngineRequest, written: list[int], *, seconds: float = 0.0
) -> Submit:
    """`seconds` of the time that the request has are over."""
    params = request.params
    if params.max_time:
        params = replace(params, max_time=max(params.max_time - seconds, LEAST_SECONDS))
    return Submit(
        number,
        list(request.prompt_ids),
        params,
        dict(request.structure),
        request.sample,
        request.cache_salt,
        request.key,
        request.weight,
        written,
    )


def failure_of(error: BaseException) -> Failure:
    kind = type(error).__name__
    hint = error.hint if isinstance(error, OutriderError) else None
    return Failure(kind, words_of(error), hint, getattr(error, "numbers", ()))


def error_of(failure: Failure) -> Exception:
    """The error that `failure` was made of, as far as its kind is known here."""
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, OutriderError)):
        return RuntimeError(f"{failure.kind}: {failure.message}")
    if failure.numbers:
        return cast("Any", kind)(*failure.numbers)
    # Each kind has its own way to be made; what it says is known already.
    error = kind.__new__(kind)
    OutriderError.__init__(error, failure.message, hint=failure.hint)
    return error
