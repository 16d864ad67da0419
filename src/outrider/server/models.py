"""Models that come and go: each is loaded for the requests that name it, so many at once, by turns.

A request holds its model while it runs. What is not loaded is loaded one after another, for each
plans its memory by what is free then. Where memory is taken, the model that was not used for
longest makes way, rather one without users: requests that hold it end, and later ones wait
until it is loaded again. So no model waits for ever, however busy the others are. A model that had
no request for its `keep_alive` is unloaded as well.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf, isnan
from time import monotonic
from typing import Protocol

from outrider.core.errors import ConfigError, OutriderError, told
from outrider.core.fields import shown
from outrider.server.port import EnginePort, NotReadyError
from outrider.server.site import Site

_LOG = logging.getLogger(__name__)
# A model that could not be loaded is not tried again for so long: each try unloads another.
RETRY_SECONDS = 30
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h)", re.ASCII)


def keep_alive_of(given: str | float, name: str = "keep_alive") -> float:
    """Seconds, of a number or a duration like `1h30m`; below 0 it is infinite, as in Ollama. Raises
    ConfigError, in which it has this name."""
    words = str(given).strip()
    size = words.removeprefix("-")
    parts = [(size, "s")] if _PART.sub("", size) or not size else _PART.findall(size)
    try:
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    except ValueError:
        seconds = -1.0
    if isnan(seconds) or seconds < 0:
        raise ConfigError(
            f"{name}: {shown(given)} is no duration.", hint="5m, 90 (seconds), 0, or -1 (never)"
        )
    return inf if words != size else seconds


class NotLoadedError(NotReadyError):
    """A model could not be loaded; why is for the log, since it may name files."""

    def __init__(self, name: str) -> None:
        OutriderError.__init__(
            self,
            f"the model {name!r} could not be loaded; the server's log says why.",
            hint="another model of /v1/models",
        )
        self.state, self.seconds = "failed", RETRY_SECONDS


class Loadable(EnginePort, Protocol):
    """A port whose engine comes and goes."""

    async def start(self) -> None: ...

    async def unload(self) -> None: ...


class Model:
    """One of them, and who holds it or waits for it."""

    def __init__(self, name: str, port: Loadable, keep_alive: float) -> None:
        self.name, self.port, self.keep_alive = name, port, keep_alive
        self.rest: asyncio.TimerHandle | None = None
        self.num_users, self.last_used = 0, 0
        self.is_wanted, self.is_leaving = False, False
        self.waiting: list[asyncio.Future[None]] = []
        self.retry_at = 0.0

    @property
    def is_loaded(self) -> bool:
        return self.port.status.state in ("ready", "restarting")

    @property
    def is_over(self) -> bool:
        """True once it had no request for as long as it was to be kept."""
        if self.rest is None or self.num_users or not self.is_loaded:
            return False
        return asyncio.get_running_loop().time() >= self.rest.when()

    def answer(self, error: Exception | None) -> None:
        """Let all in who wait, or tell them why not."""
        waiting = [one for one in self.waiting if not one.done()]
        self.waiting.clear()
        for one in waiting:
            if error is None:
                self.num_users += 1
                one.set_result(None)
            else:
                one.set_exception(error)


class Models:
    """All models of one server, of which `most_loaded` are loaded at once, and each for
    `keep_alive` seconds after its last request."""

    def __init__(
        self, ports: Mapping[str, Loadable], most_loaded: int, keep_alive: float = inf
    ) -> None:
        self._keep_alive = keep_alive
        self._by_name = {name: Model(name, port, keep_alive) for name, port in ports.items()}
        self._most_loaded = most_loaded
        self._wanted: asyncio.Queue[Model] = asyncio.Queue()
        self._times = count(1)
        self._left, self._has_begun = asyncio.Event(), asyncio.Event()

    @property
    def known(self) -> tuple[Model, ...]:
        return tuple(self._by_name.values())

    def sites(self, first: Site) -> Site:
        """`first`, and beside it a site of each further model."""
        sites = [
            replace(
                first,
                port=model.port,
                names=first.names if name == first.names[0] else (name,),
                held=partial(self.held, name),
                would_load=partial(self._would_load, model),
            )
            for name, model in self._by_name.items()
        ]
        return replace(sites[0], others=tuple(sites[1:]))

    async def start(self) -> None:
        """Load the first one. Raises what loading raises."""
        first, *others = self.known
        await first.port.start()
        for model in others:
            await model.port.unload()
        self._has_begun.set()
        self._rest(first)

    def _would_load(self, model: Model) -> bool:
        return self._has_begun.is_set() and monotonic() >= model.retry_at

    @asynccontextmanager
    async def held(self, name: str, keep_alive: float | None = None) -> AsyncGenerator[None]:
        """Within it the model is loaded, and for so many seconds after it. Raises
        NotLoadedError."""
        model = self._by_name[name]
        if model.is_loaded and not model.is_leaving:
            model.num_users += 1
        else:
            await self._turn(model)
        try:
            yield
        finally:
            model.keep_alive = self._keep_alive if keep_alive is None else keep_alive
            self._leave(model)

    async def run(self) -> None:
        """Load what is requested and unload what is not, for as long as the server runs."""
        try:
            await self._has_begun.wait()
            while True:
                model = await self._wanted.get()
                model.is_wanted = False
                if any(not one.done() for one in model.waiting):
                    model.answer(await self._loaded(model))
                    self._rest(model)
                elif model.is_over:
                    await self._unload(model)
                    _LOG.info("%s is unloaded: it had no request for a while", model.name)
        finally:
            for model in self.known:
                model.answer(NotReadyError("closed"))

    async def _turn(self, model: Model) -> None:
        if monotonic() < model.retry_at:
            raise NotLoadedError(model.name)
        if not model.is_wanted:
            model.is_wanted = True
            self._wanted.put_nowait(model)
        turn = asyncio.get_running_loop().create_future()
        model.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # Who left was let in already.
                self._leave(model)
            raise

    def _leave(self, model: Model) -> None:
        model.num_users -= 1
        model.last_used = next(self._times)
        self._left.set()
        self._rest(model)

    def _rest(self, model: Model) -> None:
        """Have a model without users looked at when it was kept for long enough."""
        if model.rest is not None:
            model.rest.cancel()
            model.rest = None
        if not model.num_users and model.keep_alive < inf:
            loop = asyncio.get_running_loop()
            model.rest = loop.call_later(model.keep_alive, self._wanted.put_nowait, model)

    async def _loaded(self, model: Model) -> Exception | None:
        """None, or why not."""
        if model.is_loaded:
            return None
        try:
            await self._make_room()
            await model.port.start()
        except Exception as error:  # noqa: BLE001 - told to who waits; other models go on
            _LOG.error("%s could not be loaded: %s", model.name, told(error))
            model.retry_at = monotonic() + RETRY_SECONDS
            # No engine is given up for it: the next try may find memory.
            await model.port.unload()
            return NotLoadedError(model.name)
        return None

    async def _make_room(self) -> None:
        loaded = [model for model in self.known if model.is_loaded]
        if len(loaded) < self._most_loaded:
            return
        await self._unload(min(loaded, key=lambda one: (one.num_users > 0, one.last_used)))

    async def _unload(self, leaving: Model) -> None:
        leaving.is_leaving = True
        try:
            while leaving.num_users:
                self._left.clear()
                await self._left.wait()
            await leaving.port.unload()
        finally:
            leaving.is_leaving = False
