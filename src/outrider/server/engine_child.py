"""The server's handle of one engine process: it starts the process, reads its reports and ends it.

A process is considered hung if its job takes ten times as long as any job before it and at least
half a minute, or if it sends no report for that long. It is then ended by SIGABRT, on which it logs
the stack of every thread. The time limit for loading is the caller's (`Restarts`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import Process, create_subprocess_exec
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import TypeVar

from outrider.core.errors import MachineError
from outrider.server.calls import Call
from outrider.server.port import (
    REPORTS,
    Command,
    EngineCard,
    Load,
    Lost,
    NotReadyError,
    Ready,
    Update,
    error_of,
    frame,
    received,
)

HANG_SECONDS = 30.0
_HANG_RATIO = 10.0
_WATCH_SECONDS = 1.0
_END_SECONDS = 15.0


class LoadHungError(MachineError):
    """A load that took longer than its limit."""


class EngineChild:
    """An engine process that has loaded its model."""

    def __init__(
        self,
        process: Process,
        card: EngineCard,
        ends: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        hang_seconds: float,
    ) -> None:
        self.card, self.process_id = card, process.pid
        self._process, self._hang_seconds = process, hang_seconds
        self._reader, self._writer = ends
        self._beat, self._is_ending = monotonic(), False
        # The duration of its job at the last report, and of the longest job that has ended.
        self._job_seconds, self._longest_job = 0.0, 0.0

    @classmethod
    async def started(
        cls, load: Load, *, hang_seconds: float = HANG_SECONDS, load_seconds: float | None = None
    ) -> EngineChild:
        """Start a process. Raises the errors of loading, MachineError if the process ends while it
        loads, and LoadHungError if loading takes more than `load_seconds`."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await create_subprocess_exec(
                *(sys.executable, "-m", "outrider.server.engine_process", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                # Output of libraries goes to the log, not to the server's standard output.
                stdout=2,
                pass_fds=(theirs.fileno(),),
                # Signals of the terminal reach only the server, which ends the engine in order.
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            if load.placement.cores and hasattr(os, "sched_setaffinity"):
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(process.pid, load.placement.cores)
            # The process imports PyTorch, which counts its cores, when it has read this frame.
            writer.write(frame(load))
            async with asyncio.timeout(load_seconds):
                report = await received(reader, REPORTS)
            if isinstance(report, Lost):
                raise error_of(report.error)
            if not isinstance(report, Ready):
                raise MachineError("the engine's process sent an unexpected message.")
            return cls(process, report.card, (reader, writer), hang_seconds)
        except BaseException as error:
            writer.close()
            _kill(process)
            status = await process.wait()
            if isinstance(error, TimeoutError):
                raise LoadHungError(
                    f"the engine's process had not loaded after {load_seconds:.0f} s.",
                    hint="is the disk that has the model slow, or the machine busy?",
                ) from None
            if isinstance(error, EOFError):
                raise MachineError(
                    f"the engine's process ended while it loaded ({_how(status)}).",
                    hint="less memory may help: --quantise int8, --context; its log is above",
                ) from None
            raise

    async def updates(self) -> AsyncIterator[Update]:
        """Yield the process's updates until it ends; then make sure that it has ended."""
        watch = asyncio.ensure_future(self._watch())
        try:
            while isinstance(update := await received(self._reader, REPORTS), Update):
                self._note(update)
                yield update
        except EOFError:
            return
        finally:
            watch.cancel()
            if not self._is_ending:
                self._writer.close()
                _kill(self._process)

    def send(self, command: Command) -> None:
        """Send a command; do nothing if the process has ended."""
        if not self._writer.is_closing():
            self._writer.write(frame(command))

    async def how_it_ended(self) -> str:
        return _how(await self._process.wait())

    def kill(self) -> None:
        _kill(self._process)

    def abort(self) -> None:
        """End the process by SIGABRT, on which it logs the stacks of its threads."""
        _signal(self._process, signal.SIGABRT)

    async def end(self) -> None:
        """Close the connection, which ends the process in order; kill it if that takes too long."""
        self._is_ending = True
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), _END_SECONDS)
        except TimeoutError:
            _kill(self._process)
            await self._process.wait()

    def _note(self, update: Update) -> None:
        if update.job_seconds < self._job_seconds:
            self._longest_job = max(self._longest_job, self._job_seconds)
        self._job_seconds, self._beat = update.job_seconds, monotonic()

    @property
    def _limit(self) -> float:
        return max(self._hang_seconds, _HANG_RATIO * self._longest_job)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if max(self._job_seconds, monotonic() - self._beat) > self._limit:
                _signal(self._process, signal.SIGABRT)
                await asyncio.sleep(_WATCH_SECONDS)
                _kill(self._process)
                return


def _kill(process: Process) -> None:
    _signal(process, signal.SIGKILL)


def _signal(process: Process, number: signal.Signals) -> None:
    # Not by the methods of Process: they wait for the process themselves, and asyncio's own
    # watcher would then miss its end.
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _how(status: int) -> str:
    """Describe an exit status in words."""
    if status < 0:
        known = {one.value for one in signal.Signals}
        return signal.Signals(-status).name if -status in known else f"signal {-status}"
    return f"status {os.waitstatus_to_exitcode(status << 8)}"


