"""Running the server: granian in this event loop, signals, and an orderly shutdown.

The port listens while the engine loads, so that /ready is answered. On SIGTERM or Ctrl-C, new
requests are refused and running ones get time to end; a second signal stops the server at once.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server as Granian
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.core.env import notify_socket
from outrider.core.errors import MachineError, tell_of_task
from outrider.server.access import Address
from outrider.server.errors import ApiError, error_response
from outrider.server.site import Site

_LOG = logging.getLogger(__name__)
_HEADER_MILLISECONDS = 10_000
# Buffer of each connection; the headers must fit into it.
_BUFFER_BYTES = 64 << 10
# An idle connection takes about 3 kB and is closed after 10 seconds.
_MOST_CONNECTIONS = 16_384
_MOST_OF_HEALTH = 256
HEALTH_PATHS = ("/health", "/ready", "/metrics")
# Number of open files other than connections: the engine's pipes, models, libraries.
_OTHER_FILES = 256
_LAST_SECONDS = 5.0
_LAST_WORDS_SECONDS = 1.0
_THREADS_SECONDS = 0.3


async def run_server(
    app: ASGIApp,
    site: Site,
    address: Address,
    *,
    load: Callable[[], Coroutine[None, None, None]],
    ready: Callable[[], None],
    also: Sequence[Coroutine[None, None, None]] = (),
) -> None:
    """Serve until a signal. `load` loads the engine while the port already listens; then `ready` is
    called. `also` runs in the background. HEALTH_PATHS are also answered at the health port. Raises
    the errors of `load`, and MachineError if the server ends by itself."""
    asyncio.get_running_loop().set_exception_handler(tell_of_task)
    server = _granian(app, address, most_connections())
    second = None
    if health := address.health:
        second = _granian(_health_only(app), health, _MOST_OF_HEALTH)
    ended = _signals(site)
    serving = asyncio.ensure_future(server.serve())
    healthy = second and asyncio.ensure_future(second.serve())
    loading = asyncio.create_task(load())
    stopping = asyncio.ensure_future(ended.wait())
    background = [asyncio.create_task(one) for one in also]
    try:
        await asyncio.wait({serving, loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            ready()
            failing = asyncio.create_task(_failed(site))
            background.append(failing)
            await asyncio.wait({serving, stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            raise MachineError(f"the server at {address.url} ended.", hint="the log says why")
        if site.traffic.num_running:
            _LOG.info("waiting for %d requests to end", site.traffic.num_running)
        await _none_running(site, site.limits.drain_seconds)
    finally:
        site.traffic.ending = True
        for task in (loading, stopping, *background):
            task.cancel()
        await asyncio.gather(*(one.port.aclose() for one in site.all))
        # Requests that still run now get an error; it needs a moment to reach their clients.
        await _none_running(site, _LAST_WORDS_SECONDS)
        for one, running in ((server, serving), (second, healthy)):
            if one is not None and running is not None:
                one.stop()
                await _ended(running)
        # Threads of granian must end before the interpreter does.
        await asyncio.sleep(_THREADS_SECONDS)


async def _ended(running: asyncio.Future[None]) -> None:
    """Wait for the end of a server, but not for long; log the error by which it ended."""
    try:
        await asyncio.wait_for(running, _LAST_SECONDS)
    except TimeoutError:
        _LOG.info("a server did not end within %.0f s", _LAST_SECONDS)
    except Exception as error:  # noqa: BLE001 - of whatever kind, the others must end too
        _LOG.error("a server ended by an error", exc_info=error)


async def _failed(site: Site) -> None:
    """Wait until every engine is given up; the server's supervisor can then restart it."""
    while any(one.port.status.state != "failed" for one in site.all):
        await asyncio.sleep(1.0)


def _granian(app: ASGIApp, address: Address, most: int) -> Granian:
    server = Granian(
        app,
        address=address.host,
        port=address.port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=False,
        backlog=1024,
        backpressure=most,
        http1_settings=HTTP1Settings(
            header_read_timeout=_HEADER_MILLISECONDS, max_buffer_size=_BUFFER_BYTES
        ),
        log_enabled=False,
        log_level=LogLevels.error,
        ssl_cert=address.certificate,
        ssl_key=address.private_key,
    )
    server.workers_kill_timeout = int(_LAST_SECONDS)
    return server


def _health_only(app: ASGIApp) -> ASGIApp:
    async def health(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in HEALTH_PATHS:
            words = f"this port answers {', '.join(HEALTH_PATHS)} alone."
            refusal = error_response(ApiError(404, words, code="not_found"))
            await refusal(scope, receive, send)
        else:
            await app(scope, receive, send)

    return health


def most_connections() -> int:
    """Return the limit of open connections, after raising that of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_CONNECTIONS + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if 0 <= soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    files = min(soft, wanted) if soft >= 0 else wanted
    return max(files // 2, files - _OTHER_FILES)


def _signals(site: Site) -> asyncio.Event:
    """Return an event that the first signal sets; a second signal ends the wait for requests."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def note() -> None:
        if site.traffic.ending:
            site.traffic.hurried = True
        site.traffic.ending = True
        ended.set()

    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, note)
    return ended


async def _none_running(site: Site, seconds: float) -> None:
    """Wait for the requests in flight, but at most `seconds`, and only until a second signal."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while site.traffic.num_running and loop.time() < until and not site.traffic.hurried:
        await asyncio.sleep(0.05)


def tell_ready() -> None:
    """Send READY=1 to systemd; do nothing without a notify socket, as in a terminal."""
    name = notify_socket()
    if name is None:
        return
    # A name that begins with @ is an abstract socket, not a file.
    address = f"\0{name[1:]}" if name.startswith("@") else name
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(b"READY=1", address)
    except OSError as error:
        _LOG.warning("systemd could not be notified through NOTIFY_SOCKET: %s", error)
