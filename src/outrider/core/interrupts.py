"""Signals at safe points only: begun work is finished or undone before a handler may raise.

Python runs a handler, which may raise KeyboardInterrupt or an alarm's TimeoutError, between any two
bytecodes of the main thread. Within `deferred` signals are only noted; `deliver`, or the end of the
outermost `deferred`, hands them to the handlers that were installed before. Within `breakable`,
around code that may hang, signals that have waited for `PATIENCE_SECONDS` are handed over at once,
Ctrl-C when it comes a second time; the interrupted work is then undone.
"""

from __future__ import annotations

import os
import signal
import threading
from _thread import start_new_thread
from collections.abc import Callable, Generator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from threading import get_ident
from time import monotonic, sleep
from types import FrameType
from typing import Any

PATIENCE_SECONDS = 2.0

# Those of `signal` make enums, which takes 30 times as long.
_native: Any = import_module("_signal")
_getsignal: Callable[[int], object] = _native.getsignal
_install: Callable[[int, object], object] = _native.signal

# Wakes a main thread that hangs: whoever has no handler for it ignores it.
_WAKE = signal.SIGURG
# Python's handlers of faults and of `abort` come too late for a safe point.
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_NUMBERS = sorted(signal.valid_signals() - {_WAKE, *_FAULTS})


class _Broken(BaseException):
    """Carries an Exception of a handler past code that would take it for its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class _Deferral:
    """Of the one process that this is. Only the main thread changes it, but for `is_watched`.
    `before` has the handlers that `note` stands in for, `waiting` when the first signal of a number
    came and where, `forced` what a handler raised within `breakable`, `is_told` whether the end of
    the outermost `deferred` calls handlers."""

    depth: int = 0
    num_breakable: int = 0
    num_whole: int = 0
    before: dict[int, object] = field(default_factory=dict[int, object])
    waiting: dict[int, tuple[float, FrameType | None]] = field(
        default_factory=dict[int, tuple[float, FrameType | None]]
    )
    forced: BaseException | None = None
    is_watched: bool = False
    is_told: bool = True

    def take_over(self) -> None:
        """Install `note` for all that has a handler in Python. asyncio's own do nothing."""
        for number in _NUMBERS:
            handler = _getsignal(number)
            if not callable(handler) or handler == self.note:
                continue
            if getattr(handler, "__module__", "") != "asyncio.unix_events":
                self.before[number] = handler
                _install(number, self.note)

    def put_back(self) -> None:
        """Install the handlers of before, although each may raise as soon as it is installed."""
        try:
            self.depth = 0
            # It holds the frames that it went through, and all that they hold.
            self.forced = None
            while self.before:
                number = next(iter(self.before))
                if _getsignal(number) == self.note:
                    _install(number, self.before[number])
                self.before.pop(number, None)
        finally:
            if self.before:
                self.put_back()

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler within `deferred`."""
        if not self.depth:
            self._call(number, frame)
            return
        if number != _WAKE:
            is_new = number not in self.waiting
            self.waiting.setdefault(number, (monotonic(), frame))
            if number != signal.SIGINT:
                self._watch()
            if is_new:
                return
        first = min((first for first, _ in self.waiting.values()), default=monotonic())
        may_break = self.num_breakable and not self.num_whole
        if may_break and self.waiting and monotonic() - first >= PATIENCE_SECONDS:
            self._force()

    def tell(self) -> None:
        """Call the program's handlers of signals that came, all, although one may raise."""
        try:
            while self.waiting:
                number = next(iter(self.waiting))
                _, frame = self.waiting.pop(number)
                self._call(number, frame)
        finally:
            if self.waiting:
                self.tell()

    def _force(self) -> None:
        if not self.is_told:
            # Python would print what a handler raises. The wait ends, the signals go on waiting.
            self.forced = _Broken(InterruptedError())
            raise self.forced
        try:
            self.tell()
        except Exception as error:  # noqa: BLE001 - a handler may be anybody's code
            self.forced = _Broken(error)
            raise self.forced from None
        except BaseException as error:
            self.forced = error
            raise

    def _call(self, number: int, frame: FrameType | None) -> None:
        handler = self.before.get(number) or _getsignal(number)
        if callable(handler) and handler != self.note:
            handler(number, frame)

    def _watch(self) -> None:
        """An alarm rings once: have a thread look whether the main thread hangs."""
        if _WAKE not in self.before:
            handler = _getsignal(_WAKE)
            if handler is None or callable(handler):
                return
            self.before[_WAKE] = handler
            _install(_WAKE, self.note)
        if not self.is_watched:
            self.is_watched = True
            try:
                start_new_thread(self._wake, (get_ident(),))
            except RuntimeError:
                self.is_watched = False

    def _wake(self, main: int) -> None:
        """The thread: until nothing waits."""
        while True:
            sleep(PATIENCE_SECONDS)
            # In this order no signal that comes now is left without a thread.
            self.is_watched = False
            if not (self.waiting and self.depth):
                return
            self.is_watched = True
            signal.pthread_kill(main, _WAKE)


