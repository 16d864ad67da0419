"""The server's handle of one engine process: it starts the process, reads its reports and ends it.

A process is considered hung if its job takes ten times as long as any job before it and at least
half a minute, or if it sends no report for that long. It is then ended by SIGABRT, on which it logs
the stack of every thread. The time limit for loading is the caller's (restarts.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process, create_subprocess_exec
from collections.abc import AsyncIterator
from contextlib import suppress
from time import monotonic

import msgspec

from outrider.core.errors import MachineError
from outrider.server.frames import (
    Command,
    Encoded,
    Load,
    Lost,
    Ready,
    Update,
    error_of,
    frame,
    read_report,
)
from outrider.server.port import EngineCard

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
        placement = msgspec.json.encode(load.placement).decode()
        with theirs:
            process = await create_subprocess_exec(
                *(sys.executable, "-m", "outrider.server.placed", str(theirs.fileno()), placement),
                stdin=asyncio.subprocess.DEVNULL,
                # Output of libraries goes to the log, not to the server's standard output.
                stdout=2,
                pass_fds=(theirs.fileno(),),
                # Signals of the terminal reach only the server, which ends the engine in order.
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(frame(load))
            async with asyncio.timeout(load_seconds):
                report = await read_report(reader)
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

    async def reports(self) -> AsyncIterator[Update | Encoded]:
        """Yield the process's reports until it ends; then make sure that it has ended."""
        watch = asyncio.ensure_future(self._watch())
        try:
            while True:
                report = await read_report(self._reader)
                if isinstance(report, Update):
                    self._note(report)
                elif not isinstance(report, Encoded):
                    return
                yield report
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
