"""An engine that is started again: for how long it may load, and when its server gives up on it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from typing import Any

import pytest

from doubles.clocks import FakeClock
from doubles.scripted_child import ScriptedChild, scripted_children
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import ask
from outrider.core.config import EngineConfig
from outrider.plugins.replicas import ReplicasPort
from outrider.server import engine_child
from outrider.server import engine_child as restarts
from outrider.server.engine_child import EngineChild, LoadHungError, Restarts
from outrider.server.port import EngineStatus, Load, NotReadyError
from outrider.server.process_port import ProcessPort

LOAD = Load("m", None, EngineConfig(), 9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock()
    monkeypatch.setattr(restarts, "monotonic", found)
    return found


def test_only_the_first_load_has_no_limit() -> None:
    known = Restarts(30.0)
    assert known.load_seconds is None
    known.loaded(2.0)
    assert known.load_seconds == 30.0
    known.loaded(200.0)
    known.loaded(100.0)
    assert known.load_seconds == 600.0
    # A disk that is slow today is waited for longer each time.
    known.hung()
    known.hung()
    assert known.load_seconds == 2400.0
    known.loaded(100.0)
    assert known.load_seconds == 600.0


def test_an_engine_is_overdue_once_it_is_away_for_several_loads(clock: FakeClock) -> None:
    known = Restarts(30.0)
    known.loaded(20.0)
    clock.advance(10_000)
    assert not known.is_overdue
    known.lost(is_own=True)
    clock.advance(240)
    assert not known.is_overdue
    clock.advance(1)
    assert known.is_overdue
    known.loaded(20.0)
    assert (known.is_overdue, known.num) == (False, 1)


@pytest.mark.parametrize("number", [signal.SIGSTOP, 0], ids=["stopped", "silent"])
def test_a_process_that_hangs_while_it_loads_is_ended(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A real process, which is sent `number` and says nothing."""
    real, begun = asyncio.create_subprocess_exec, list[Process]()

    async def hanging(*_: str, pass_fds: tuple[int, ...], **options: Any) -> Process:
        words = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
        begun.append(await real(*words, pass_fds=pass_fds, **options))
        os.kill(begun[0].pid, number)
        return begun[0]

    monkeypatch.setattr(engine_child, "create_subprocess_exec", hanging)

    async def work() -> None:
        with pytest.raises(LoadHungError):
            await EngineChild.started(LOAD, load_seconds=0.01)
        assert begun[0].returncode == -signal.SIGKILL

    asyncio.run(work())


def started(
    known: Restarts, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, num: int
) -> list[float]:
    """How long each of so many starts waits."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.advance(seconds)

    async def work() -> None:
        for _ in range(num):
            await known.pause()

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        asyncio.run(work())
    return waits


def test_starts_are_bounded_by_the_minute_and_ends_of_its_own_give_an_engine_up(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    known = Restarts(30.0)
    waits = started(known, clock, monkeypatch, 40)
    assert waits[:4] == pytest.approx([0, 0.2, 0.4, 0.8])
    # However many requests end it, it is started six times a minute and goes on.
    assert sum(waits) == pytest.approx(6 * 60, rel=0.1)
    assert known.is_bounded
    clock.advance(61)
    assert not known.is_bounded
    for _ in range(5):
        known.lost(is_own=True)
        known.lost(is_own=False)
    assert started(known, clock, monkeypatch, 1) == [0]
    known.failed()
    with pytest.raises(NotReadyError, match="failed"):
        started(known, clock, monkeypatch, 1)
    clock.advance(601)
    assert started(known, clock, monkeypatch, 1) == [0]


def replica(load: Load) -> ReplicasPort:
    return ReplicasPort([ProcessPort(load)])


@pytest.mark.parametrize("kind", [ProcessPort, replica])
def test_an_engine_whose_load_hung_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock, kind: Callable[[Load], Any]
) -> None:
    children = scripted_children(monkeypatch)
    start, limits, hangs = EngineChild.started, list[float | None](), asyncio.Event()

    async def started(
        load: Load, *, hang_seconds: float, load_seconds: float | None
    ) -> ScriptedChild | EngineChild:
        limits.append(load_seconds)
        if len(limits) == 2:
            await hangs.wait()
            raise LoadHungError("it hung")
        return await start(load, hang_seconds=hang_seconds, load_seconds=load_seconds)

    monkeypatch.setattr(EngineChild, "started", started)

    async def work() -> None:
        port = kind(LOAD)
        await port.start()
        children[0].kill()
        while len(limits) < 2:
            await asyncio.sleep(0)
        clock.advance(100)
        assert (port.status.state, port.status.is_overdue) == ("restarting", False)
        clock.advance(100)
        assert port.status.is_overdue
        hangs.set()
        while port.status.state != "ready":
            await asyncio.sleep(0.001)
        assert (port.status.num_restarts, port.status.is_overdue) == (1, False)
        await port.aclose()

    asyncio.run(asyncio.wait_for(work(), 60))
    assert (limits[0], limits[1:]) == (None, [30.0, 60.0])


def test_health_fails_while_an_engine_is_overdue() -> None:
    class Away(ScriptedPort):
        is_overdue = True

        @property
        def status(self) -> EngineStatus:
            return EngineStatus(state="restarting", is_overdue=self.is_overdue)

    class Busy(Away):
        is_overdue = False

    class Bounded(Away):
        @property
        def status(self) -> EngineStatus:
            return EngineStatus(state="restarting", num_restarts=7, is_bounded=True)

    away, busy = ask(Away(), "/health"), ask(Busy(), "/health")
    assert (away.status, away.json()["error"]["code"]) == (503, "engine_failed")
    assert (busy.status, busy.json()) == (
        200,
        {"status": "ok", "engine": "restarting", "restarts": 0},
    )
    bounded = ask(Bounded(), "/health")
    assert (bounded.status, bounded.json()["restarts"]) == (200, 7)
    assert "its next start waits" in bounded.json()["warning"]