_deferral = _Deferral()


@contextmanager
def deferred(*, told: bool = True) -> Generator[None]:
    """Signals within are told by `deliver`, or at the end; in other threads than the main one this
    does nothing, nor to signals without a handler in Python. Without `told` those within are told
    by the next call that defers any: of a finalizer Python would only print what it raises."""
    if not _is_ours():
        yield
        return
    if _deferral.depth:
        _deferral.depth += 1
        try:
            yield
        finally:
            _deferral.depth -= 1
        return
    try:
        _deferral.num_breakable = _deferral.num_whole = 0
        _deferral.is_told = told
        _deferral.take_over()
        # From here on nothing can come between, and the handlers are put back whatever happens.
        _deferral.depth = 1
        try:
            yield
        finally:
            # Masks that catch everything lose what is raised within; libraries raise another error.
            if _deferral.forced is not None:
                raise _deferral.forced
    except _Broken as broken:
        error = broken.error
        if told:
            raise error from error.__cause__
    finally:
        try:
            _deferral.put_back()
        finally:
            if told:
                _deferral.tell()


class breakable(ContextDecorator):  # noqa: N801 - every round enters several: no generator
    """Code that may hang, after whose sudden end all that it began can be undone."""

    def __enter__(self) -> None:
        _deferral.num_breakable += _is_ours()

    def __exit__(self, *raised: object) -> None:
        _deferral.num_breakable -= _is_ours()


@dataclass(frozen=True, slots=True)
class WholeLock:
    """A lock for several changes that belong together: also where code is breakable, none of them
    is left out."""

    _lock: Any = field(default_factory=threading.RLock)

    def __enter__(self) -> None:
        _deferral.num_whole += _is_ours()
        self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
        _deferral.num_whole -= _is_ours()


def deliver() -> None:
    """Tell signals that were noted, if this is the outermost call that defers any: raises what the
    program's own handlers raise, which is KeyboardInterrupt for Ctrl-C if it has none."""
    if _deferral.waiting and _deferral.depth == 1 and _is_ours():
        _deferral.tell()


def is_interrupt(error: BaseException) -> bool:
    """Whether `error` comes from a signal's handler, the user's Ctrl-C above all, and not from a
    callback that raised it by itself.

    Where none are deferred it cannot be known, and a KeyboardInterrupt is taken for one.
    """
    if not _is_ours():
        return False
    return error is _deferral.forced if _deferral.depth else isinstance(error, KeyboardInterrupt)


def _is_ours() -> bool:
    """Signals come to the main thread alone."""
    return get_ident() == _main


def _see_main_thread() -> None:
    global _main  # noqa: PLW0603 - a fork's main thread is the one that forked
    _main = get_ident()
    _deferral.is_watched = False


_main = threading.main_thread().ident
os.register_at_fork(after_in_child=_see_main_thread)
