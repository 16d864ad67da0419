"""Messages between the server and its engine process: length-prefixed frames of msgpack.

They travel over an unnamed socket pair, one end of which the child inherits, so no other process
can connect. Nothing is unpickled: a frame is one of these structs, or an error.
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
from outrider.core.config import EngineConfig
from outrider.core.draft import RoundTrace
from outrider.core.errors import OutriderError, words_of
from outrider.core.params import SamplingParams
from outrider.server.placement import ALONE, Placement
from outrider.server.port import ChatPrompt, EngineCard, EngineRequest, EngineStatus

# A prompt of a million ids has 5 MB.
MOST_BYTES = 1 << 28
_LENGTH = struct.Struct("!I")
# The remaining time of a request whose time is up; 0 would mean "no limit".
LEAST_SECONDS = 1e-6


class Failure(Struct, frozen=True):
    """An error that the other process raises."""

    kind: str
    message: str
    hint: str | None = None
    numbers: tuple[int, ...] = ()


# From the server to the engine.


class Load(Struct, frozen=True, tag=True):
    """The first frame: the model to load. With `is_tried`, the engine generates a test text before
    it is ready: if it crashes there, no request is the cause."""

    model: str
    draft: str | None
    config: EngineConfig
    max_queued: int
    placement: Placement = ALONE
    is_tried: bool = False


class Submit(Struct, frozen=True, tag=True):
    """The fields of an EngineRequest, and the tokens that its text already has."""

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
    """A request for the token ids of a text or of a conversation."""

    number: int
    text: str
    add_special: bool
    chat: ChatPrompt | None = None


Command: TypeAlias = Load | Submit | Cancel | Encode

# From the engine to the server.


class Ready(Struct, frozen=True, tag=True):
    card: EngineCard


class Lost(Struct, frozen=True, tag=True):
    """A report that loading failed; the process then ends."""

    error: Failure


class Encoded(Struct, frozen=True, tag=True):
    number: int
    found: ChatIds
    error: Failure | None = None


class Wrote(Struct, frozen=True, array_like=True):
    """An event of a request, with its rounds if another engine could continue the request."""

    number: int
    event: TextEvent
    rounds: list[RoundTrace] = []


class Update(Struct, frozen=True, tag=True):
    """Events and ends of all requests since the last update, and the engine's status. It is sent
    after each round, and at least once a second, so that a hung process is noticed. `job_seconds`
    is how long the current job has been running."""

    events: list[Wrote]
    ended: list[tuple[int, GenerationResult | None, Failure | None]]
    status: EngineStatus
    job_seconds: float


Report: TypeAlias = Ready | Lost | Encoded | Update

_encoder = msgspec.msgpack.Encoder()
COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def frame(message: Command | Report) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read the body of the next frame. Raises EOFError at the end, or for an invalid length."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > MOST_BYTES:
            raise EOFError(f"a frame of {size} bytes")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError("the other side has ended") from error


async def read_report(reader: asyncio.StreamReader) -> Report:
    """Read the next report of an engine. Raises EOFError at the end, or for an invalid frame."""
    body = await read_frame(reader)
    try:
        return REPORTS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EOFError(f"a frame that is no report: {error}") from error


def submit_of(
    number: int, request: EngineRequest, written: list[int], *, seconds: float = 0.0
) -> Submit:
    """Make the frame of a request, of whose time limit `seconds` have passed."""
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
    """Return the error from which `failure` was made, or a RuntimeError for an unknown kind."""
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, OutriderError)):
        return RuntimeError(f"{failure.kind}: {failure.message}")
    if failure.numbers:
        return cast("Any", kind)(*failure.numbers)
    # The constructors of the kinds differ, and the message is known already.
    error = kind.__new__(kind)
    OutriderError.__init__(error, failure.message, hint=failure.hint)
    return error
