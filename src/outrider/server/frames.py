"""Messages between the server and its engines: length-prefixed frames of msgpack.

They travel over an unnamed socket pair, one end of which the child inherits, so no other process
can connect. Nothing is unpickled: a frame is one of these structs, or an error. On a cluster, Ray
carries requests and parts of answers as bytes.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Struct

from outrider.api.prompts import ChatIds
from outrider.api.result import GenerationResult, TextEvent
from outrider.core import errors
from outrider.core.config import EngineConfig
from outrider.core.draft import RoundTrace
from outrider.core.errors import MachineError, OutriderError, words_of
from outrider.server.port import (
    ChatPrompt,
    EngineCard,
    EngineLostError,
    EngineRequest,
    EngineStatus,
)

T = TypeVar("T")
# A prompt of a million ids has 5 MB.
MOST_BYTES = 1 << 28
_LENGTH = struct.Struct("!I")


class Failure(Struct, frozen=True):
    """An error that the other process raises."""

    kind: str
    message: str
    hint: str | None = None
    numbers: tuple[int, ...] = ()


class Placement(Struct, frozen=True, kw_only=True):
    """Resources of one engine. Empty `cores` means all cores; `gpu` is the number of the only GPU
    that CUDA shows to the engine. `num_engines` share this machine."""

    cores: tuple[int, ...] = ()
    gpu: int | None = None
    num_engines: int = 1

    def shared(self, config: EngineConfig) -> EngineConfig:
        """Return `config` with this engine's share of the memory. An engine with its own GPU may
        use all of that GPU's memory. Raises MachineError for a missing device."""
        # Imported here: the server's front end needs no PyTorch.
        from outrider.kernels.operators import pick_device

        self.check_device(config.device, is_alone=True)
        if pick_device(config.device).type == "cuda":
            return config
        return replace(config, memory_share=max(0.01, config.memory_share / self.num_engines))

    def check_device(self, device: str, *, is_alone: bool = False) -> None:
        """Check that the GPU exists; in its own process, it `is_alone`. Raises MachineError."""
        if device != "cuda" or self.gpu is None:
            return
        import torch

        count = torch.cuda.device_count()
        if count <= (0 if is_alone else self.gpu):
            raise MachineError(
                f"there is no device cuda:{self.gpu}: PyTorch {torch.__version__} does not see it.",
                hint="`outrider doctor` says what it sees; or --devices cpu",
            )

    def describe(self, device: str) -> str:
        """Describe the placement in words; `device` is the configured device."""
        where = f"cuda:{self.gpu}" if device == "cuda" else device
        return f"{where}, cores {spans(self.cores)}" if self.cores else where


ALONE = Placement()


def spans(numbers: Sequence[int]) -> str:
    """Format numbers like a CPU list of Linux: 0-3,8."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, span)) for span in found)


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
    """A request, with the rest of its time limit. If an engine has begun its text, `numerics` is
    the arithmetic of that engine, as another one would write another text."""

    number: int
    request: EngineRequest
    numerics: str = ""


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


class Part(Struct, frozen=True, array_like=True):
    """A part of the answer to a request or a prompt: an event, with its rounds if another engine
    could continue the text; or the end, which is a result, the ids of a prompt, or a failure."""

    number: int
    event: TextEvent | None = None
    rounds: list[RoundTrace] = []
    result: GenerationResult | None = None
    ids: ChatIds | None = None
    failure: Failure | None = None


class Update(Struct, frozen=True, tag=True):
    """Parts of all answers since the last update, and the engine's status. It is sent after each
    round, and at least once a second, so that a hung process is noticed. `job_seconds` is how long
    the current job has been running."""

    parts: list[Part]
    status: EngineStatus
    job_seconds: float


Report: TypeAlias = Ready | Lost | Update

_encoder = msgspec.msgpack.Encoder()
COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def frame(message: Command | Report) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def received(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Read the next message. Raises EOFError at the end, or for an invalid frame."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > MOST_BYTES:
            raise EOFError(f"a frame of {size} bytes")
        return decoder.decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError("the other side has ended") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EOFError(f"a frame without a message: {error}") from error


def failure_of(error: BaseException) -> Failure:
    kind = type(error).__name__
    hint = error.hint if isinstance(error, OutriderError) else None
    return Failure(kind, words_of(error), hint, getattr(error, "numbers", ()))


def error_of(failure: Failure) -> Exception:
    """Return the error from which `failure` was made, or a RuntimeError for an unknown kind."""
    kind = getattr(errors, failure.kind, None)
    if failure.kind == EngineLostError.__name__:
        kind = EngineLostError
    if not (isinstance(kind, type) and issubclass(kind, OutriderError)):
        return RuntimeError(f"{failure.kind}: {failure.message}")
    if failure.numbers:
        return cast("Any", kind)(*failure.numbers)
    # The constructors of the kinds differ, and the message is known already.
    error = kind.__new__(kind)
    OutriderError.__init__(error, failure.message, hint=failure.hint)
    return error
