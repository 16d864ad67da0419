"""A request and its events, across restarts of the process that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from time import monotonic
from typing import Self

import msgspec

from outrider.api.result import GenerationResult, Mailbox, TextEvent
from outrider.core.draft import RoundTrace
from outrider.core.errors import ConfigError
from outrider.metrics.summary import Stats, summarise, together
from outrider.server.port import EngineRequest

# Statistics of a request that several engine processes wrote, as those of one request.
#
# The result of the last process only covers the rounds that ran there. The earlier processes
# reported their rounds with each event, so rounds whose tokens were lost are not counted.
# Number of rounds that are stored one by one; more are added up.
_MOST_ROUNDS = 64


class Progress:
    """The statistics of one request so far."""

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._came = monotonic()
        # Of the current process: when the request was submitted to it, and its rounds.
        self._submitted, self._num_read = 0.0, 0
        self._rounds: list[RoundTrace] = []
        self._stats: list[Stats] = []
        # Of all processes together, and of those that have ended.
        self._arrivals: list[float] = []
        self._past: list[Stats] = []
        self._num_past, self._num_cached = 0, 0
        self._accepted, self._rejected, self._past_predicted = 0, 0, (0, 0)

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return monotonic() - self._came

    def take(self, num_tokens: int, rounds: Sequence[RoundTrace]) -> None:
        self._arrivals += [round(self.seconds, 9)] * num_tokens
        self._rounds += rounds
        if len(self._rounds) > _MOST_ROUNDS:
            self._add_up()

    def hand_in(self) -> None:
        """Note that the request is submitted to a process, which runs the next rounds."""
        self._submitted = self.seconds
        if len(self._arrivals) == self._num_past:
            # The previous process wrote nothing, or this is the first one.
            return
        self._add_up()
        if not self._past:
            # The last token of a prompt is read with the first round, so it is never cached.
            self._num_cached = max(0, self._num_prompt - 1 - self._num_read)
        self._past += self._stats
        self._stats.clear()
        self._num_past = len(self._arrivals)
        self._past_predicted = self._accepted, self._rejected

    def whole(self, result: GenerationResult) -> GenerationResult:
        """Return `result`, which is of the current process, with the work of earlier ones added."""
        if not self._past:
            return result
        arrivals = [round(self._submitted + seconds, 9) for seconds in result.token_seconds]
        arrivals = (*self._arrivals[: self._num_past], *arrivals)
        predicted = result.prediction_tokens
        if predicted is not None:
            accepted, rejected = self._past_predicted
            predicted = predicted[0] + accepted, predicted[1] + rejected
        return replace(
            result,
            stats=together([*self._past, result.stats], total_seconds=arrivals[-1]),
            token_seconds=arrivals,
            num_cached_tokens=self._num_cached,
            prediction_tokens=predicted,
        )

    def _add_up(self) -> None:
        rounds = self._rounds
        k = int(any(trace.num_drafted for trace in rounds))
        self._stats.append(summarise(rounds, drafter="", k=k, total_seconds=0.0))
        self._num_read += sum(trace.num_prompt_tokens for trace in rounds)
        for trace in rounds:
            if trace.drafter == "prediction":
                self._accepted += trace.num_accepted
                self._rejected += trace.num_drafted - trace.num_accepted
        rounds.clear()


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
