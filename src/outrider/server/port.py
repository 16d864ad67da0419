"""`EnginePort`: the server's interface to an engine in a thread or another process; its messages.

Only plain values pass through it, so that they can be sent: a request is token ids and parameters,
an answer is TextEvents and a GenerationResult.
"""

from __future__ import annotations

import asyncio
import logging
import re
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Struct

from outrider.api.callers import ChatIds, PromptReader
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.stream import TokenDecoder, pieces_of
from outrider.core import errors
from outrider.core.config import SEED_TIED_SAMPLERS, EngineConfig
from outrider.core.draft import RoundTrace
from outrider.core.errors import (
    ConfigError,
    MachineError,
    OutriderError,
    defect_in,
    did_you_mean,
    words_of,
)
from outrider.core.params import SamplingParams
from outrider.kernels.native.cpu import allowed_cores

_LOG = logging.getLogger(__name__)
EngineState: TypeAlias = Literal["unloaded", "loading", "ready", "restarting", "failed", "closed"]


class NotReadyError(OutriderError):
    """The engine is loading or restarting; clients may retry after `seconds`."""

    def __init__(self, state: EngineState, seconds: int = 5) -> None:
        words = f"the engine is not ready: {state}."
        if state == "closed":
            words = "the server ended before its answer did."
        super().__init__(words, hint="poll /ready until it runs, and repeat the request")
        self.state, self.seconds = state, seconds


class EngineLostError(OutriderError):
    """The engine ended during a request that cannot continue; retry after `seconds`."""

    seconds = 5

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the engine ended while this request ran{why}.",
            hint="repeat the request: the engine is being restarted",
        )


class EngineRequest(Struct, frozen=True, kw_only=True):
    """A request for one completion, number `sample` among the `n` of one seed. `structure` has
    StructureOptions. Requests share the prefix cache only if their `cache_salt` is equal. Requests
    of several `key`s share the engine in proportion to their `weight`. A text that another engine
    began continues after the tokens in `written`; its events do not repeat them."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    structure: Mapping[str, Any]
    sample: int = 0
    cache_salt: str = ""
    key: str = ""
    weight: float = 1.0
    written: Sequence[int] = ()


class ChatPrompt(Struct, frozen=True, kw_only=True):
    """A conversation for the checkpoint's chat template, in the form that templates expect.
    `notes` report parts of the request that were left out."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = {}
    """Further variables for the template, such as `enable_thinking`."""
    continues: bool = False
    """True to continue the last message, which is the assistant's."""
    notes: Sequence[str] = ()

    def ids(self, reader: PromptReader) -> ChatIds:
        """Return the token ids. Raises the errors of `PromptReader.ids_of_chat`."""
        return reader.ids_of_chat(
            self.messages, tools=self.tools, variables=self.variables, continues=self.continues
        )


class Promise(Struct, frozen=True, kw_only=True):
    """Predicted speed-up over plain decoding; `low` and `high` bound its 95 % interval."""

    speed_up: float
    low: float
    high: float


class EngineCard(Struct, frozen=True, kw_only=True):
    """Facts about a ready engine. Requests may choose one of `drafters`; the first is its own."""

    model: str
    window: int
    vocab_size: int
    num_parameters: int
    drafters: tuple[str, ...]
    drafter: str
    k: int
    sampler: str
    exact: bool
    fixed_k: bool = True
    """True if every round drafts up to `k` tokens, false if a controller chooses the number."""
    has_chat_template: bool = False
    chat_template: str = ""
    tool_template: str = ""
    """The template of conversations with tools, if it is a separate one."""
    bos: str = ""
    eos: str = ""
    response_template: Mapping[str, Any] | None = None
    """The tokenizer's description of the model's output format, if it has one (plugins/tools)."""
    numerics: str = ""
    """Identity of the engine's arithmetic: engines with equal ones write the same texts."""
    tokenizer: str = ""
    """The folder or GGUF file that has the tokenizer."""
    notes: tuple[str, ...] = ()
    promise: Promise | None = None
    sampling: Mapping[str, int | float] = {}
    """Sampling parameters that the checkpoint recommends, by the names of SamplingParams."""
    facts: Mapping[str, str] = {}


def is_repeatable(card: EngineCard, params: SamplingParams) -> bool:
    """Return whether the text does not depend on drafts, so that any equal engine continues it."""
    return card.exact and (params.greedy or (params.sampler or card.sampler) in SEED_TIED_SAMPLERS)


class EngineStatus(Struct, frozen=True, kw_only=True):
    """Current status. `kv_usage` is a share from 0 to 1; `lanes` has each lane's load in words."""

    state: EngineState
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_preempted: int = 0
    num_restarts: int = 0
    is_overdue: bool = False
    """True if the engine has ended and its restart takes longer than it should."""
    is_bounded: bool = False
    """True if the engine was started so often within a minute that its next start must wait."""
    lanes: Mapping[str, str] = {}
    engines: tuple[EngineStatus, ...] = ()
    """The status of each engine if several run the model; the other fields are then their sums."""

    @property
    def each(self) -> tuple[EngineStatus, ...]:
        """The status of each engine, or of the only one."""
        return self.engines or (self,)


class EngineStream(Protocol):
    """The events of one request, of one or more rounds each; `cancel` it to stop early."""

    @property
    def engine(self) -> int | None:
        """The number of the engine that writes it; None with a single engine."""
        ...

    def __aiter__(self) -> AsyncIterator[TextEvent]: ...

    async def __anext__(self) -> TextEvent: ...

    @property
    def result(self) -> GenerationResult:
        """The result, once the request has ended. Raises the error of a failed request."""
        ...

    def cancel(self) -> None:
        """Cancel the request before the engine's next job. May be called from any thread."""
        ...