# With more failures of its own within this time, the engine is given up.
MOST_ENDS, ENDS_SECONDS = 5, 600.0
# With more starts within this time, further starts wait, whatever their reason.
MOST_STARTS, STARTS_SECONDS = 6, 60.0
_PAUSE_SECONDS, _LOAD_RATIO = 0.1, 3.0
# Limits for restarts of an engine's process: how many, how often, and how long each may take.
#
# If an engine crashes while requests run, a request is considered the cause (`Blame`). Such
# crashes only limit the number of starts per minute. The engine itself is the cause if it crashes
# without requests or does not start; after too many of these failures it is given up.
#
# The first load has no time limit. Later ones have one, because a process that hangs while it loads
# sends no report: three times the longest load so far, doubled after each load that hung.
# An engine is overdue after this many time limits of a load: enough for a load that hangs and the
# next try.
_OVERDUE_LOADS = 4.0


class Restarts:
    """Starts and failures of one engine. `least_seconds` is the least time limit of a load."""

    def __init__(self, least_seconds: float) -> None:
        self._least_seconds = least_seconds
        self._starts, self._ends = deque[float](), deque[float]()
        self._longest_load, self._num_hung = 0.0, 0
        self._lost_at: float | None = None
        self.num = 0

    @property
    def load_seconds(self) -> float | None:
        """The time limit of the next load; None before the first load has ended."""
        return self._limit * 2**self._num_hung if self._longest_load else None

    @property
    def is_overdue(self) -> bool:
        """True if the engine is away for longer than a restart should take."""
        return self._lost_at is not None and (
            monotonic() - self._lost_at > _OVERDUE_LOADS * self._limit
        )

    @property
    def is_bounded(self) -> bool:
        """True if the next start must wait because there were too many within a minute."""
        return len(_since(self._starts, STARTS_SECONDS)) >= MOST_STARTS

    def lost(self, *, is_own: bool) -> None:
        """Note that the engine has ended. `is_own` means that no request ran in it."""
        self.num += 1
        self._lost_at = monotonic()
        if is_own:
            self._ends.append(self._lost_at)

    def failed(self) -> None:
        """Note that a start has failed."""
        self._ends.append(monotonic())

    def hung(self) -> None:
        """Note that a load was stopped at its time limit."""
        self._num_hung += 1

    def loaded(self, seconds: float) -> None:
        """Note that the engine has loaded."""
        self._longest_load = max(self._longest_load, seconds)
        self._num_hung, self._lost_at = 0, None

    async def pause(self) -> None:
        """Wait before a start: not at all the first time, then longer each time. Raises
        NotReadyError after too many failures of the engine itself."""
        if len(_since(self._ends, ENDS_SECONDS)) > MOST_ENDS:
            raise NotReadyError("failed")
        starts = _since(self._starts, STARTS_SECONDS)
        if self.is_bounded:
            seconds = starts[-MOST_STARTS] + STARTS_SECONDS - monotonic()
        else:
            seconds = _PAUSE_SECONDS * 2 ** len(starts) if starts else 0.0
        await asyncio.sleep(seconds)
        starts.append(monotonic())

    @property
    def _limit(self) -> float:
        return max(self._least_seconds, _LOAD_RATIO * self._longest_load)


def _since(times: deque[float], seconds: float) -> deque[float]:
    """Drop the times that are more than `seconds` ago; return `times`."""
    while times and monotonic() - times[0] > seconds:
        times.popleft()
    return times


# Quarantine: after a request's second crash of an engine, the request and its like are refused.
#
# Several engines of one model share this knowledge, so that such a request does not crash them all.
# The same holds for prompts that crash a process while it encodes them.
_LOG = logging.getLogger(__name__)
# The points that a crash adds to a request in flight: if it has written tokens since it was
# submitted (the requests share these points), if it has written none, and if it is certainly the
# cause. The last number is the sum of points at which a request is refused.
_PROVEN, _UNPROVEN, _CERTAIN, _KEPT_OUT = 1, 3, 3, 6
_MOST_KNOWN = 1_000
T = TypeVar("T")


class Blame:
    """Crash points by kind of call. The kinds in `kept_out` are refused from now on."""

    def __init__(self) -> None:
        # For calls that have not completed since: points from crashes before their first token,
        # and from later crashes.
        self._blamed: dict[bytes, tuple[int, float]] = {}
        self.kept_out: dict[bytes, None] = {}

    def add(self, sent: Sequence[Call], *, is_certain: bool) -> None:
        """Count a crash against the calls in flight, even if their clients left: these may repeat
        them. `is_certain` means that a request was alone and will not be tried again."""
        # A call that was not answered at all is the likelier cause.
        unproven = {call.kind for call in sent if not call.is_proven}
        for kind in unproven.union(call.kind for call in sent):
            early, late = self._blamed.get(kind, (0, 0))
            if kind in unproven:
                early += _UNPROVEN
            else:
                late += _CERTAIN if is_certain else _PROVEN / len(sent)
            _remember(self._blamed, kind, (early, late))
            if early + late >= _KEPT_OUT:
                del self._blamed[kind]
                _LOG.error("a request with which the engine ended twice is kept out from now on")
                _remember(self.kept_out, kind, None)

    def knows(self, call: Call) -> bool:
        """Return whether a process ended with a call of this kind, and none has completed since."""
        return bool(self._blamed) and call.kind in self._blamed

    def refuses(self, call: Call) -> bool:
        return bool(self.kept_out) and call.kind in self.kept_out

    def prove(self, call: Call) -> None:
        """Clear the early points of a call that has been answered in part."""
        if self.knows(call):
            self._blamed[call.kind] = 0, self._blamed[call.kind][1]

    def clear(self, call: Call) -> None:
        """Clear all points of a call that has completed."""
        if self.knows(call):
            del self._blamed[call.kind]


def _remember(known: dict[bytes, T], kind: bytes, value: T) -> None:
    known[kind] = value
    if len(known) > _MOST_KNOWN:
        del known[next(iter(known))]
