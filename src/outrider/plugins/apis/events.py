"""Answers that are one sequence of named events, and routes that count the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.server.exchange import B, Event, Exchange, received
from outrider.server.parts import Part, ToolClose, ToolDelta, ToolOpen
from outrider.server.reply import Reply, encode, json_response
from outrider.server.site import Site, Step


def count_route(path: str, kind: type[Exchange[Any]], site: Site) -> Route:
    """Return the route POST `path`, which counts the tokens of a prompt."""

    async def count(request: Request) -> Response:
        exchange = await received(kind, request, site)

        async def counted() -> Response:
            exchange.params()
            chat = exchange.chat(exchange.tooling())
            ids = (await exchange.site.port.encode_chat(chat)).ids
            return json_response({**kind.count_fields, "input_tokens": len(ids)})

        return Reply(exchange.site, request, counted)

    return Route(path, count, methods=["POST"])


class Evented(Exchange[B]):
    """An exchange whose answer is one sequence of events. `record` is the object so far, which the
    events add up to. It has items: texts, thoughts and calls, each of which opens, grows, and is
    closed before the next one opens."""

    record: dict[str, Any]

    def __init__(self, site: Site, body: B, request: Request, warnings: list[str]) -> None:
        super().__init__(site, body, request, warnings)
        self._item: dict[str, Any] | None = None
        self._of: type[Part] | None = None
        self._pieces: list[str] = []

    def item_of(self, part: Part) -> dict[str, Any]:
        """Return a new item that begins with `part`."""
        raise NotImplementedError

    def opened(self, item: dict[str, Any]) -> list[Event]:
        raise NotImplementedError

    def grown(self, item: dict[str, Any], text: str, part: Part, step: Step) -> Event:
        """Return the event of more text or arguments, those of `part`."""
        raise NotImplementedError

    def closed(self, item: dict[str, Any], text: str, *, whole: bool) -> list[Event]:
        """Complete an item with all its text or arguments; return the last events of it."""
        raise NotImplementedError

    async def whole(self) -> Mapping[str, Any]:
        async with aclosing(self.steps()) as steps:
            async for _ in steps:
                pass
        return self.record

    def more(self, index: int, step: Step) -> list[Event]:
        del index
        events = [event for part in step.parts for event in self._part(part, step)]
        if step.rounds and events:
            events[0]["outrider.round"] = list(step.rounds)
        return events

    def _part(self, part: Part, step: Step) -> list[Event]:
        if isinstance(part, ToolClose):
            return self.close(whole=part.whole)
        found: list[Event] = []
        goes_on = isinstance(part, ToolDelta) or (self._item is not None and type(part) is self._of)
        if self._item is None or not goes_on:
            found = self.close()
            self._of, self._item = type(part), self.item_of(part)
            found += self.opened(self._item)
        if isinstance(part, ToolOpen):
            return found
        text = part.arguments if isinstance(part, ToolDelta) else part.text
        self._pieces.append(text)
        return [*found, self.grown(self._item, text, part, step)]

    def close(self, *, whole: bool = True) -> list[Event]:
        """Return the last events of the open item, if there is one."""
        item, text = self._item, "".join(self._pieces)
        self._item, self._pieces = None, []
        return [] if item is None else self.closed(item, text, whole=whole)

    def framed(self, events: Sequence[Event]) -> bytes:
        return b"".join(
            b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n"
            for event in events
        )
