# pyright: basic, reportMissingImports=false
"""An `EnginePort` over the replicas of a deployment: the gateway's server uses it as its engine.

The gateway encodes prompts itself, so that the router can see their token ids. Ray does not repeat
a call whose answer has begun. A stream here keeps the tokens written so far, so it continues the
same text at another replica, provided that the request's rule draws each token's noise from its
position alone and that both replicas use the same arithmetic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic
from typing import Any, Self

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from outrider.api.prompts import ChatIds, PromptReader
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.stream import TokenDecoder, pieces_of
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError, QueueFullError
from outrider.models.loading import resolve
from outrider.plugins.cluster.engine import OTHER_NUMERICS
from outrider.plugins.cluster.pieces import CARDS, PIECES, Handed, Piece, packed
from outrider.sched.routing import blocks_of
from outrider.server.frames import error_of, submit_of
from outrider.server.port import (
    ChatPrompt,
    EngineCard,
    EngineLostError,
    EngineRequest,
    EngineState,
    EngineStatus,
    NotReadyError,
    is_repeatable,
)
from outrider.server.process_stream import Progress

_LOG = logging.getLogger(__name__)
# After so many replicas have died during one request, the request is considered their cause.
MOST_LOSSES = 3
_RETRY_SECONDS = 1.0


class HandlePort:
    """The engines behind `handle`. The tokenizer of `model` encodes prompts."""

    def __init__(self, handle: DeploymentHandle, model: str) -> None:
        self._handle, self._model = handle, model
        self._state: EngineState = "loading"
        self._card: EngineCard | None = None
        self._reader: PromptReader | None = None
        self.running: set[HandleStream] = set()
        self._lost: set[str] = set()

    async def start(self) -> None:
        """Wait until a replica has sent its card, and load the tokenizer. Raises the errors of
        reading a tokenizer."""
        while self._card is None:
            try:
                self._card = CARDS.decode(await self._handle.card.remote())
            except RayTaskError:
                raise
            except (RayError, RayServeException) as error:
                _LOG.warning("no replica answers: %s", type(error).__name__)
                await asyncio.sleep(_RETRY_SECONDS)
        card = self._card
        tokenizer = await asyncio.to_thread(lambda: Tokenizer.load(resolve(self._model)))
        if card.chat_template and card.chat_template != tokenizer.templates.source:
            tokenizer = tokenizer.with_template(card.chat_template)
        self._reader = PromptReader(tokenizer, window=card.window, vocab_size=card.vocab_size)
        self._state = "ready"

    @property
    def card(self) -> EngineCard:
        if self._card is None or self._state != "ready":
            raise NotReadyError(self._state)
        return self._card

    @property
    def status(self) -> EngineStatus:
        """The engines' status as this gateway sees it. Ray restarts each lost replica, so lost
        replicas count as restarts."""
        return EngineStatus(
            state=self._state, num_running=len(self.running), num_restarts=len(self._lost)
        )

    @property
    def decoder(self) -> TokenDecoder:
        return self._read.tokenizer

    async def encode(self, prompt: str, *, add_special: bool = True) -> list[int]:
        reader = self._read

        def ids() -> list[int]:
            if add_special:
                return reader.ids(prompt)
            reader.check_size(prompt)
            return reader.tokenizer.encode(prompt, add_special=False)

        return await asyncio.to_thread(ids)

    async def encode_chat(self, chat: ChatPrompt) -> ChatIds:
        return await asyncio.to_thread(
            self._read.ids_of_chat,
            chat.messages,
            tools=chat.tools,
            variables=chat.variables,
            continues=chat.continues,
        )

    async def decode(self, ids: Sequence[int]) -> list[str]:
        return await asyncio.to_thread(pieces_of, self.decoder, ids)

    def stream(self, request: EngineRequest) -> HandleStream:
        card = self.card
        stream = HandleStream(self._handle, request, card, self._forget)
        self.running.add(stream)
        return stream

    async def aclose(self) -> None:
        self._state = "closed"
        for stream in list(self.running):
            stream.cancel()

    @property
    def _read(self) -> PromptReader:
        if self._reader is None:
            raise NotReadyError(self._state)
        return self._reader

    def _forget(self, stream: HandleStream) -> None:
        self.running.discard(stream)
        self._lost |= stream.lost


class HandleStream(AsyncIterator[TextEvent]):
    """The events of one request; another replica may continue it."""

    def __init__(
        self,
        handle: DeploymentHandle,
        request: EngineRequest,
        card: EngineCard,
        forget: Callable[[HandleStream], None],
    ) -> None:
        self.request, self.written = request, list(request.written)
        self.engine: int | None = None
        # Names of the replicas that were lost during this request.
        self.lost: set[str] = set()
        self._replica, self._num_lost = "", 0
        self._handle, self._card, self._forget = handle, card, forget
        self._blocks = list(blocks_of(request.prompt_ids, request.cache_salt))
        self._numerics, self._came = "", monotonic()
        self._progress = Progress(len(request.prompt_ids))
        self._result: GenerationResult | None = None
        self._error: Exception | None = None
        self._pieces: Any = self._submit()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextEvent:
        while self._result is None and self._error is None:
            try:
                piece = PIECES.decode(await anext(self._pieces))
            except asyncio.CancelledError:
                self.cancel()
                raise
            except BackPressureError as error:
                self._end(error=QueueFullError(error.args[0], 1))
            except RayTaskError as error:
                self._end(error=EngineLostError(f" ({type(error.cause).__name__})"))
            except (RayError, RayServeException, StopAsyncIteration) as error:
                self._go_on(type(error).__name__)
            else:
                if (event := self._take(piece)) is not None:
                    return event
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    @property
    def result(self) -> GenerationResult:
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise ConfigError("the request has not ended.", hint="read its events first")
        return self._result

    def cancel(self) -> None:
        if self._result is None and self._error is None:
            self._pieces.cancel()
            self._end(error=ConfigError("the request was cancelled."))

    def _submit(self) -> Any:
        self._progress.hand_in()
        seconds = monotonic() - self._came
        submit = submit_of(0, self.request, self.written, seconds=seconds)
        handed = packed(Handed(submit, self._numerics if self.written else ""))
        stream = self._handle.options(stream=True).stream
        return stream.remote(handed, blocks=self._blocks)

    def _take(self, piece: Piece) -> TextEvent | None:
        if piece.numerics:
            self._numerics = self._numerics or piece.numerics
            self.engine, self._replica = piece.engine, piece.replica
        elif piece.event is not None:
            self.written += piece.event.token_ids
            self._progress.take(len(piece.event.token_ids), piece.rounds)
            return piece.event
        elif piece.result is not None:
            self._end(result=self._progress.whole(piece.result))
        elif piece.failure is not None:
            if piece.failure.kind == NotReadyError.__name__:
                self._go_on("the engine failed")
            elif piece.failure.kind == OTHER_NUMERICS:
                self._end(error=EngineLostError(", and the next one would write another text"))
            else:
                self._end(error=error_of(piece.failure))
        return None

    def _go_on(self, how: str) -> None:
        """Continue at another replica, or at the restarted one, if the text can be continued."""
        self._num_lost += 1
        self.lost |= {self._replica} if self._replica else set()
        if self._num_lost >= MOST_LOSSES:
            self._end(error=EngineLostError(f" ({how}), as {self._num_lost - 1} did before it"))
        elif self.written and not is_repeatable(self._card, self.request.params):
            self._end(error=EngineLostError(f" ({how})"))
        else:
            _LOG.warning("a request continues at another replica: %s", how)
            self._pieces = self._submit()

    def _end(
        self, *, result: GenerationResult | None = None, error: Exception | None = None
    ) -> None:
        self._result, self._error = result, error
        self._forget(self)
