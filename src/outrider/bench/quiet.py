"""How much of the machine others used while we measured: a busy machine makes a benchmark void.

Contestants suffer unequally from neighbours (a spinning thread pool more than a work-sharing one),
so taking turns is not enough; the share of foreign CPU time is recorded with every result.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from outrider.core.files import Kind, read_text

# Of the CPUs. Beyond it, what was timed meanwhile is not to be relied on.
BUSY_SHARE = 0.05


def is_busy(share: float | None) -> bool:
    """Whether others used so much of the machine that times say little."""
    return share is not None and share > BUSY_SHARE


def said_of(share: float | None) -> str | None:
    """A sentence about `share`, None if it is unknown."""
    if share is None:
        return None
    warning = ": do not rely on these times" if is_busy(share) else ""
    return f"Other programs used {100 * share:.1f} % of the CPUs meanwhile{warning}."


class Neighbours:
    """While entered, watches the machine; `share` is foreign CPU time over all CPU time, or None
    where the system does not tell."""

    def __init__(self) -> None:
        self.share: float | None = None
        self._before: tuple[float, float, float] | None = None

    def __enter__(self) -> Neighbours:
        self._before = _times()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        after = _times()
        if self._before is None or after is None:
            return
        busy, total, own = (b - a for a, b in zip(self._before, after, strict=True))
        self.share = round(max(busy - own, 0.0) / total, 4) if total > 0 else None


def _times() -> tuple[float, float, float] | None:
    """Busy and total seconds of all CPUs, and busy seconds of this process and its children."""
    try:
        fields = read_text(Path("/proc/stat"), Kind.SYSTEM).split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    ticks = [int(field) for field in fields[:8]]
    idle = ticks[3] + ticks[4]
    per_second = os.sysconf("SC_CLK_TCK")
    own = sum(os.times()[:4])
    return (sum(ticks) - idle) / per_second, sum(ticks) / per_second, own
