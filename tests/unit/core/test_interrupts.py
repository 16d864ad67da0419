"""Handlers of signals wait within `deferred`, and are as they were behind it."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

import pytest

from outrider.core import process
from outrider.core.process import deferred, deliver, is_interrupt

NUMBERS = (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGPROF, signal.SIGRTMIN + 1)


class RungError(Exception):
    """The argument is the signal's number."""


def ring(number: int, _frame: FrameType | None) -> None:
    raise RungError(number)


@pytest.fixture(autouse=True)
def _raising() -> Iterator[None]:
    before = {number: signal.signal(number, ring) for number in NUMBERS}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def is_clean() -> bool:
    state = process._deferral  # pyright: ignore[reportPrivateUsage]
    handlers = {signal.getsignal(number) for number in NUMBERS}
    return handlers == {ring} and not (state.depth or state.before or state.waiting)


@pytest.mark.parametrize("number", NUMBERS)
def test_what_a_handler_raises_comes_at_the_end(number: int) -> None:
    ended: list[bool] = []
    with pytest.raises(RungError, match=str(number)), deferred():
        ended.append(signal.raise_signal(number) is None)
    assert ended == [True]
    assert is_clean()


def test_a_signal_is_told_once_between_jobs() -> None:
    with deferred():
        signal.raise_signal(signal.SIGUSR1)
        with deferred():
            deliver()
        with pytest.raises(RungError):
            deliver()
        deliver()
    assert is_clean()


def test_every_signal_is_told_although_one_handler_raises() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    with pytest.raises(RungError), deferred():
        deque(map(signal.raise_signal, (signal.SIGUSR1, signal.SIGTERM)))
    assert heard == [signal.SIGTERM]


def test_a_handler_that_is_set_within_stays() -> None:
    with deferred():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_handlers_of_an_event_loop_are_left_alone() -> None:
    """To install one again would change whether system calls are restarted."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, lambda: None)
        before = signal.getsignal(signal.SIGUSR2)
        with deferred():
            assert signal.getsignal(signal.SIGUSR2) is before
        loop.remove_signal_handler(signal.SIGUSR2)

    asyncio.run(main())


@pytest.mark.parametrize("rings_again", [False, True])
def test_what_waits_for_long_breaks_off_what_hangs(
    rings_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By no Exception, which what hangs could take for its own."""
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.0 if rings_again else 0.02)

    def hang() -> None:
        with process.breakable():
            signal.raise_signal(signal.SIGUSR1)
            while True:
                with suppress(Exception):
                    if rings_again:
                        signal.raise_signal(signal.SIGUSR1)

    def hang_within() -> None:
        try:
            hang()
        except BaseException as error:
            known.append(is_interrupt(error))
            raise

    known: list[bool] = []
    with pytest.raises(RungError), deferred():
        hang_within()
    assert known == [True]
    assert is_clean()
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL


@pytest.mark.parametrize("instead", [None, OSError("of a library")])
def test_what_broke_off_is_raised_where_it_was_lost(
    instead: OSError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a library raises an error of its own instead."""
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.0)

    def lose() -> None:
        with suppress(BaseException), process.breakable():
            while True:
                signal.raise_signal(signal.SIGUSR1)
        if instead is not None:
            raise instead

    with pytest.raises(RungError), deferred():
        lose()
    assert is_clean()


def test_what_waits_for_long_breaks_off_a_finalizer_and_is_told_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Raised in a finalizer, it would be printed and lost."""
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.0)
    ended: list[bool] = []
    with deferred(delivers=False):
        try:
            with process.breakable():
                while True:
                    signal.raise_signal(signal.SIGUSR1)
        except BaseException as error:
            ended.append(is_interrupt(error))
            raise
    assert ended == [True]
    with pytest.raises(RungError, match=str(int(signal.SIGUSR1))), deferred():
        ended.clear()
    assert not ended
    assert is_clean()


def test_alarms_between_any_two_bytecodes_leave_the_handlers_as_they_were() -> None:
    moments, num_rung, entered = random.Random(3), 0, 0
    for _ in range(1500):
        with suppress(RungError):
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 6e-5))
                for _ in range(4):
                    with deferred():
                        entered += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
            except RungError:
                num_rung += 1
        assert is_clean()
    assert num_rung > 20
    assert entered > 20
