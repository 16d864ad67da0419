"""A TCP proxy on the loopback that treats connections as bad networks do."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Way: TypeAlias = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to bytes on their way `up`, to the server, or `down`, to the client.

    Each piece has at most `piece_bytes` and waits for `seconds`, a random share of them where there
    is `jitter`. Once `after` bytes have passed in the direction of `way`, the connection is `reset`
    or `closed` towards both sides, nothing more passes that way (`stalled`), or what was received
    is told its end (`half`) while the other direction stays.
    """

    piece_bytes: int = 1 << 16
    seconds: float = 0.0
    jitter: bool = False
    way: Way = "down"
    after: int | None = None
    end: Literal["reset", "closed", "stalled", "half"] = "reset"


@dataclass(slots=True)
class ChaosProxy:
    """`fault` is that of connections from now on."""

    target: int
    """A port of this machine."""
    number: int = 0
    fault: Fault = Fault()
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        above, to_server = await asyncio.open_connection("127.0.0.1", self.target)
        ends = (writer, to_server)
        fault = self.fault
        pumps = [
            asyncio.ensure_future(self._pump(fault, "up", reader, to_server, ends)),
            asyncio.ensure_future(self._pump(fault, "down", above, writer, ends)),
        ]
        try:
            await asyncio.gather(*pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in ends:
                end.transport.abort()

    async def _pump(
        self,
        fault: Fault,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: tuple[asyncio.StreamWriter, ...],
    ) -> None:
        left = fault.after if fault.way == way else None
        with suppress(ConnectionError):
            while left is None or left > 0:
                most = fault.piece_bytes if left is None else min(fault.piece_bytes, left)
                piece = await reader.read(most)
                if not piece:
                    writer.write_eof()
                    return
                if fault.seconds:
                    share = self.rng.random() if fault.jitter else 1.0
                    await asyncio.sleep(share * fault.seconds)
                writer.write(piece)
                await writer.drain()
                if left is not None:
                    left -= len(piece)
            match fault.end:
                case "stalled":
                    await asyncio.Event().wait()
                case "half":
                    writer.write_eof()
                case "closed":
                    _end(ends, reset=False)
                case "reset":
                    _end(ends, reset=True)

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()


def _end(ends: tuple[asyncio.StreamWriter, ...], *, reset: bool) -> None:
    for writer in ends:
        if reset:
            held = writer.get_extra_info("socket")
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()


@asynccontextmanager
async def chaos_proxy(target: int) -> AsyncGenerator[ChaosProxy]:
    proxy = ChaosProxy(target)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.number = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.end()
        await server.wait_closed()
