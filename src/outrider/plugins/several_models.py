"""Several models on one server: they are loaded on demand, and a limited number is loaded at once.

A running request holds its model. Models are loaded one at a time, as each plans its memory by what
is free then. If the limit is reached, the least recently used model is unloaded, preferably one
without requests. If it has requests, those are finished first, and later ones wait until the model
is loaded again; so no model waits for ever, however busy the others are. A model that had no
request for its `keep_alive` is unloaded as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf
from time import monotonic
from typing import Protocol

from outrider.core.errors import OutriderError, defect_in, with_hint
from outrider.server.port import EnginePort, NotReadyError
from outrider.server.site import Site

_LOG = logging.getLogger(__name__)
# Pause after a failed load of a model, as each try unloads another model.
RETRY_SECONDS = 30


class NotLoadedError(NotReadyError):
    """A model could not be loaded. Only the log has the reason, as it may contain file names."""

    def __init__(self, name: str) -> None:
        OutriderError.__init__(
            self,
            f"the model {name!r} could not be loaded; the server's log says why.",
            hint="another model of /v1/models",
        )
        self.state, self.seconds = "failed", RETRY_SECONDS


class Loadable(EnginePort, Protocol):
    """A port whose engine can be loaded and unloaded."""

    async def start(self) -> None: ...

    async def unload(self) -> None: ...


class Model:
    """One model, with the number of requests that hold it and those that wait for it."""

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
        """True once the model had no request for its `keep_alive`."""
        if self.rest is None or self.num_users or not self.is_loaded:
            return False
        return asyncio.get_running_loop().time() >= self.rest.when()

    def answer(self, error: Exception | None) -> None:
        """Admit all waiting requests, or fail them with `error`."""
        waiting = [one for one in self.waiting if not one.done()]
        self.waiting.clear()
        for one in waiting:
            if error is None:
                self.num_users += 1
                one.set_result(None)
            else:
                one.set_exception(error)


class Models:
    """The models of one server. At most `most_loaded` are loaded at once; a model stays loaded for
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
        """Return `first` with a further site for each other model."""
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
        """Load the first model. Raises the errors of loading."""
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
        """Keep a model loaded inside, and for `keep_alive` seconds after. Raises NotLoadedError."""
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
        """Load models on demand and unload unused ones, as long as the server runs."""
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
                # The client left, but its request was already admitted.
                self._leave(model)
            raise

    def _leave(self, model: Model) -> None:
        model.num_users -= 1
        model.last_used = next(self._times)
        self._left.set()
        self._rest(model)

    def _rest(self, model: Model) -> None:
        """Schedule a check of a model without requests at the end of its `keep_alive`."""
        if model.rest is not None:
            model.rest.cancel()
            model.rest = None
        if not model.num_users and model.keep_alive < inf:
            loop = asyncio.get_running_loop()
            model.rest = loop.call_later(model.keep_alive, self._wanted.put_nowait, model)

    async def _loaded(self, model: Model) -> Exception | None:
        """Load a model; return None, or the error."""
        if model.is_loaded:
            return None
        try:
            await self._unload_oldest()
            await model.port.start()
        except Exception as error:  # noqa: BLE001 - waiting requests get it; other models go on
            words, defect = with_hint(error), defect_in(error)
            _LOG.error("%s could not be loaded: %s", model.name, words, exc_info=defect)
            model.retry_at = monotonic() + RETRY_SECONDS
            # Unloaded rather than failed: the next try may find enough memory.
            await model.port.unload()
            return NotLoadedError(model.name)
        return None

    async def _unload_oldest(self) -> None:
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
