"""The process: signals at safe points only, garbage collection, and memory that is given back.

Begun work is finished or undone before a signal's handler may raise. Python runs a handler, which
may raise KeyboardInterrupt or an alarm's TimeoutError, between any two bytecodes of the main
thread. Within `deferred` signals are only noted; `deliver`, or the end of the outermost `deferred`,
calls the handlers that were installed before. Within `breakable`, around code that may hang, a
signal that has waited for `PATIENCE_SECONDS` is handled at once, Ctrl-C when it comes a second
time; the interrupted work is then undone.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable, Generator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import get_ident
from time import monotonic, sleep
from types import FrameType
from typing import Any

PATIENCE_SECONDS = 2.0

# The functions of module `signal` make enums, which takes 30 times as long.
_native: Any = import_module("_signal")
_getsignal: Callable[[int], object] = _native.getsignal
_install: Callable[[int, object], object] = _native.signal

# Wakes a main thread that hangs; a program without a handler for it ignores it.
_WAKE = signal.SIGURG
# Python's handlers of faults and of `abort` come too late for a safe point.
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_NUMBERS = sorted(signal.valid_signals() - {_WAKE, *_FAULTS})


class _Broken(BaseException):
    """Carries an Exception of a handler past code that would catch it as its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class _Deferral:
    """State of deferred signals, one for the process. Only the main thread changes it, except for
    `is_watched`. `before` has the handlers that `note` replaces, `waiting` the time and frame of
    the first signal of each number, `forced` the error that a handler raised within `breakable`.
    `delivers` says that the end of the outermost `deferred` calls handlers."""

    depth: int = 0
    num_breakable: int = 0
    num_whole: int = 0
    before: dict[int, object] = field(default_factory=dict[int, object])
    waiting: dict[int, tuple[float, FrameType | None]] = field(
        default_factory=dict[int, tuple[float, FrameType | None]]
    )
    forced: BaseException | None = None
    is_watched: bool = False
    delivers: bool = True

    def take_over(self) -> None:
        """Install `note` for all signals with a handler in Python. asyncio's own do nothing."""
        for number in _NUMBERS:
            handler = _getsignal(number)
            if not callable(handler) or handler == self.note:
                continue
            if getattr(handler, "__module__", "") != "asyncio.unix_events":
                self.before[number] = handler
                _install(number, self.note)

    def put_back(self) -> None:
        """Install the former handlers, although each may raise as soon as it is installed."""
        try:
            self.depth = 0
            # The error holds the frames that it went through, and all that they hold.
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
        """The handler of signals within `deferred`."""
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

    def call_handlers(self) -> None:
        """Call the program's handlers of all signals that came, although one may raise."""
        try:
            while self.waiting:
                number = next(iter(self.waiting))
                _, frame = self.waiting.pop(number)
                self._call(number, frame)
        finally:
            if self.waiting:
                self.call_handlers()

    def _force(self) -> None:
        if not self.delivers:
            # Python would print what a handler raises. The wait ends, and the signals stay pending.
            self.forced = _Broken(InterruptedError())
            raise self.forced
        try:
            self.call_handlers()
        except Exception as error:  # noqa: BLE001 - a handler may be third-party code
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
        """Start a thread that checks whether the main thread hangs, as an alarm rings only once."""
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
        """Body of the thread, which runs until no signal waits."""
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
def deferred(*, delivers: bool = True) -> Generator[None]:
    """Defer signals: `deliver()`, or the end of the block, calls their handlers. In threads other
    than the main one this does nothing, nor to signals without a handler in Python. With `delivers`
    off, the next call that defers any calls the handlers: for a finalizer, where Python would only
    print an error of theirs."""
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
        _deferral.delivers = delivers
        _deferral.take_over()
        # From here on nothing can interrupt, and the handlers are put back in any case.
        _deferral.depth = 1
        try:
            yield
        finally:
            # Code that catches everything loses an error of a handler; libraries raise another one.
            if _deferral.forced is not None:
                raise _deferral.forced
    except _Broken as broken:
        error = broken.error
        if delivers:
            raise error from error.__cause__
    finally:
        try:
            _deferral.put_back()
        finally:
            if delivers:
                _deferral.call_handlers()


class breakable(ContextDecorator):  # noqa: N801 - every round enters several: no generator
    """A block that may hang, and all of whose work can be undone after a sudden end."""

    def __enter__(self) -> None:
        _deferral.num_breakable += _is_ours()

    def __exit__(self, *raised: object) -> None:
        _deferral.num_breakable -= _is_ours()


@dataclass(frozen=True, slots=True)
class WholeLock:
    """A lock for several changes that belong together: within `breakable` code all are made."""

    _lock: Any = field(default_factory=threading.RLock)

    def __enter__(self) -> None:
        _deferral.num_whole += _is_ours()
        self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
        _deferral.num_whole -= _is_ours()


def deliver() -> None:
    """Call the handlers of pending signals, if this is the outermost call that defers any. Raises
    what the program's own handlers raise: KeyboardInterrupt for Ctrl-C if it has none."""
    if _deferral.waiting and _deferral.depth == 1 and _is_ours():
        _deferral.call_handlers()


def is_interrupt(error: BaseException) -> bool:
    """True if `error` comes from a signal's handler, above all the user's Ctrl-C, and not from a
    callback that raised it by itself.

    Without deferred signals the two look alike, and any KeyboardInterrupt counts as Ctrl-C.
    """
    if not _is_ours():
        return False
    return error is _deferral.forced if _deferral.depth else isinstance(error, KeyboardInterrupt)


def _is_ours() -> bool:
    """True in the main thread: only it receives signals."""
    return get_ident() == _main


def _see_main_thread() -> None:
    global _main  # noqa: PLW0603 - a fork's main thread is the one that forked
    _main = get_ident()
    _deferral.is_watched = False


_main = threading.main_thread().ident
os.register_at_fork(after_in_child=_see_main_thread)


@contextmanager
def uncollected() -> Generator[None]:
    """Suspend garbage collection. A collection would walk all objects of torch, a tenth of a
    second, and free nothing. Also a decorator."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def keep_objects() -> None:
    """Leave all objects that there are now out of later garbage collections, for a process that
    only serves a model: a collection of torch's objects holds up all requests."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Return freed memory to the operating system; glibc's allocator would hold on to it."""
    # Imported here: help needs none.
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


_STATUS = Path("/proc/self/status")


def own_bytes(name: bytes) -> int | None:
    """The bytes behind `name` in the status of this process; None without /proc."""
    kilobytes = system_number(_STATUS, name)
    return None if kilobytes is None else 1024 * kilobytes


def system_number(path: Path, name: bytes) -> int | None:
    """The number behind `name` in a file of `name: number` or `name number` lines."""
    try:
        # An interrupt between opening a file and holding it would leave the file open.
        with deferred():
            data = path.read_bytes()
    except OSError:
        return None
    found = re.search(rb"^" + name + rb":?\s+(\d+)", data, re.MULTILINE)
    return int(found[1]) if found else None
