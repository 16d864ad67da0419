"""The driver's end of a peer: a process that answers JSON lines, and whose CPU time is known.

While a peer is timed all others wait. That they do, and how much of the machine strangers used, is
measured: CPU time is read for the whole tree of processes before and after every run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from outrider.core.errors import ContractError
from outrider.core.files import FileKind, read_bytes
from outrider.plugins.measure.turns import cpu_seconds

# One request of a big model on a small machine.
LIMIT_SECONDS = 900.0
_CLOSE_SECONDS = 20.0
_HURRY_SECONDS = 1.0


class PeerError(Exception):
    """A peer refused, died or hung; the text says what the user may do."""


class Asked(Protocol):
    """What a match needs of a peer: answers, and whose CPU time counts as its own."""

    @property
    def pid(self) -> int: ...
    def ask(self, do: str, **request: Any) -> dict[str, Any]: ...


class Peer:
    """`command` is started at once; what it prints goes to `log`. It may be asked for at most
    `limit_seconds` at a time."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        limit_seconds: float = LIMIT_SECONDS,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._log, self._limit_seconds = name, log, limit_seconds
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=environment,
                # Ctrl-C is for the driver; a peer ends with its pipe, and its servers with it.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Raises PeerError if it refuses, ends, or takes longer than the limit."""
        stdin, stdout = self._pipes()
        watch = threading.Timer(self._limit_seconds, self._kill)
        watch.start()
        try:
            stdin.write(json.dumps({"do": do, **request}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = ""
        finally:
            watch.cancel()
        if not line.endswith("\n"):
            raise PeerError(
                f"{self.name} ended or took {self._limit_seconds:.0f} s; see {self._log}"
                f"{self._last_words()}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise PeerError(answer["refused"])
        return answer

    def close(self, *, hurry: bool = False) -> None:
        """Let it end by itself: its stdin is closed. With `hurry` it has little time for that."""
        stdin, stdout = self._pipes()
        try:
            stdin.close()
            self._process.wait(timeout=_HURRY_SECONDS if hurry else _CLOSE_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self._kill()
            self._process.wait()
        stdout.close()

    def _last_words(self) -> str:
        try:
            printed = read_bytes(self._log, FileKind.RESULTS).decode("utf-8", "replace")
        except OSError:
            return ""
        return "".join(f", which ends in {line!r}" for line in printed.splitlines()[-1:])

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        if self._process.stdin is None or self._process.stdout is None:
            raise ContractError("the process has no pipes")
        return self._process.stdin, self._process.stdout

    def _kill(self) -> None:
        """It and the servers that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@dataclass(slots=True)
class Cpu:
    """CPU seconds of all processors while one peer runs."""

    _before: tuple[float, float, dict[int, tuple[int, float]]] | None = field(default=None)

    def start(self) -> None:
        self._before = _machine()

    def stop(self, pid: int) -> tuple[float, ...]:
        """Since `start`: of the peer `pid` and its servers, of the other peers and this driver, of
        strangers, and how many there were in all. Nothing where there is no /proc."""
        before, after = self._before, _machine()
        if before is None or after is None:
            return ()
        ours = _tree(after[2], os.getpid())
        theirs = _tree(after[2], pid)
        spent = {
            who: seconds - before[2].get(who, (0, 0.0))[1] for who, (_, seconds) in after[2].items()
        }
        timed = sum(spent[who] for who in theirs)
        own = sum(spent[who] for who in ours)
        strangers = max(after[0] - before[0] - own, 0.0)
        return timed, max(own - timed, 0.0), strangers, after[1] - before[1]


def _machine() -> tuple[float, float, dict[int, tuple[int, float]]] | None:
    """Busy and total seconds of all CPUs; parent and CPU seconds of every process."""
    seconds = cpu_seconds()
    if seconds is None:
        return None
    per_second = os.sysconf("SC_CLK_TCK")
    found: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name may hold anything; the rest follows its last bracket.
                line = read_bytes(entry / "stat", FileKind.SYSTEM).decode("utf-8", "replace")
                rest = line.rpartition(")")[2].split()
            except OSError:
                continue
            found[int(entry.name)] = int(rest[1]), (int(rest[11]) + int(rest[12])) / per_second
    return *seconds, found


def _tree(parents: dict[int, tuple[int, float]], root: int) -> set[int]:
    """`root` and all below it."""
    found = {root} if root in parents else set[int]()
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return found
