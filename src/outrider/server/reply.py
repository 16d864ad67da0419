"""Responses to clients: whole, or as server-sent events while the answer is written.

A disconnect of the client cancels its work. An error before the first byte has its own status. An
error after it is sent as one `error` event, without the events that mark a normal end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.server.errors import ApiError, api_error, error_response
from outrider.server.site import Limits, Site, key_of

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientGoneError(Exception):
    """The client left, or was cut off because it did not read for too long."""


class Reply(Response):
    """Runs `work` with a slot among the requests in flight, and sends its response."""

    def __init__(
        self, site: Site, request: Request, work: Callable[[], Awaitable[Response]]
    ) -> None:
        super().__init__()
        self._site, self._request, self._work = site, request, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def run() -> None:
            try:
                async with self._site.held():
                    response = await self._work()
            except Exception as error:  # noqa: BLE001 - sent to the client
                response = error_response(error, scope["path"])
            await response(scope, receive, send)

        await _admitted(self._site, self._request, receive, send, run)


class Waiting(Protocol):
    """Events of an API that are not part of the answer."""

    def waiting(self) -> bytes:
        """A heartbeat: the beginning of the answer if it was not sent yet, else an event that
        changes nothing. It is an event because clients ignore comments in their timeouts."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        ...


class EventReply(Response):
    """Sends the events of `make`, each piece of bytes in one write. Heartbeats of `extra` between
    them keep clients from mistaking a long wait for an end."""

    def __init__(
        self,
        site: Site,
        request: Request,
        make: Callable[[], Awaitable[AsyncGenerator[bytes]]],
        extra: Waiting,
    ) -> None:
        super().__init__()
        self._site, self._request, self._make, self._extra = site, request, make, extra

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        writer = EventWriter(send, self._site.limits, self._extra.waiting)

        async def run() -> None:
            try:
                async with self._site.held(), aclosing(await self._make()) as pieces:
                    writer.opened()
                    async for piece in pieces:
                        await writer.write(piece)
                await writer.end()
            except ClientGoneError:
                raise
            except asyncio.CancelledError:
                # A heartbeat stalled while the engine worked.
                writer.check()
                raise
            except Exception as error:  # noqa: BLE001 - sent to the client
                if not writer.has_begun:
                    writer.stop()
                    await error_response(error, path)(scope, receive, send)
                    return
                await writer.write(self._extra.failure(api_error(error, path)))
                await writer.end()
            finally:
                writer.stop()

        writer.start()
        try:
            await _admitted(self._site, self._request, receive, send, run)
        finally:
            writer.stop()


class EventWriter:
    """Writes events to one client, from one task. Headers are sent with the first piece or with the
    first heartbeat, which `waiting` makes. A heartbeat follows `ping_seconds` without a piece; the
    first one follows `begin_seconds` after the engine accepted the request. One timer watches all
    this: a timer for each write would cost more than the write."""

    def __init__(self, send: Send, limits: Limits, waiting: Callable[[], bytes]) -> None:
        self._send, self._limits, self._waiting = send, limits, waiting
        self._silence = limits.ping_seconds
        self._loop = asyncio.get_running_loop()
        self._owner = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Task[None] | None = None
        self._last = self._loop.time()
        # When the write that waits for the client began.
        self._since: float | None = None
        self._is_stalled = False
        self.has_begun = False

    def start(self) -> None:
        wait = min(self._silence, self._limits.write_seconds)
        self._timer = self._loop.call_later(wait, self._look)

    def opened(self) -> None:
        """Note that the engine has the request, which it would refuse soon (`begin_seconds`)."""
        if not self.has_begun:
            self.stop()
            self._last = self._loop.time()
            self._silence = min(self._limits.begin_seconds, self._limits.ping_seconds)
            self.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ping is not None:
            self._ping.cancel()
            self._ping = None

    async def write(self, piece: bytes) -> None:
        """Send a piece. Raises ClientGoneError if the client does not read."""
        if not piece:
            return
        if self._ping is not None:
            await self._watched(self._ping)
            self._ping = None
        await self._watched(self._written(piece))

    async def end(self) -> None:
        if self._ping is not None:
            await self._watched(self._ping)
        await self._watched(
            self._send({"type": "http.response.body", "body": b"", "more_body": False})
        )
        self.stop()

    def check(self) -> None:
        """Raise ClientGoneError if the task was cancelled because its client does not read."""
        if self._is_stalled and self._owner is not None:
            self._is_stalled = False
            self._owner.uncancel()
            raise ClientGoneError from None

    async def _written(self, piece: bytes) -> None:
        self._since = self._loop.time()
        try:
            if not self.has_begun:
                self.has_begun = True
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                )
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            self._since, self._last = None, self._loop.time()

    async def _watched(self, work: Awaitable[None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            self.check()
            raise
        except (OSError, RuntimeError):
            # ASGI servers raise these errors after the connection has ended.
            raise ClientGoneError from None

    def _look(self) -> None:
        """Cut off a client that does not read; send a heartbeat to one that waits."""
        limits, now = self._limits, self._loop.time()
        if self._since is not None and now - self._since >= limits.write_seconds:
            self._is_stalled = True
            if self._owner is not None:
                self._owner.cancel()
            return
        if self._since is None and now - self._last >= self._silence:
            self._ping = self._loop.create_task(self._written(self._waiting()))
            self._ping.add_done_callback(_retrieve)
            self._last, self._silence = now, limits.ping_seconds
        if self._since is None:
            wait = min(self._last + self._silence - now, limits.write_seconds)
        else:
            wait = self._since + limits.write_seconds - now
        self._timer = self._loop.call_later(max(0.0, wait), self._look)


async def _admitted(
    site: Site, request: Request, receive: Receive, send: Send, run: Callable[[], Awaitable[None]]
) -> None:
    try:
        with site.slot(key_of(request), is_in=request.scope.get("outrider.is_in", False)):
            await while_connected(receive, run)
    except ClientGoneError:
        return
    except Exception as error:  # noqa: BLE001 - no slot was free, and nothing was sent
        await error_response(error, request.scope["path"])(request.scope, receive, send)


def _retrieve(task: asyncio.Future[None]) -> None:
    """Retrieve a task's error so that asyncio does not log it: the next write raises it again."""
    if not task.cancelled():
        task.exception()


async def while_connected(receive: Receive, run: Callable[[], Awaitable[None]]) -> None:
    """Run `run`, and cancel it when the client leaves. Raises ClientGoneError then."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("no task")
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    watcher.add_done_callback(_retrieve)
    try:
        await run()
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watcher.cancel()
