"""A server in the test's own event loop, on a socket: what it and its engine hold can be looked at.

Its clients are bare sockets, which leave however a test likes.
"""

from __future__ import annotations

import asyncio
import io
import json
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPResponse, IncompleteRead
from typing import Any, cast

from outrider.plugins.metrics import Metrics, metric_routes
from outrider.server.access import Address, DoorRules, reserved
from outrider.server.app import all_routes, make_app
from outrider.server.run import run_server
from outrider.server.site import Limits, Site

SECONDS = 240


@dataclass(frozen=True, slots=True)
class Live:
    """A server that is ready."""

    site: Site
    number: int
    """Of its port."""

    @property
    def num_places(self) -> int:
        """That requests hold."""
        return self.site.traffic.num_running

    async def ask(self, path: str, body: object, key: str = "") -> Client:
        client = await Client.connected(self.number)
        await client.send(request_of(path, body, key))
        return client


@asynccontextmanager
async def live_server(
    port: Any,
    limits: Limits | None = None,
    keys: Sequence[str] = (),
    *,
    health_port: int = 0,
) -> AsyncGenerator[Live]:
    """Of any port, one that has to be started too."""
    site = Site(port=port, names=("live",), limits=limits or Limits())
    routes = all_routes(site, metric_routes(Metrics(lambda: {"live": port.status})))
    app = make_app(site, DoorRules(keys=keys), routes)
    address, held = reserved(Address(port=0, health_port=health_port))
    ready = asyncio.Event()
    with closing(held):
        server = asyncio.ensure_future(
            run_server(app, site, address, load=port.start, ready=ready.set)
        )
        try:
            waiting = asyncio.ensure_future(ready.wait())
            await asyncio.wait(
                {server, waiting}, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            assert ready.is_set(), "the server is not ready"
            yield Live(site, address.port)
        finally:
            server.cancel()
            with suppress(asyncio.CancelledError):
                await server


def request_of(path: str, body: object, key: str = "") -> bytes:
    """The bytes of a POST, after which the connection is closed."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"x-api-key: {key}\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + data


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connected(cls, number: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", number))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def piece(self) -> bytes:
        """What comes next; empty at the end."""
        return await asyncio.wait_for(self.reader.read(1 << 16), SECONDS)

    async def rest(self) -> bytes:
        """Everything, up to the end."""
        return await asyncio.wait_for(self.reader.read(), SECONDS)

    def leave(self, *, reset: bool = False) -> None:
        """Close the connection, or reset it, which whoever writes to it hears of at once."""
        if reset:
            held = self.writer.get_extra_info("socket")
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class _Bytes:
    """What http.client reads instead of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._data)


def answer_of(data: bytes) -> tuple[int, Message, bytes]:
    """Status, headers and body. Raises HTTPException for what breaks off."""
    if b"\r\n\r\n" not in data:
        # http.client would take half a head for a whole one.
        raise IncompleteRead(data)
    answer = HTTPResponse(cast("Any", _Bytes(data)))
    answer.begin()
    return answer.status, answer.headers, answer.read()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what comes however busy the machine is."""
    async with asyncio.timeout(SECONDS):
        while not holds():
            await asyncio.sleep(0.001)
