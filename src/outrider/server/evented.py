"""Answers of the Responses and Messages APIs, whose events add up to one object."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias

from outrider.server.answers import Answer, written
from outrider.server.errors import ApiError
from outrider.server.events import End, Step
from outrider.server.exchange import Exchange
from outrider.server.wire import encode

Event: TypeAlias = dict[str, Any]


class Events(Protocol):
    """The events of one answer. `record` is the object so far."""

    record: dict[str, Any]

    def begin(self, num_prompt: int) -> list[Event]: ...

    def take(self, step: Step) -> list[Event]: ...

    def end(self, end: End, extras: Mapping[str, Any]) -> list[Event]:
        """The last events. `extras` are fields that the original API does not have."""
        ...

    def wait(self) -> Event:
        """An event that changes nothing, as a heartbeat."""
        ...

    def fail(self, error: ApiError) -> list[Event]:
        """The events of an error that occurs after the first event."""
        ...


class EventedWriter:
    """Writes `events` of the one answer that `ask` opens."""

    def __init__(
        self, exchange: Exchange[Any], events: Events, ask: Callable[[], Awaitable[list[Answer]]]
    ) -> None:
        self._exchange, self._events, self._ask = exchange, events, ask
        self._num_prompt, self._has_begun = 0, False

    async def open(self) -> list[Answer]:
        return await self._ask()

    async def whole(self, answers: Sequence[Answer]) -> Mapping[str, Any]:
        async with aclosing(self._steps(answers)) as steps:
            async for _ in steps:
                pass
        return self._events.record

    async def pieces(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes]:
        async with aclosing(self._steps(answers)) as steps:
            async for events in steps:
                yield framed(events)

    async def _steps(self, answers: Sequence[Answer]) -> AsyncGenerator[list[Event]]:
        """Yield the events of each step; the first ones include the beginning of the answer."""
        self._num_prompt = len(answers[0].request.prompt_ids)
        async with aclosing(written(answers)) as steps:
            async for _, item in steps:
                begun = self._begin()
                if isinstance(item, Step):
                    events = self._events.take(item)
                else:
                    events = self._events.end(item, self._exchange.extras([item]))
                yield [*begun, *events]

    def waiting(self) -> bytes:
        return framed(self._begin() or [self._events.wait()])

    def failure(self, error: ApiError) -> bytes:
        return framed(self._events.fail(error))

    def _begin(self) -> list[Event]:
        """Return the first events, unless they were sent before."""
        if self._has_begun:
            return []
        self._has_begun = True
        return self._events.begin(self._num_prompt)


def framed(events: Sequence[Event]) -> bytes:
    """Encode events as server-sent events, each with its type in the `event` field."""
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n"
        for event in events
    )
