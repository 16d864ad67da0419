"""`EnginePort`: how the server reaches an engine, be it a thread here or a process of its own.

Everything that passes is a plain value, so that it can be sent: a request is ids and parameters,
an answer is TextEvents and a GenerationResult.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from msgspec import Struct

from outrider.api.prompts import ChatIds
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.stream import TokenDecoder
from outrider.api.structure import StructureOptions
from outrider.core.config import SEED_TIED_SAMPLERS
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams

EngineState: TypeAlias = Literal["unloaded", "loading", "ready", "restarting", "failed", "closed"]


class NotReadyError(OutriderError):
    """The engine loads, or is started again; `seconds` is when to ask next."""

    def __init__(self, state: EngineState, seconds: int = 5) -> None:
        words = f"the engine is not ready: {state}."
        if state == "closed":
            words = "the server ended before its answer did."
        super().__init__(words, hint="ask /ready until it runs, and then again")
        self.state, self.seconds = state, seconds


class EngineLostError(OutriderError):
    """The engine's process ended while a request ran that cannot go on; `seconds` is when to ask
    again."""

    seconds = 5

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the engine ended while this request ran{why}.", hint="ask again: it is being started"
        )


class EngineRequest(Struct, frozen=True, kw_only=True):
    """One completion. `sample` tells the `n` completions of one seed apart; `cache_salt` keeps the
    prefix cache of one key's requests from another's. Requests of several `key`s share the engine
    in proportion to their `weight`. A text that was broken off elsewhere goes on from the tokens
    in `written`, which its events do not have again."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    structure: StructureOptions
    sample: int = 0
    cache_salt: str = ""
    key: str = ""
    weight: float = 1.0
    written: Sequence[int] = ()


class ChatPrompt(Struct, frozen=True, kw_only=True):
    """A conversation for the checkpoint's chat template, in the form that templates expect.
    `notes` say what of the request is not in it."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = {}
    """What the caller sets for the template besides, as `enable_thinking`."""
    continues: bool = False
    """Whether the last message, the assistant's, is to be gone on with."""
    notes: Sequence[str] = ()


class Promise(Struct, frozen=True, kw_only=True):
    """How many times as fast as plain decoding drafting is expected to be; `low` and `high` bound
    95 %."""

    speed_up: float
    low: float
    high: float


class EngineCard(Struct, frozen=True, kw_only=True):
    """What is known of an engine once it is ready. `drafters` are those that a request may choose,
    the engine's own one first."""

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
    """Whether every round drafts up to `k`; else a controller chooses."""
    has_chat_template: bool = False
    chat_template: str = ""
    tool_template: str = ""
    """That of conversations with tools, where it is another."""
    bos: str = ""
    eos: str = ""
    response_template: Mapping[str, Any] | None = None
    """How the model's output is parsed, where its tokenizer says so (server/parsing)."""
    numerics: str = ""
    """What decides a text's bits: engines that have it in common write the same texts."""
    tokenizer: str = ""
    """The folder or GGUF file that has the tokenizer."""
    notes: tuple[str, ...] = ()
    promise: Promise | None = None
    sampling: Mapping[str, int | float] = {}
    """What the checkpoint's makers advise, by the names of SamplingParams."""
    facts: Mapping[str, str] = {}


def is_repeatable(card: EngineCard, params: SamplingParams) -> bool:
    """Whether the text is the same whatever drafts for it, and wherever it is begun anew."""
    return card.exact and (params.greedy or (params.sampler or card.sampler) in SEED_TIED_SAMPLERS)


class EngineStatus(Struct, frozen=True, kw_only=True):
    """Of this moment. `kv_usage` is a share from 0 to 1; `lanes` says how busy each is."""

    state: EngineState
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_preempted: int = 0
    num_restarts: int = 0
    is_overdue: bool = False
    """Whether it has ended, and is not back after so long as starting it again should take."""
    is_bounded: bool = False
    """Whether it was started so often within a minute that its next start waits."""
    lanes: Mapping[str, str] = {}
    engines: tuple[EngineStatus, ...] = ()
    """Of each engine, where several run the model; the rest are then their sums."""

    @property
    def each(self) -> tuple[EngineStatus, ...]:
        """Of each engine, or of the only one."""
        return self.engines or (self,)


class EngineStream(Protocol):
    """The events of one request, one or more rounds each. To leave it early is to cancel it."""

    @property
    def engine(self) -> int | None:
        """The number of the engine that writes it, among several of one model."""
        ...

    def __aiter__(self) -> AsyncIterator[TextEvent]: ...

    async def __anext__(self) -> TextEvent: ...

    @property
    def result(self) -> GenerationResult:
        """Once it has ended. Raises what the request failed of."""
        ...

    def cancel(self) -> None:
        """End it before the engine's next job, from any thread."""
        ...


class EnginePort(Protocol):
    """An engine that requests of one event loop share."""

    @property
    def card(self) -> EngineCard:
        """Raises NotReadyError while it loads."""
        ...

    @property
    def status(self) -> EngineStatus: ...

    @property
    def decoder(self) -> TokenDecoder:
        """What single tokens say, for log-probabilities and rounds. Raises NotReadyError."""
        ...

    async def encode(self, prompt: str, *, add_special: bool = True) -> list[int]: ...

    async def encode_chat(self, chat: ChatPrompt) -> ChatIds: ...

    async def decode(self, ids: Sequence[int]) -> list[str]:
        """The text that each id adds to those before it; joined, the text of all."""
        ...

    def stream(self, request: EngineRequest) -> EngineStream:
        """Raises QueueFullError where too many wait, and NotReadyError."""
        ...

    async def aclose(self) -> None:
        """End what runs, whose readers hear of it as an error."""
        ...
