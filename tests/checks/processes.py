"""Waiting for what other processes do, a drafter's above all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from outrider.drafters.process.client import ProcessDrafter


def until(condition: Callable[[], bool], seconds: float = 60.0) -> float:
    """Seconds until it held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.01)
    return time.monotonic() - began


def gone(pid: int) -> bool:
    """Whether the process ended; one that nobody waited for yet counts as well."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] == "Z"
    except OSError:
        return True


def pid_of(drafter: ProcessDrafter) -> int:
    pid = drafter.stats().pid
    assert pid is not None
    return pid


def serving(drafter: ProcessDrafter) -> bool:
    return drafter.stats().pid is not None
