"""When a process counts as hung: its job takes too long, or it says nothing; a busy one is not."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from doubles.clocks import FakeClock
from doubles.scripted_port import CARD
from outrider.server import engine_child
from outrider.server.engine_child import EngineChild
from outrider.server.port import EngineStatus, Update, frame

Passes = Callable[[float, float | None], Coroutine[Any, Any, list[int]]]
READY = EngineStatus(state="ready")


class NoProcess:
    """It only hears signals."""

    pid, returncode = 1, None


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Runs `work` with a function that lets so many seconds pass, and then tells of a job of so
    many or of nothing. Both have the signals that were sent."""

    def watched(work: Callable[..., Coroutine[Any, Any, None]]) -> list[int]:
        clock, heard = FakeClock(), list[int]()

        def signalled(_process: object, number: signal.Signals) -> None:
            heard.append(number)

        monkeypatch.setattr(engine_child, "monotonic", clock)
        monkeypatch.setattr(engine_child, "_WATCH_SECONDS", 0.0)
        monkeypatch.setattr(engine_child, "_signal", signalled)

        async def main() -> None:
            ours, theirs = socket.socketpair()
            ends = await asyncio.open_connection(sock=ours)
            child = EngineChild(cast("Any", NoProcess()), CARD, ends, 30.0)

            async def read() -> None:
                async for _ in child.updates():
                    told.set()

            told = asyncio.Event()
            reading = asyncio.ensure_future(read())

            async def passes(seconds: float, job_seconds: float | None) -> list[int]:
                clock.advance(seconds)
                if job_seconds is not None:
                    told.clear()
                    theirs.sendall(frame(Update([], READY, job_seconds)))
                    await told.wait()
                for _ in range(5):
                    await asyncio.sleep(0)
                return heard

            await work(passes)
            theirs.close()
            await asyncio.wait_for(reading, 20)

        asyncio.run(main())
        return [number for number in heard if number != signal.SIGKILL]

    return watched


def test_a_job_of_half_a_minute_is_a_hang(watched: Callable[..., list[int]]) -> None:
    async def work(passes: Passes) -> None:
        for job_seconds in range(0, 31, 2):
            assert not await passes(2, float(job_seconds))
        await passes(2, 32.0)

    assert watched(work) == [signal.SIGABRT]


def test_silence_of_half_a_minute_is_a_hang(watched: Callable[..., list[int]]) -> None:
    async def work(passes: Passes) -> None:
        await passes(1, 0.0)
        await passes(31, None)

    assert watched(work) == [signal.SIGABRT]


def test_many_jobs_and_long_ones_among_long_ones_are_none(
    watched: Callable[..., list[int]],
) -> None:
    async def work(passes: Passes) -> None:
        for _ in range(100):
            await passes(29, 0.5)
        # A job of 20 seconds came to its end, so one may take 200.
        await passes(1, 20.0)
        await passes(1, 0.0)
        for job_seconds in range(0, 190, 10):
            await passes(10, float(job_seconds))

    assert watched(work) == []
