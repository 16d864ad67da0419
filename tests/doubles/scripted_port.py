"""An engine for servers to be tested with: it writes what a test says, a character a token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from outrider.api.callers import ChatIds
from outrider.api.result import GenerationResult, TextEvent
from outrider.core.draft import RoundTrace, TokenLogprobs
from outrider.core.errors import QueueFullError
from outrider.core.params import FinishReason
from outrider.metrics import summarise
from outrider.server.port import (
    ChatPrompt,
    EngineCard,
    EngineRequest,
    EngineState,
    EngineStatus,
    NotReadyError,
)

CARD = EngineCard(
    model="scripted",
    window=256,
    vocab_size=512,
    num_parameters=1,
    drafters=("ngram", "none"),
    drafter="ngram",
    k=3,
    sampler="block",
    exact=True,
    has_chat_template=True,
    chat_template="{{ messages }}",
    bos="<s>",
    eos="</s>",
)


class Letters:
    """A token is a character."""

    special_ids = frozenset[int]()
    whole_characters = True

    def token_bytes(self, token_id: int) -> bytes | None:
        return chr(token_id).encode()

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        del skip_special
        return "".join(map(chr, ids))


class ScriptedPort:
    """`answer` gives the rounds of a request, each the text that it brings; `error` is raised after
    them. `thoughts` are what a result says of thoughts. `pause`, where a test sets one, is waited
    for before each round; the first one takes `first_seconds` besides."""

    def __init__(
        self,
        answer: Callable[[EngineRequest], Sequence[str]] = lambda _: ("Hel", "lo"),
        *,
        reason: FinishReason = "stop",
        error: Exception | None = None,
        most: int = 1000,
    ) -> None:
        self.answer, self.error, self.most = answer, error, most
        self.reason: FinishReason = reason
        self.state: EngineState = "ready"
        self.decoder = Letters()
        self.requests: list[EngineRequest] = []
        self.chats: list[ChatPrompt] = []
        self.streams: list[ScriptedStream] = []
        self.pause: asyncio.Event | None = None
        self.thoughts: tuple[int | None, bool | None] = (None, None)
        self.first_seconds = 0.0

    @property
    def card(self) -> EngineCard:
        if self.state == "loading":
            raise NotReadyError(self.state)
        return CARD

    @property
    def status(self) -> EngineStatus:
        running = sum(not stream.is_over for stream in self.streams)
        return EngineStatus(state=self.state, num_running=running)

    async def encode(self, prompt: str, *, add_special: bool = True) -> list[int]:
        return [2] * add_special + [min(ord(letter), 511) for letter in prompt]

    async def encode_chat(self, chat: ChatPrompt) -> ChatIds:
        self.chats.append(chat)
        text = "".join(str(message["content"]) for message in chat.messages)
        return ChatIds(await self.encode(text))

    def stream(self, request: EngineRequest) -> ScriptedStream:
        if self.state != "ready":
            raise NotReadyError(self.state)
        if sum(not stream.is_over for stream in self.streams) >= self.most:
            raise QueueFullError(self.most, 1)
        self.requests.append(request)
        self.streams.append(ScriptedStream(self, request))
        return self.streams[-1]

    async def aclose(self) -> None:
        self.state = "closed"


class ScriptedStream:
    """The events of one request."""

    engine: int | None = None

    def __init__(self, port: ScriptedPort, request: EngineRequest) -> None:
        self._port, self._request = port, request
        self._rounds = list(port.answer(request))
        self.left = list(self._rounds)
        self.is_over = self.was_cancelled = self._has_begun = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextEvent:
        await asyncio.sleep(0 if self._has_begun else self._port.first_seconds)
        self._has_begun = True
        if self._port.pause is not None:
            await self._port.pause.wait()
        if not self.left:
            self.is_over = True
            if self._port.error is not None:
                raise self._port.error
            raise StopAsyncIteration
        return self._event(self.left.pop(0))

    def _event(self, text: str) -> TextEvent:
        ids = tuple(map(ord, text))
        logprobs = tuple(TokenLogprobs(i, -0.5, ((i, -0.5), (65, -1.5))) for i in ids)
        asked = self._request.params.logprobs
        return TextEvent(ids, ("plain",) * len(ids), tuple(text), logprobs if asked else ())

    @property
    def result(self) -> GenerationResult:
        text = "".join(self._rounds)
        traces = [trace(index, text) for index, text in enumerate(self._rounds)]
        return GenerationResult(
            text,
            tuple(map(ord, text)),
            self._port.reason,
            summarise(traces, drafter="ngram", k=CARD.k, total_seconds=1.0),
            seed=self._request.params.seed,
            prediction_tokens=(3, 3) if self._request.params.prediction else None,
            prompt_logprobs=self._of_prompt(),
            thought_tokens=self._port.thoughts[0],
            thoughts_cut=self._port.thoughts[1],
        )

    def _of_prompt(self) -> tuple[TokenLogprobs | None, ...]:
        request = self._request
        if request.params.prompt_logprobs is None:
            return ()
        return (None, *(TokenLogprobs(i, -0.25, ((i, -0.25),)) for i in request.prompt_ids[1:]))

    def cancel(self) -> None:
        self.is_over = self.was_cancelled = True


def trace(index: int, text: str) -> RoundTrace:
    more: Mapping[str, Any] = dict.fromkeys(
        ("draft_seconds", "verify_seconds", "accept_seconds"), 0.0
    )
    return RoundTrace(
        seq_id=0,
        pass_index=index,
        drafter="ngram",
        batch_size=1,
        num_target_passes=1,
        num_prompt_tokens=0,
        num_drafted=CARD.k,
        num_accepted=len(text) - 1,
        num_emitted=len(text),
        num_rows_copied=0,
        **more,
    )
