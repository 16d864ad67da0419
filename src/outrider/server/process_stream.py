"""A request and its events, across restarts of the process that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import Self

import msgspec

from outrider.api.mailbox import Mailbox
from outrider.api.result import GenerationResult, TextEvent
from outrider.core.budget import RoundTrace
from outrider.core.errors import ConfigError
from outrider.server.port import EngineRequest
from outrider.server.resumed import Progress


class KeptOutError(ConfigError):
    """A request that is refused because the engine crashed twice with it, or with one like it."""

    def __init__(self) -> None:
        super().__init__(
            "the engine ended twice while it worked on this request, so it is kept out.",
            hint="the server's log says where the engine ended; another prompt may run",
        )


class ProcessStream(AsyncIterator[TextEvent]):
    """The events of one request; several processes may write them in turn."""

    def __init__(
        self, number: int, request: EngineRequest, leave: Callable[[ProcessStream], None]
    ) -> None:
        self.number, self.request = number, request
        self.engine: int | None = None
        self.written = list(request.written)
        self.is_proven, self.is_sent, self.is_left, self.ended = False, False, False, False
        self.is_blamed = False
        # The arithmetic of the engine that began the text.
        self.numerics = ""
        self.error: Exception | None = None
        self.found: GenerationResult | None = None
        self.leave = leave
        self.progress = Progress(len(request.prompt_ids))
        self._events = Mailbox()
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextEvent:
        while (event := self._events.take()) is None:
            if self.ended:
                if self.error is not None:
                    raise self.error
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except BaseException:
                self.cancel()
                raise
            finally:
                self._waiter = None
        return event

    @property
    def result(self) -> GenerationResult:
        if self.error is not None:
            raise self.error
        if self.found is None:
            raise ConfigError("the request has not ended.", hint="read its events first")
        return self.found

    def cancel(self) -> None:
        if not self.ended:
            self.leave(self)

    def take(self, event: TextEvent, rounds: Sequence[RoundTrace] = ()) -> None:
        self.is_proven = True
        self.written += event.token_ids
        self.progress.take(len(event.token_ids), rounds)
        self._events.put((event,))
        self._wake()

    def end(self, *, result: GenerationResult | None = None, error: Exception | None) -> None:
        self.found = None if result is None else self.progress.whole(result)
        self.error, self.ended = error, True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @cached_property
    def kind(self) -> bytes:
        """A digest of the request without its seed: equal for requests of the same content."""
        request = self.request
        params = replace(request.params, seed=None, max_time=0.0)
        asked = (list(request.prompt_ids), params, dict(request.structure))
        return sha256(msgspec.msgpack.encode(asked)).digest()
