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
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from outrider.api.callers import ChatIds, PromptReader
from outrider.api.stream import TokenDecoder
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError, QueueFullError
from outrider.models.loading import resolve
from outrider.plugins.cluster.engine import CARDS, PARTS, WRITERS, packed
from outrider.sched.admission import blocks_of
from outrider.server.calls import ProcessStream
from outrider.server.port import (
    ChatPrompt,
    EngineCard,
    EngineLostError,
    EngineRequest,
    EngineState,
    EngineStatus,
    NotReadyError,
    Part,
)

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
        return await asyncio.to_thread(self._read.ids_of_text, prompt, add_special=add_special)

    async def encode_chat(self, chat: ChatPrompt) -> ChatIds:
        return await asyncio.to_thread(chat.ids, self._read)

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


class HandleStream(ProcessStream):
    """The events of one request, read from a call of a replica; another replica may continue it."""

    def __init__(
        self,
        handle: DeploymentHandle,
        request: EngineRequest,
        card: EngineCard,
        forget: Callable[[HandleStream], None],
    ) -> None:
        super().__init__(0, request, leave=lambda _: self._call_off())
        # Names of the replicas that were lost during this request.
        self.lost: set[str] = set()
        self._num_lost = 0
        self._handle, self._card, self._forget = handle, card, forget
        self._blocks = list(blocks_of(request.prompt_ids, request.cache_salt))
        self._submit()

    async def _news(self) -> None:
        try:
            data = await anext(self._answer)
        except BackPressureError as error:
            self.end(error=QueueFullError(error.args[0], 1))
        except RayTaskError as error:
            self.end(error=EngineLostError(f" ({type(error.cause).__name__})"))
        except (RayError, RayServeException, StopAsyncIteration) as error:
            self._go_on(type(error).__name__)
        else:
            self._read(data)

    def _submit(self) -> None:
        # Empty until the replica has identified itself.
        self._replica = ""
        stream = self._handle.options(stream=True).stream
        self._answer: Any = stream.remote(packed(self.command()), blocks=self._blocks)

    def _read(self, data: bytes) -> None:
        if not self._replica:
            writer = WRITERS.decode(data)
            self.numerics = self.numerics or writer.numerics
            self.engine, self._replica = writer.engine, writer.replica
            return
        part: Part = PARTS.decode(data)
        if part.failure is not None and part.failure.kind == NotReadyError.__name__:
            self._go_on("the engine failed")
        else:
            self.take(part)

    def _go_on(self, how: str) -> None:
        """Continue at another replica, or at the restarted one, if the text can be continued."""
        self._num_lost += 1
        self.lost |= {self._replica} if self._replica else set()
        if self._num_lost >= MOST_LOSSES:
            self.end(error=EngineLostError(f" ({how}), as {self._num_lost - 1} did before it"))
        elif not self.can_move(self._card):
            self.end(error=EngineLostError(f" ({how})"))
        else:
            _LOG.warning("a request continues at another replica: %s", how)
            self._submit()

    def _call_off(self) -> None:
        self._answer.cancel()
        self.end(error=ConfigError("the request was cancelled."))

    def _end(self) -> None:
        super()._end()
        self._forget(self)