class EnginePort(Protocol):
    """An engine, for requests of one event loop."""

    @property
    def card(self) -> EngineCard:
        """Facts about the engine. Raises NotReadyError while it loads."""
        ...

    @property
    def status(self) -> EngineStatus: ...

    @property
    def decoder(self) -> TokenDecoder:
        """The decoder of single tokens, for logprobs and rounds. Raises NotReadyError."""
        ...

    async def encode(self, prompt: str, *, add_special: bool = True) -> list[int]: ...

    async def encode_chat(self, chat: ChatPrompt) -> ChatIds: ...

    def stream(self, request: EngineRequest) -> EngineStream:
        """Start a request. Raises QueueFullError if too many wait, and NotReadyError."""
        ...

    async def aclose(self) -> None:
        """Stop the engine; requests that still run end with an error."""
        ...


async def decoded(port: EnginePort, ids: Sequence[int]) -> str:
    """Return the text of token ids. Decoding many takes a while, so a thread does it."""
    return "".join(await asyncio.to_thread(pieces_of, port.decoder, ids))


# Messages between the server and engines in other processes: length-prefixed frames of msgpack.
#
# They travel over an unnamed socket pair, one end of which the child inherits, so no other process
# can connect. Nothing is unpickled: a frame is one of these structs, or an error. On a cluster, Ray
# carries requests and parts of answers as bytes.

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


_DEVICE = re.compile(r"cuda(?::(\d{1,3}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Engines:
    """Placements of a model's engines. `device` is the device setting of each engine.

    Each engine has a GPU or a share of the cores that this process may use. Hardware threads of one
    core stay together, and so do the cores of a NUMA node, as far as equal shares allow. An engine
    uses as many threads as its share has cores, unless configured otherwise.
    """

    device: str
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, replicas: int, devices: Sequence[str], config: EngineConfig) -> Self:
        """Return `replicas` engines, or one for each device. Raises ConfigError for invalid devices
        or numbers."""
        if devices and replicas > 1:
            hint = "leave --replicas out"
            raise ConfigError("--devices says how many engines there are.", hint=hint)
        gpus, kinds = _gpus(devices), {name.partition(":")[0] for name in devices}
        if len(kinds) > 1:
            raise ConfigError(
                f"--devices {','.join(devices)}: texts of different kinds of devices differ.",
                hint="devices of one kind",
            )
        device, number = next(iter(kinds), config.device), max(replicas, len(devices))
        ranks = config.tensor_parallel
        if number > 1 and ranks > 1:
            raise ConfigError(
                f"{number} engines, each of {ranks} ranks: ranks take all devices.",
                hint="leave --tensor-parallel or --replicas out",
            )
        if number == 1:
            return cls(device, (Placement(gpu=gpus[0]) if gpus else ALONE,))
        counted = [None] * number if device in ("cpu", "mps") else list(range(number))
        shares = zip(shares_of(allowed_cores(), number), gpus or counted, strict=True)
        engines = [Placement(cores=cores, gpu=gpu, num_engines=number) for cores, gpu in shares]
        return cls(device, tuple(engines))

    def __len__(self) -> int:
        return len(self.placements)

    def config(self, config: EngineConfig) -> EngineConfig:
        return replace(config, device=self.device)

    def shared(self, config: EngineConfig) -> EngineConfig:
        """Return the configuration of one engine. Raises MachineError for a missing device."""
        own = self.config(config)
        for one in self.placements:
            one.check_device(own.device)
        return self.placements[0].shared(own)

    def loads(
        self, target: str, draft: str | None, config: EngineConfig, max_queued: int
    ) -> list[Load]:
        own = self.config(config)
        return [Load(target, draft, own, max_queued, one) for one in self.placements]

    @property
    def described(self) -> list[str]:
        """The placement of each engine, in words."""
        return [one.describe(self.device) for one in self.placements]


def _gpus(devices: Sequence[str]) -> list[int | None]:
    found: list[int | None] = []
    for name in devices:
        match = _DEVICE.fullmatch(name)
        if match is None and name not in ("cpu", "mps"):
            known = ("cpu", "mps", "cuda:0", "cuda:1")
            raise ConfigError(f"--devices: {name!r} is no device.", hint=did_you_mean(name, known))
        gpu = int(match[1] or 0) if match else None
        if gpu in found:
            hint = "--replicas shares the cores out" if name == "cpu" else "each one once"
            raise ConfigError(f"--devices names {name} twice.", hint=hint)
        found.append(gpu)
    return found


def shares_of(cores: Sequence[tuple[int, ...]], number: int) -> list[tuple[int, ...]]:
    """Divide the cores into `number` parts, as equal as possible; few cores are shared."""
    if len(cores) < number:
        return [cores[i % len(cores)] for i in range(number)]
    bounds = [len(cores) * i // number for i in range(number + 1)]
    return [
        tuple(sorted(thread for core in cores[start:end] for thread in core))
        for start, end in pairwise(bounds)
    ]


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


def failure_of(error: Exception) -> Failure:
    """Return `error` as it is sent to another process. That of a defect is logged here, since its
    stack is not sent."""
    if (defect := defect_in(error)) is not None:
        _LOG.error("a defect: %s", type(defect).__name__, exc_info=defect)
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
