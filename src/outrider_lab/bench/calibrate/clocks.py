"""What the clocks of this machine are at the moment, and what of it a container may have.

What cannot be read is None. A container may have less than the machine: cgroup limits say so. Of a
GPU the clock, the temperature and the power draw are asked through torch, which needs NVML.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch

from outrider.core.files import FileKind, read_text

_CPU_MAX = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
_CGROUP = Path("/sys/fs/cgroup")


def clocks(device: str) -> dict[str, float | None]:
    """Of the moment. `cpu_limit` is how many CPUs the container may use, in CPUs."""
    found = {
        "cpu_mhz": _cpu_mhz(),
        "cpu_mhz_most": _scaled(_word(_CPU_MAX), 1e-3),
        "cpu_limit": _cpu_limit(),
        "memory_limit_bytes": _scaled(_word(_CGROUP / "memory.max"), 1.0),
    }
    if device == "cuda":
        found |= {
            "gpu_mhz": _asked(torch.cuda.clock_rate),
            "gpu_celsius": _asked(torch.cuda.temperature),
            "gpu_milliwatts": _asked(torch.cuda.power_draw),
        }
    return found


def _cpu_mhz() -> float | None:
    """The mean of all cores."""
    try:
        lines = read_text(Path("/proc/cpuinfo"), FileKind.SYSTEM).splitlines()
        mhz = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return None
    return round(fmean(mhz), 1) if mhz else None


def _cpu_limit() -> float | None:
    quota, period = _word(_CGROUP / "cpu.max"), _word(_CGROUP / "cpu.max", 1)
    limit, over = _scaled(quota, 1.0), _scaled(period, 1.0)
    return limit / over if limit and over else None


def _word(path: Path, place: int = 0) -> str:
    """A word of a small file, empty if there is none."""
    try:
        words = read_text(path, FileKind.SYSTEM).split()
    except (OSError, UnicodeDecodeError):
        return ""
    return words[place] if place < len(words) else ""


def _scaled(word: str, by: float) -> float | None:
    """None for words that are no number, such as "max"."""
    return by * float(word) if word.isdigit() else None


def _asked(question: Callable[[], int]) -> float | None:
    try:
        return float(question())
    except (RuntimeError, ImportError, OSError):
        return None
