"""A drafter's process as the engine sees it: its start, restarts, messages and end."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Lock, Thread, current_thread
from time import monotonic
from typing import BinaryIO

from outrider.core.clock import patience
from outrider.core.errors import DrafterError, OutriderError
from outrider.core.files import anonymous_file
from outrider.plugins.lanes.process.frames import TICK_SECONDS, Frame, Kind, Pipe, receive, send
from outrider.plugins.lanes.process.messages import Hello, read_failure
from outrider.plugins.lanes.process.options import ChildOptions
from outrider.plugins.lanes.process.shared import MemoryPipe, SharedProbs, message_memory, num_bytes

# -P: the user's working folder must not be a source of imports.
CHILD = (sys.executable, "-P", "-m", "outrider.plugins.lanes.process")
# Seconds that a process may take to end before it is killed.
GRACE_SECONDS = 2.0
_TAIL_BYTES = 4096


class WorkerLine:
    """One process from start to end. Raises OSError or MachineError if it cannot start.

    Frames are queued, which never waits, and then sent; so a thread that needs no answer does not
    wait while another thread sends. Only the thread that sends a request waits for an answer, and
    it holds no lock. The process must answer within the line's timeout, else it counts as hung and
    is killed: its later answer could be taken for the answer to another request.
    """

    def __init__(
        self, options: ChildOptions, *, timeout: float, command: Sequence[str] = CHILD
    ) -> None:
        self._timeout = timeout
        self._outbox: deque[Frame] = deque()
        self._sending = Lock()
        self._reason = ""
        self._socket, theirs = socket.socketpair()
        self._pipe: Pipe = self._socket
        self._memory: MemoryPipe | None = None
        files: list[int] = []
        # The output of the process is read when it has ended, for the reason.
        self._written: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - it lives with the line
        weakref.finalize(self, _close, self._socket, self._written)
        self._socket.settimeout(TICK_SECONDS)
        try:
            size = options.num_distributions, options.vocab_size
            files.append(anonymous_file("outrider-distributions", num_bytes(*size)))
            self.distributions = SharedProbs.over(files[0], *size)
            message_file = None if options.force_reference else message_memory()
            if message_file is not None:
                files.append(message_file)
                self._memory = MemoryPipe.over(message_file, rank=0)
            inherited = (theirs.fileno(), *files)
            self.process = subprocess.Popen(
                [*command, options.to_json(), *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=self._written,
                stderr=self._written,
                pass_fds=inherited,
                process_group=0,
            )
        finally:
            theirs.close()
            for file in files:
                os.close(file)

    def greet(self, timeout: float) -> Hello:
        """Wait for the process's HELLO. Raises OutriderError with its reason if it cannot serve, or
        OSError if it is gone or takes too long."""
        try:
            frame = self._receive(timeout)
        except TimeoutError as error:
            raise TimeoutError(f"it was not ready within {timeout:g} seconds") from error
        if frame.kind is Kind.FAILED:
            raise read_failure(frame.body)
        if frame.kind is not Kind.HELLO:
            raise DrafterError(f"it sent {frame.kind.name} instead of HELLO")
        hello = Hello.read(frame.body)
        if (hello.num_distributions, hello.vocab_size) != self.distributions.probs_LV.shape:
            raise DrafterError(
                f"its draft model has {hello.vocab_size} tokens, the target "
                f"{self.distributions.probs_LV.shape[1]}"
            )
        if hello.in_memory and self._memory is not None:
            self._pipe = self._memory
        return hello

    def queue(self, frames: Sequence[Frame]) -> None:
        self._outbox.extend(frames)

    def flush(self) -> None:
        """Send the queued frames, unless another thread is sending: then they go with its next
        ones. A broken line is dropped."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            self._send(self._timeout)
        except OSError as error:
            self.drop(error)
        finally:
            self._sending.release()

    def ask(self, num_new: int = 0) -> Frame:
        """Send the queued frames, the last of which is a request, and return its answer. `num_new`
        tokens of text that the process reads first extend the timeout.

        Raises OSError if there is no answer, DrafterError if it cannot be understood. The line must
        then be dropped.
        """
        seconds = patience(self._timeout, num_new)
        deadline = monotonic() + seconds
        try:
            with self._sending:
                self._send(self._timeout)
            return self._receive(max(deadline - monotonic(), 0.0))
        except TimeoutError as error:
            raise TimeoutError(f"it gave no answer within {seconds:g} seconds") from error

    def drop(self, error: Exception) -> None:
        """Kill the process, because of the first error given."""
        # If the process is gone already, its exit code says more.
        if not self._reason and not isinstance(error, ConnectionError):
            self._reason = str(error).rstrip(".")
        self.process.kill()

    def ended(self) -> None:
        """Free all waiting threads, since the process is gone."""
        if self._memory is not None:
            self._memory.end()

    def end(self) -> None:
        """Request the process to end; the thread that started it waits for that."""
        self.queue([Frame(Kind.EXIT)])
        self.flush()

    @property
    def why_ended(self) -> str:
        """The reason, as a sentence without a full stop, once the process is gone."""
        if self._reason:
            return self._reason
        code = self.process.returncode
        how = f"it was ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
        last = self._last_words()
        return f"{how}: {last}" if last else how

    def _last_words(self) -> str:
        size = self._written.seek(0, os.SEEK_END)
        self._written.seek(max(size - _TAIL_BYTES, 0))
        lines = self._written.read().decode(errors="replace").split("\n")
        return next((text.strip() for text in reversed(lines) if text.strip()), "")

    def _send(self, timeout: float) -> None:
        while self._outbox:
            send(self._pipe, self._outbox.popleft(), timeout)

    def _receive(self, timeout: float) -> Frame:
        frame = receive(self._pipe, timeout)
        if frame is None:
            raise ConnectionError("it ended")
        return frame


