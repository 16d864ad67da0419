"""What the kernels need to know of the CPU: how many cores are ours, and which CPU it is."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

from outrider.core.files import Kind, read_text

_TOPOLOGY = Path("/sys/devices/system/cpu")
_CPUINFO = Path("/proc/cpuinfo")


def num_physical_cores() -> int:
    """Cores this process may run on; the hardware threads of one core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})


def _siblings(cpu: int) -> str:
    try:
        return read_text(_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list", Kind.SYSTEM)
    except OSError:
        return str(cpu)


@functools.cache
def cpu_identity() -> str:
    """Equal for two machines only if code compiled for one may run on the other."""
    lines = [platform.machine(), platform.processor(), platform.system()]
    try:
        text = read_text(_CPUINFO, Kind.SYSTEM)
    except OSError:
        return "\n".join(lines)
    first_core = text.split("\n\n", 1)[0]
    names = (
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "stepping",
        "flags",
        "Features",
        "CPU implementer",
        "CPU part",
        "CPU variant",
    )
    lines += [line for line in first_core.splitlines() if line.split("\t")[0].strip() in names]
    return "\n".join(lines)
