"""Several models in one server: each is loaded when it is asked for, so many at once, by turns.

A request holds its model while it runs. What is not loaded is loaded one after another, for each
plans its memory by what is free then. Where there is no room, the model that was not used for
longest makes way, rather one that nobody holds: requests that hold it end, and later ones wait
until it is loaded again. So no model waits for ever, however busy the others are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from time import monotonic
from typing import Protocol

from outrider.core.errors import OutriderError, told
from outrider.server.port import EnginePort, NotReadyError
from outrider.server.site import Site

_LOG = logging.getLogger(__name__)
# A model that could not be loaded is not tried again for so long: each try unloads another.
RETRY_SECONDS = 30


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

    def __init__(self, name: str, port: Loadable) -> None:
        self.name, self.port = name, port
        self.num_users, self.last_used = 0, 0
        self.is_wanted, self.is_leaving = False, False
        self.waiting: list[asyncio.Future[None]] = []
        self.retry_at = 0.0

    @property
    def is_loaded(self) -> bool:
        return self.port.status.state in ("ready", "restarting")

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
    """All models of one server, of which `most_loaded` are loaded at once."""

    def __init__(self, ports: Mapping[str, Loadable], most_loaded: int) -> None:
        self._by_name = {name: Model(name, port) for name, port in ports.items()}
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
            replace(first, port=model.port, names=(name,), held=partial(self.held, name))
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

    @asynccontextmanager
    async def held(self, name: str) -> AsyncGenerator[None]:
        """Within it the model is loaded. Raises NotLoadedError."""
        model = self._by_name[name]
        if model.is_loaded and not model.is_leaving:
            model.num_users += 1
        else:
            await self._turn(model)
        try:
            yield
        finally:
            self._leave(model)

    async def run(self) -> None:
        """Load what is asked for, for as long as the server runs."""
        try:
            await self._has_begun.wait()
            while True:
                model = await self._wanted.get()
                model.is_wanted = False
                if any(not one.done() for one in model.waiting):
                    model.answer(await self._loaded(model))
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
            return NotLoadedError(model.name)
        return None

    async def _make_room(self) -> None:
        loaded = [model for model in self.known if model.is_loaded]
        if len(loaded) < self._most_loaded:
            return
        leaving = min(loaded, key=lambda one: (one.num_users > 0, one.last_used))
        leaving.is_leaving = True
        try:
            while leaving.num_users:
                self._left.clear()
                await self._left.wait()
            await leaving.port.unload()
        finally:
            leaving.is_leaving = False
