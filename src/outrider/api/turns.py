"""One engine for callers in any thread: callers take turns, and a turn is one engine job.

Two callers must never be inside the engine at once. Turns are granted in the order of requests, and
each turn drives the requests of all callers, so threads that generate at the same time share
passes. Three calls would wait for ever and are refused: a callback that calls back into the engine
that runs it, a signal handler whose thread waits for a turn, and a forked child, which has no
threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from threading import Condition, Lock, get_ident
from typing import NoReturn

from outrider.core.errors import ConfigError, MachineError, within_memory
from outrider.core.interrupts import deferred, deliver

# Interval at which a main thread that waits for its turn checks for Ctrl-C.
_LOOK_SECONDS = 0.1


class OfOneProcess:
    """Base of objects with threads, locks and mapped memory of the process that made them."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """Called by pickle and by copy. Raises MachineError."""
        name = type(self).__name__
        raise MachineError(
            f"this {name} cannot be copied or sent to another process: its weights, memory and "
            "threads belong to the process that made it.",
            hint="send the model's name and options, and make the LLM in the process that uses it, "
            "once; for many processes `outrider serve` has one LLM",
        )


class Turns:
    """The order of the callers of one engine, which belongs to the process that made it. `is_lane`
    returns True if the calling thread runs jobs of that engine."""

    def __init__(self, is_lane: Callable[[], bool] = lambda: False) -> None:
        self._process = os.getpid()
        self._is_lane = is_lane
        self._lock = Lock()
        self._changed = Condition(self._lock)
        # The first one has the turn.
        self._callers: deque[object] = deque()
        self._threads: set[int] = set()

    @contextmanager
    def call(self) -> Generator[None]:
        """A call of the engine's owner: Ctrl-C is handled between its turns, or at its end. Raises
        the errors of `check`, and CapacityError if memory ends."""
        self.check()
        with within_memory("answering"), deferred():
            yield

    def check(self) -> None:
        """Raises MachineError in a forked child, ConfigError within a turn of the same thread."""
        if not self.at_home:
            raise MachineError(
                f"this LLM was made by process {self._process} and cannot be used in its fork "
                f"{os.getpid()}, which has none of its threads.",
                hint="make the LLM in the process that uses it: start that with multiprocessing's "
                '"spawn", or fork before the LLM is made',
            )
        if self.in_turn:
            raise ConfigError(
                "a callback called the LLM that runs it, which is in the midst of a job.",
                hint="let masks, observers and handlers of signals return, and call the LLM "
                "between its own calls",
            )

    @property
    def at_home(self) -> bool:
        """True in the process that made it."""
        return os.getpid() == self._process

    @property
    def in_turn(self) -> bool:
        """True if the calling thread has the turn, waits for it, or runs a job of its holder."""
        return get_ident() in self._threads or self._is_lane()

    def turn(self, *, now: bool = False) -> AbstractContextManager[bool]:
        """Keep others out of the engine, once it is free. Yields True if the turn was granted.

        With `now` it is granted only if no caller has or wants it: a finalizer, which may run in
        any thread, at any time and in a forked child, must not wait.
        """
        return self._turn_now() if now else _Turn(self)

    @contextmanager
    def _turn_now(self) -> Generator[bool]:
        with deferred(delivers=False):
            if not self._try():
                yield False
                return
            self._threads.add(get_ident())
            try:
                yield True
            finally:
                self.pass_on()

    def take(self) -> None:
        """Wait for a turn, and hold it until `pass_on`."""
        self._threads.add(get_ident())
        try:
            self._wait()
        except BaseException:
            self._threads.discard(get_ident())
            raise

    def _wait(self) -> None:
        me = object()
        with self._lock:
            self._callers.append(me)
            if len(self._callers) == 1:
                return
        try:
            while not self._is_first(me):
                # No other caller waits while a handler runs here.
                deliver()
        except BaseException:
            with self._changed:
                self._callers.remove(me)
                self._changed.notify_all()
            raise

    def _is_first(self, caller: object) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._callers[0] is caller, _LOOK_SECONDS)

    def _try(self) -> bool:
        # The collector may run within `_wait`, or in a lane, which would wait for itself.
        if not self.at_home or self.in_turn or not self._changed.acquire(blocking=False):
            return False
        try:
            if self._callers:
                return False
            self._callers.append(object())
            return True
        finally:
            self._changed.release()

    def pass_on(self) -> None:
        """Pass the turn to the caller that has waited longest."""
        self._threads.discard(get_ident())
        with self._lock:
            self._callers.popleft()
            if self._callers:
                self._changed.notify_all()


class _Turn(AbstractContextManager[bool]):
    """One turn of the calling thread. Every job has one, so this is no generator."""

    __slots__ = ("_turns",)

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> bool:
        self._turns.take()
        return True

    def __exit__(self, *raised: object) -> None:
        self._turns.pass_on()
