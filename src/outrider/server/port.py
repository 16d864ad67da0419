"""`EnginePort`: the server's interface to an engine, which runs in a thread or another process.

Only plain values pass through it, so that they can be sent: a request is token ids and parameters,
an answer is TextEvents and a GenerationResult.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from msgspec import Struct

from outrider.api.prompts import ChatIds, PromptReader
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.stream import TokenDecoder, pieces_of
from outrider.core.config import SEED_TIED_SAMPLERS
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams

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
    """The tokenizer's description of the model's output format, if it has one (server/parsing)."""
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
