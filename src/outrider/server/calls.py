"""Requests and prompts that engines answer, across restarts of the engines' processes.

A call is sent to one process at a time. If that process ends, the call is sent to another one, if
that can continue the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from time import monotonic
from typing import Self, TypeAlias

import msgspec

from outrider.api.callers import ChatIds
from outrider.api.result import GenerationResult, Mailbox, TextEvent
from outrider.core.draft import RoundTrace
from outrider.core.errors import ConfigError
from outrider.metrics import Stats, summarise, together
from outrider.server.port import (
    Encode,
    EngineCard,
    EngineRequest,
    Part,
    Submit,
    error_of,
    is_repeatable,
)

LONG_BYTES = 1 << 15
# Bytes per second that a tokenizer encodes at least, even on a busy machine.
_LEAST_SPEED = 1 << 15
# The remaining time of a request whose time is up; 0 would mean "no limit".
_LEAST_SECONDS = 1e-6
# Number of rounds that are stored one by one; more are added up.
_MOST_ROUNDS = 64


class Progress:
    """The statistics of a request that several engine processes write, as those of one request.

    The result of the last process only covers the rounds that ran there. The earlier processes
    reported their rounds with each event, so rounds whose tokens were lost are not counted.
    """

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


class InFlight:
    """The state of a call, number `number` of its port."""

    def __init__(self, number: int) -> None:
        self.number = number
        # The current process has it, and has answered a part of it.
        self.is_sent, self.is_proven = False, False
        # A process ended while it had the call.
        self.is_blamed = False
        self.is_left, self.ended = False, False

    def take_back(self) -> None:
        """Note that no process has it."""
        self.is_sent, self.is_proven = False, False


class EncodeCall(InFlight):
    """A prompt that an engine's process encodes to token ids. `kind` is a digest of its content."""

    def __init__(self, encode: Encode) -> None:
        super().__init__(encode.number)
        content = encode.text.encode("utf-8", "surrogatepass")
        if encode.chat is not None:
            content = msgspec.msgpack.encode(encode.chat)
        self.kind, self._num_bytes = sha256(content).digest(), len(content)
        self.answer: asyncio.Future[ChatIds] = asyncio.get_running_loop().create_future()
        self._encode = encode
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_long(self) -> bool:
        return self._num_bytes > LONG_BYTES

    def command(self) -> Encode:
        return self._encode

    def limit(self, seconds: float, overdue: Callable[[EncodeCall], None]) -> None:
        """Call `overdue` if there is no answer after `seconds`, and more for a long prompt."""
        seconds += self._num_bytes / _LEAST_SPEED
        self._timer = asyncio.get_running_loop().call_later(seconds, overdue, self)

    def take_back(self) -> None:
        super().take_back()
        if self._timer is not None:
            self._timer.cancel()

    def take(self, part: Part) -> None:
        if part.failure is not None:
            self.end(error=error_of(part.failure))
        else:
            self._end()
            if not self.answer.done():
                self.answer.set_result(part.ids or ChatIds([]))

    def end(self, *, error: Exception) -> None:
        self._end()
        if not self.answer.done():
            self.answer.set_exception(error)

    def _end(self) -> None:
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()


class ProcessStream(InFlight, AsyncIterator[TextEvent]):
    """The events of one request; several engines may write them in turn. `leave` cancels it."""

    def __init__(
        self, number: int, request: EngineRequest, leave: Callable[[ProcessStream], None]
    ) -> None:
        super().__init__(number)
        self.request, self.leave = request, leave
        self.engine: int | None = None
        self.written = list(request.written)
        # The arithmetic of the engine that began the text.
        self.numerics = ""
        self.error: Exception | None = None
        self._result: GenerationResult | None = None
        self._progress = Progress(len(request.prompt_ids))
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
            try:
                await self._news()
            except BaseException:
                self.cancel()
                raise
        return event

    async def _news(self) -> None:
        """Wait for an event or the end."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def result(self) -> GenerationResult:
        if self.error is not None:
            raise self.error
        if self._result is None:
            raise ConfigError("the request has not ended.", hint="read its events first")
        return self._result

    def cancel(self) -> None:
        if not self.ended:
            self.leave(self)

    def command(self) -> Submit:
        """Return the frame for the next engine: the rest of the text, in the rest of the time."""
        progress, params = self._progress, self.request.params
        progress.hand_in()
        if params.max_time:
            left = max(params.max_time - progress.seconds, _LEAST_SECONDS)
            params = replace(params, max_time=left)
        request = msgspec.structs.replace(
            self.request,
            prompt_ids=list(self.request.prompt_ids),
            params=params,
            structure=dict(self.request.structure),
            written=self.written,
        )
        return Submit(self.number, request, self.numerics if self.written else "")

    def can_move(self, card: EngineCard) -> bool:
        """Return whether engines equal to that of `card` would write the rest of the text."""
        return not self.written or is_repeatable(card, self.request.params)

    def take(self, part: Part) -> None:
        if part.event is not None:
            self.is_proven = True
            self.written += part.event.token_ids
            self._progress.take(len(part.event.token_ids), part.rounds)
            self._events.put((part.event,))
            self._wake()
        elif part.failure is not None:
            self.end(error=error_of(part.failure))
        elif part.result is not None:
            self._result = self._progress.whole(part.result)
            self._end()

    def end(self, *, error: Exception) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @cached_property
    def kind(self) -> bytes:
        """A digest of the request without its seed: equal for requests of the same content."""
        request = self.request
        params = replace(request.params, seed=None, max_time=0.0)
        content = (list(request.prompt_ids), params, dict(request.structure))
        return sha256(msgspec.msgpack.encode(content)).digest()


Call: TypeAlias = EncodeCall | ProcessStream