def _close(line: socket.socket, written: BinaryIO) -> None:
    line.close()
    written.close()


_KEPT_REASONS = 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """Seconds of restarts: the pause before the first one and the longest one, the lifetime after
    which the pauses start over, and the time limit for loading and compiling."""

    first: float = 0.25
    longest: float = 60.0
    steady: float = 60.0
    start: float = 300.0


class WorkerKeeper:
    """A keeper of a process. `launch` starts it on the keeper's thread, and again after each end.

    One thread waits for the process, so its end is noticed when it happens. A new process is
    started after a pause that doubles each time; a process that lived for long starts the pauses
    over. Meanwhile there is no line, and nothing is drafted.
    """

    def __init__(self, launch: Callable[[], WorkerLine], pace: RestartBackoff) -> None:
        self.reasons: deque[str] = deque(maxlen=_KEPT_REASONS)
        self.num_starts = 0
        self.num_ends = 0
        self.hello: Hello | None = None
        self._hint: str | None = None
        self._launch = launch
        self._pace = pace
        self._lock = Lock()
        self._started: WorkerLine | None = None
        self._ready: WorkerLine | None = None
        self._settled = Event()
        self._stopped = Event()
        self._thread = Thread(target=self._keep, name="drafter-keeper", daemon=True)
        self._thread.start()

    @property
    def line(self) -> WorkerLine | None:
        """The line to a process that is ready; None while there is none."""
        return self._ready

    def wait(self, timeout: float) -> None:
        """Wait for the first process. Raises DrafterError, and gives up, if it ended or is late."""
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
        """End the process and wait for its end; nothing is started again."""
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
        """Run one process to its end; return the reason."""
        try:
            line = self._launch()
        except (OSError, OutriderError) as error:
            self._hint = getattr(error, "hint", None)
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
        line.ended()
        self._ready = None
        with self._lock:
            self._started = None
        return line.why_ended
