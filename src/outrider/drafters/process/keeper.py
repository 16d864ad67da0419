"""Keeps a drafter's process running: starts it, notices its end, starts it again.

One thread waits for the process, so its end is noticed when it happens and not when it is next
asked. A new one is started after a pause that doubles each time, so a process that cannot live
takes ever less of the machine; one that lived for long starts the pauses over. Meanwhile there is
no line, and nothing is drafted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Lock, Thread, current_thread
from time import monotonic

from outrider.core.errors import DrafterError, OutriderError
from outrider.drafters.process.line import GRACE_SECONDS, Line
from outrider.drafters.process.messages import Hello

_KEPT_REASONS = 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: the pause before the first restart and the longest one, how long a process must have
    lived for the pauses to start over, and how long one may take to load."""

    first: float = 0.25
    longest: float = 60.0
    steady: float = 60.0
    start: float = 120.0


class Keeper:
    """`launch` starts a process; it is called on the keeper's thread, again after each end."""

    def __init__(self, launch: Callable[[], Line], pace: Pace) -> None:
        self.reasons: deque[str] = deque(maxlen=_KEPT_REASONS)
        self.num_starts = 0
        self.num_ends = 0
        self.hello: Hello | None = None
        self._hint: str | None = None
        self._launch = launch
        self._pace = pace
        self._lock = Lock()
        self._started: Line | None = None
        self._ready: Line | None = None
        self._settled = Event()
        self._stopped = Event()
        self._thread = Thread(target=self._keep, name="drafter-keeper", daemon=True)
        self._thread.start()

    @property
    def line(self) -> Line | None:
        """To a process that is ready; None while there is none."""
        return self._ready

    def wait(self, timeout: float) -> None:
        """Until the first process is ready. Raises DrafterError, and gives up, if it ended or took
        too long."""
        self._settled.wait(timeout)
        if self.num_starts:
            return
        self.stop()
        late = f"it was not ready within {timeout:g} seconds"
        reason = self.reasons[0] if self.reasons else late
        raise DrafterError(
            f"the drafter's process did not start: {reason}.",
            hint=self._hint or "run the drafter inside the engine: --drafter-home thread",
        )

    def stop(self) -> None:
        """End the process and wait for that; nothing is started again."""
        self._stopped.set()
        with self._lock:
            line = self._started
        if line is not None:
            if line is self._ready:
                line.end()
                self._join()
            line.process.kill()
        self._join()

    def _join(self) -> None:
        # The last reference to a drafter may be dropped by any thread.
        if current_thread() is not self._thread:
            self._thread.join(GRACE_SECONDS)

    def _keep(self) -> None:
        pause = self._pace.first
        while not self._stopped.is_set():
            began = monotonic()
            reason = self._one()
            self._ready = None
            if not self._stopped.is_set():
                if monotonic() - began >= self._pace.steady:
                    pause = self._pace.first
                self.num_ends += 1
                self.reasons.append(reason)
                _log.warning(
                    "The drafter's process is gone (%s); nothing is drafted until it is started "
                    "again in %.2g seconds.",
                    reason,
                    pause,
                )
            self._settled.set()
            self._stopped.wait(pause)
            pause = min(2 * pause, self._pace.longest)

    def _one(self) -> str:
        """Run one process to its end; why it ended."""
        try:
            line = self._launch()
        except OSError as error:
            return str(error)
        with self._lock:
            self._started = line
        if self._stopped.is_set():
            line.process.kill()
        try:
            self.hello = line.greet(self._pace.start)
        except (OSError, OutriderError) as error:
            self._hint = getattr(error, "hint", None)
            line.drop(error)
        else:
            self.num_starts += 1
            self._ready = line
            self._settled.set()
            _log.info("The drafter's process %d is ready.", line.process.pid)
        line.process.wait()
        self._ready = None
        with self._lock:
            self._started = None
        return line.why_ended
