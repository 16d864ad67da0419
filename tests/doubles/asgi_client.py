"""Asks an ASGI application without a network, and may leave or stop reading whenever it likes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

HEADERS = {"host": "localhost:8000", "content-type": "application/json"}


@dataclass(slots=True)
class Got:
    """What was answered so far: `writes` are the pieces of the body as they were sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    writes: list[bytes] = field(default_factory=list[bytes])
    is_whole: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream: the data of its events; what is no JSON is itself."""
        lines = [line for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [_read(line.removeprefix("data: ")) for line in lines]


def _read(text: str) -> Any:
    return text if text == "[DONE]" else json.loads(text)


class Client:
    """One connection's request. `leave` is set by who wants to disconnect; a `stalled` client takes
    no byte; `body` may be pieces, the last of which never comes where it is None."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.leave = asyncio.Event()
        self.news = asyncio.Event()
        self.stalled = False
        self.got = Got()

    async def ask(
        self,
        path: str,
        body: object = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
        pieces: Sequence[bytes | None] = (),
    ) -> Got:
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        sent = list(pieces) or [data]
        found = {**HEADERS, **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method or ("GET" if body is None and not pieces else "POST"),
            "scheme": "http",
            "path": path.partition("?")[0],
            "raw_path": path.partition("?")[0].encode(),
            "query_string": path.partition("?")[2].encode(),
            "root_path": "",
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in found.items() if v],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }

        async def receive() -> Message:
            if sent:
                piece = sent.pop(0)
                if piece is None:
                    await asyncio.Event().wait()
                return {"type": "http.request", "body": piece, "more_body": bool(sent)}
            await self.leave.wait()
            return {"type": "http.disconnect"}

        await self._app(scope, receive, self._send)
        return self.got

    async def _send(self, message: Message) -> None:
        if self.stalled:
            await asyncio.Event().wait()
        if message["type"] == "http.response.start":
            self.got.status = message["status"]
            self.got.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            if message.get("body"):
                self.got.writes.append(message["body"])
            self.got.is_whole = not message.get("more_body", False)
        self.news.set()
