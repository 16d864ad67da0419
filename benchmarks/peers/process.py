"""The driver's end of a peer: a process that answers JSON lines, and whose CPU time is known.

While a peer is timed all others wait. That they do, and how much of the machine strangers used, is
measured: CPU time is read for the whole tree of processes before and after every run.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")


class PeerError(Exception):
    """A peer refused, died or hung; the text says what the user may do."""


class Peer:
    """`command` is started at once; what it prints goes to `log`."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self._log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, *, limit_seconds: float = 300, **request: Any) -> dict[str, Any]:
        """Raises PeerError if it refuses, ends, or takes longer than the limit."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        watch = threading.Timer(limit_seconds, self._process.kill)
        watch.start()
        try:
            stdin.write(json.dumps({"do": do, **request}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = ""
        finally:
            watch.cancel()
        if not line:
            raise PeerError(f"{self.name} ended or took {limit_seconds} s; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise PeerError(answer["refused"])
        return answer

    def close(self) -> None:
        """Let it end by itself: its stdin is closed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


@dataclass(slots=True)
class Cpu:
    """CPU seconds over the timed runs: of whoever was timed, of the other peers and this driver,
    and of strangers. `share` gives them as parts of all CPU time there was."""

    timed: float = 0.0
    waiting: float = 0.0
    strangers: float = 0.0
    total: float = 0.0
    _before: tuple[float, float, dict[int, tuple[int, float]]] | None = field(default=None)

    def start(self) -> None:
        self._before = _machine()

    def stop(self, pid: int) -> None:
        """End a run of the peer `pid`. Without /proc nothing is counted."""
        before, after = self._before, _machine()
        if before is None or after is None:
            return
        ours = _tree(after[2], os.getpid())
        theirs = _tree(after[2], pid)
        spent = {
            who: seconds - before[2].get(who, (0, 0.0))[1] for who, (_, seconds) in after[2].items()
        }
        timed = sum(spent[who] for who in theirs)
        own = sum(spent[who] for who in ours)
        self.timed += timed
        self.waiting += own - timed
        self.strangers += max(after[0] - before[0] - own, 0.0)
        self.total += after[1] - before[1]

    def share(self) -> dict[str, float] | None:
        if not self.total:
            return None
        names = ("timed", "waiting", "strangers")
        return {name: round(getattr(self, name) / self.total, 4) for name in names}


def _machine() -> tuple[float, float, dict[int, tuple[int, float]]] | None:
    """Busy and total seconds of all CPUs; parent and CPU seconds of every process."""
    try:
        words = Path("/proc/stat").read_text("utf-8").split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    ticks = [int(word) for word in words]
    found: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name may hold anything; the rest follows its last bracket.
                rest = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            except OSError:
                continue
            found[int(entry.name)] = int(rest[1]), (int(rest[11]) + int(rest[12])) / TICKS
    return (sum(ticks) - ticks[3] - ticks[4]) / TICKS, sum(ticks) / TICKS, found


def _tree(parents: dict[int, tuple[int, float]], root: int) -> set[int]:
    """`root` and all below it."""
    found = {root} if root in parents else set[int]()
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return found
