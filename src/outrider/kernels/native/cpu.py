"""The CPU: caches and identity, matrix tiles (AMX), kinds of linear.

Kinds of linear: vectors run anywhere, dots multiply pairs of bfloat16 (AVX512-BF16), tiles multiply
blocks of bfloat16 or bytes (AMX); see csrc/linear.cpp and csrc/tiles.h. In bfloat16, kinds sum in
different orders, so the CPU decides by a rule, and machines with the same CPU write the same text.
For integers all kinds have the same sums, so the faster one is measured (tuning.py). Builds of the
kernels use this module, so it does not import torch at the top.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.files import FileKind, read_text

if TYPE_CHECKING:
    pass

_SYSTEM = Path("/sys/devices/system")
# A core is fast if it has at least this share of the fastest core's speed. Cores of one kind differ
# by a few hundredths (the best may run faster), cores of two kinds by a quarter or more.
_FAST_SHARE = 0.85
# Files with a core's speed, of which the first is read: its share of the fastest (arm64), its kHz.
_SPEEDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")


def hardware_threads() -> tuple[int, ...]:
    """Numbers of the hardware threads that this process may run on, in order."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0)))


def allowed_cores() -> list[tuple[int, ...]]:
    """The hardware threads of each core; cores of one NUMA node follow each other."""
    nodes = _nodes()
    cores: dict[tuple[int, str], list[int]] = {}
    for number in hardware_threads():
        siblings = _read(_SYSTEM / f"cpu/cpu{number}/topology/thread_siblings_list")
        cores.setdefault((nodes.get(number, 0), siblings or str(number)), []).append(number)
    by_node = sorted(cores.items(), key=lambda core: (core[0][0], core[1][0]))
    return [tuple(threads) for _, threads in by_node]


def num_physical_cores() -> int:
    """Number of cores that this process may run on; hardware threads of a core count once."""
    return len(allowed_cores())


def num_fast_cores() -> int:
    """Number of physical cores of the fastest kind that this process may run on: all of them,
    unless the system reports a hybrid CPU (Intel's performance cores, Apple's, big.LITTLE)."""
    if sys.platform == "darwin":
        return _performance_cores() or num_physical_cores()
    return len(_fast(allowed_cores()))


def memory_nodes() -> tuple[int, ...]:
    """The NUMA nodes of the cores; empty if the system does not report them."""
    nodes = _nodes()
    return tuple(sorted({nodes[number] for number in hardware_threads() if number in nodes}))


def pinned_threads(num_threads: int) -> tuple[int, ...]:
    """The hardware thread to which each thread of a team of `num_threads` is pinned; the first one
    is the calling thread's. Empty if the choice is left to the scheduler: on one NUMA node, and for
    teams that do not take all cores or all hardware threads, since these share cores with other
    teams (ranks, lanes, a drafter's process)."""
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
    """The speed of a core, in the unit of the first file that has it; 0 if none has."""
    for name in _SPEEDS:
        with contextlib.suppress(ValueError):
            return int(_read(_SYSTEM / f"cpu/cpu{number}" / name))
    return 0


def _performance_cores() -> int:
    """Number of performance cores on macOS; 0 if it does not report them."""
    found, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    name = b"hw.perflevel0.physicalcpu"
    ask = ctypes.CDLL(None).sysctlbyname
    failed = ask(name, ctypes.byref(found), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else found.value


def _nodes() -> Mapping[int, int]:
    """The NUMA node of each hardware thread; empty if the system does not report nodes."""
    found: dict[int, int] = {}
    for folder in _SYSTEM.glob("node/node*"):
        name = folder.name.removeprefix("node")
        if name.isdecimal():
            found |= dict.fromkeys(_numbers(_read(folder / "cpulist")), int(name))
    return found


def _numbers(text: str) -> list[int]:
    """The numbers in a list of CPUs as Linux writes it: 0-3,8."""
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


TRIAL_SECONDS = 60

_FORBIDDEN = "AMX: the kernel forbids it"
# As in csrc/tiles.cpp.
_MISSING = (
    None,
    "AMX: this CPU has no tiles for bfloat16 and int8",
    "AMX: the operating system does not keep tiles",
    "AMX: the compiler does not know it",
)
# As in csrc/tiles_check.cpp.
_VERDICTS = {3: _FORBIDDEN, 4: "AMX: its trial gave wrong sums"}
# Without site packages, so it starts in some 20 ms; without a core file, since it may crash.
_TRIAL = """
import ctypes, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.exit(ctypes.CDLL(sys.argv[1]).outrider_tiles_check())
"""
_log = logging.getLogger(__name__)


@functools.cache
def tiles_refusal(library: ctypes.CDLL) -> str | None:
    """The reason why linears cannot use tiles, in one sentence; None if they can from now on.

    `library` is the one of `built_kernels`. The permission holds for all threads of this process,
    also for those that already run.

    Harmless checks come first: does the CPU have tiles, does the operating system save them, and
    did the compiler know them? If so, a short trial of the kernels runs in another process, so that
    a fault of machine, compiler or hypervisor ends only that process. A passed trial leaves an
    empty file in the library's folder and is not repeated. Last, this process requests the
    permission of the operating system's kernel, which it needs before it uses a tile.
    """
    missing: int = library.outrider_tiles_missing()
    if missing:
        return _MISSING[missing]
    path = Path(library._name)  # pyright: ignore[reportPrivateUsage] - its only name
    passed = path.with_suffix(".tiles")
    if not passed.exists():
        if refusal := _trial(path):
            return refusal
        with contextlib.suppress(OSError):
            passed.touch()
    return None if library.outrider_tiles_permit() else _FORBIDDEN


def _trial(library: Path) -> str | None:
    start = time.monotonic()
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, str(library)]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=TRIAL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"AMX: its trial did not run: {error}"
    _log.info("Tried tiles in %.2f s: %d.", time.monotonic() - start, result.returncode)
    if result.returncode == 0:
        return None
    if result.returncode < 0:
        return f"AMX: its trial crashed: {signal.strsignal(-result.returncode)}"
    if result.returncode in _VERDICTS:
        return _VERDICTS[result.returncode]
    last = (result.stderr.strip().splitlines() or ["it gave no message"])[-1]
    return f"AMX: its trial failed: {last}"


VECTORS, DOTS, TILES = "vectors", "dots", "tiles"
# Endings of the names of a kind's functions.
ENDINGS = {VECTORS: "", DOTS: "_dots", TILES: "_tiles"}

RULE = (
    "by rule, since kinds of bfloat16 differ in bits: tiles where they can be used, else dots on "
    "AMD's CPUs, else vectors"
)

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cache_bytes() -> dict[int, int]:
    """Bytes of the first core's data caches by level; empty if the system does not report them."""
    found: dict[int, int] = {}
    for folder in _CACHES.glob("index*"):
        try:
            level, kind, size = (
                read_text(folder / name, FileKind.SYSTEM).strip()
                for name in ("level", "type", "size")
            )
            if kind != "Instruction":
                found[int(level)] = int(size[:-1]) * _UNITS[size[-1]]
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return dict(sorted(found.items()))


def last_cache_bytes() -> int:
    """Bytes of the largest cache; 32 MiB if the system does not report it."""
    return max(cache_bytes().values(), default=32 << 20)


_CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def cpu_identity() -> str:
    """A text that is equal on two machines only if code compiled for one may run on the other."""
    lines = [platform.machine(), platform.processor(), platform.system()]
    try:
        text = read_text(_CPUINFO, FileKind.SYSTEM)
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
