"""Cores, their hardware threads and kinds, NUMA nodes, and which of them a team is pinned to.

Cores are those that this process may use. On Linux sysfs tells; elsewhere every hardware thread
counts as a core. Needs no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.core.files import FileKind, read_text

_SYSTEM = Path("/sys/devices/system")
# A core is fast that has so much of the fastest one's speed: cores of one kind differ by a few
# hundredths (the best may run faster), those of two kinds by a quarter and more.
_FAST_SHARE = 0.85
# What says how fast a core is, the first that is there: its share of the fastest (arm64), its kHz.
_SPEEDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")


def hardware_threads() -> tuple[int, ...]:
    """Their numbers, in order."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0)))


def allowed_cores() -> list[tuple[int, ...]]:
    """The hardware threads of each core, those of a NUMA node behind each other."""
    nodes = _nodes()
    cores: dict[tuple[int, str], list[int]] = {}
    for number in hardware_threads():
        siblings = _read(_SYSTEM / f"cpu/cpu{number}/topology/thread_siblings_list")
        cores.setdefault((nodes.get(number, 0), siblings or str(number)), []).append(number)
    by_node = sorted(cores.items(), key=lambda core: (core[0][0], core[1][0]))
    return [tuple(threads) for _, threads in by_node]


def num_physical_cores() -> int:
    """Cores this process may run on; the hardware threads of one core count once."""
    return len(allowed_cores())


def num_fast_cores() -> int:
    """Physical cores of the fastest kind that this process may run on: all, unless the CPU is a
    hybrid (Intel's performance cores, Apple's, big.LITTLE) and the system says so."""
    if sys.platform == "darwin":
        return _performance_cores() or num_physical_cores()
    return len(_fast(allowed_cores()))


def memory_nodes() -> tuple[int, ...]:
    """The NUMA nodes of the cores; none where the system does not tell."""
    nodes = _nodes()
    return tuple(sorted({nodes[number] for number in hardware_threads() if number in nodes}))


def pinned_threads(num_threads: int) -> tuple[int, ...]:
    """The hardware threads that a team of `num_threads` is pinned to, one each, the first for who
    calls it. None where the system's scheduler is left to place them: on one NUMA node, and for
    teams that are not of all cores or all hardware threads, since those share cores with others:
    ranks, lanes, a drafter's process."""
    cores = allowed_cores()
    first = [core[0] for core in cores]
    both = [*first, *(number for core in cores for number in core[1:])]
    if len(memory_nodes()) < 2 or num_threads not in (len(first), len(both)):
        return ()
    return tuple(both[:num_threads])


def _fast(cores: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    speeds = [_speed(core[0]) for core in cores]
    least = _FAST_SHARE * max(speeds)
    return [core for core, speed in zip(cores, speeds, strict=True) if speed >= least]


def _speed(number: int) -> int:
    """0 where the system does not tell."""
    for name in _SPEEDS:
        with contextlib.suppress(ValueError):
            return int(_read(_SYSTEM / f"cpu/cpu{number}" / name))
    return 0


def _performance_cores() -> int:
    """0 where macOS does not tell."""
    found, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    name = b"hw.perflevel0.physicalcpu"
    ask = ctypes.CDLL(None).sysctlbyname
    failed = ask(name, ctypes.byref(found), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else found.value


def _nodes() -> Mapping[int, int]:
    """The NUMA node of each hardware thread; empty where the system does not tell."""
    found: dict[int, int] = {}
    for folder in _SYSTEM.glob("node/node*"):
        name = folder.name.removeprefix("node")
        if name.isdecimal():
            found |= dict.fromkeys(_numbers(_read(folder / "cpulist")), int(name))
    return found


def _numbers(text: str) -> list[int]:
    """Of a list of CPUs as Linux writes it: 0-3,8."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found += range(int(first), int(last or first) + 1)
    return found


def _read(path: Path) -> str:
    try:
        return read_text(path, FileKind.SYSTEM).strip()
    except OSError:
        return ""
