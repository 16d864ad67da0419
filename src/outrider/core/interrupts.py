"""Ctrl-C at safe points only: begun work is finished or undone before KeyboardInterrupt is raised.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. Within `deferred` the
signal is only noted; `deliver`, or the end of the outermost `deferred`, hands it to the handler
that was installed before. Within `breakable`, around code that may hang, a second Ctrl-C is raised
at once if the first one has waited for `PATIENCE_SECONDS`; the interrupted work is then undone.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass
from threading import get_ident
from time import monotonic
from types import FrameType

PATIENCE_SECONDS = 2.0

_Handler = Callable[[int, FrameType | None], object]


@dataclass(slots=True)
class _Deferral:
    """Of the one process that this is. Only the main thread reads or changes it. `first` is when
    the first signal came that was not told, `forced` what one raised that was told at once."""

    depth: int = 0
    num_breakable: int = 0
    before: _Handler | None = None
    first: float | None = None
    frame: FrameType | None = None
    forced: BaseException | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler within `deferred`."""
        del number
        if self.first is None:
            self.first, self.frame = monotonic(), frame
        elif self.num_breakable and monotonic() - self.first >= PATIENCE_SECONDS:
            try:
                self.tell()
            except BaseException as error:
                self.forced = error
                raise

    def tell(self) -> None:
        """Call the program's handler if a signal came."""
        if self.first is None or self.before is None:
            return
        frame, self.first, self.frame = self.frame, None, None
        self.before(signal.SIGINT, frame)


_deferral = _Deferral()


@contextmanager
def deferred(*, told: bool = True) -> Generator[None]:
    """Interrupts within are told by `deliver`, or at the end; in other threads than the main one,
    and where SIGINT is not Python's to handle, this does nothing. Where it is ignored there are
    none. Without `told` those within are told by the next call that defers any: of a finalizer
    Python would only print what it raises."""
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
    before = signal.getsignal(signal.SIGINT)
    if before is None:
        yield
        return
    note, handler = _deferral.note, before if callable(before) else None
    _deferral.before, _deferral.forced, _deferral.num_breakable = handler, None, 0
    if handler is not None:
        signal.signal(signal.SIGINT, note)
    # From here on nothing can come between, and the handler is put back whatever happens.
    try:
        _deferral.depth = 1
        yield
    finally:
        _deferral.depth = 0
        # It holds the frames that it went through, and all that they hold.
        _deferral.forced = None
        if signal.getsignal(signal.SIGINT) == note:
            signal.signal(signal.SIGINT, before)
        if told:
            _deferral.tell()


class breakable(ContextDecorator):  # noqa: N801 - every round enters several: no generator
    """Code that may hang, after whose sudden end all that it began can be undone."""

    def __enter__(self) -> None:
        _deferral.num_breakable += _is_ours()

    def __exit__(self, *raised: object) -> None:
        _deferral.num_breakable -= _is_ours()


def deliver() -> None:
    """Tell an interrupt that was noted, if this is the outermost call that defers any: raises what
    the program's own handler raises, which is KeyboardInterrupt if it has none."""
    if _deferral.first is not None and _deferral.depth == 1 and _is_ours():
        _deferral.tell()


def is_interrupt(error: BaseException) -> bool:
    """Whether `error` is the user's Ctrl-C, and not something that a callback raised by itself.

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


_main = threading.main_thread().ident
os.register_at_fork(after_in_child=_see_main_thread)
