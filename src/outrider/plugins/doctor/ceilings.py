"""Ceilings of this machine: how fast it reads memory and multiplies in registers.

Memory limits a pass over few rows, which reads every weight once; each thread reads its own share
of the bytes (csrc/stream.cpp). Speeds are medians of turns that rotate; each turn first brings its
bytes into the level that it measures. Arithmetic limits a pass over many rows, which uses each
weight often; only the instructions of products are timed (csrc/peak.cpp).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from outrider.kernels.native.build import needed_library
from outrider.kernels.native.cpu import TILES, cache_bytes, num_physical_cores, tiles_refusal
from outrider.kernels.native.ops import function, team


class BandwidthReader:
    """Reads tensors with the threads that linears use. Raises MachineError without a compiler.

    0 `threads` mean one for each physical core.
    """

    def __init__(self, threads: int = 0) -> None:
        library = needed_library("memory cannot be read at full speed")
        self._team = team(library, threads or num_physical_cores())
        self._stream = function(library, "stream")

    def read(self, tensors: Sequence[Tensor], times: int = 1) -> int:
        """Read all bytes of CPU tensors `times` times each; the exclusive or of one reading."""
        found = 0
        for tensor in tensors:
            found ^= self._stream(self._team, tensor.data_ptr(), tensor.nbytes, times)
        return found


WARM_TURNS, NUM_TURNS = 2, 7
# A turn reads at least this much, so that starting the team counts for little.
MIN_TURN_BYTES = 64 << 20
MIN_MEMORY_BYTES, MAX_MEMORY_BYTES = 64 << 20, 192 << 20


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A measured speed: `level` is "L2", "L3" or "memory"; `num_bytes` were read repeatedly."""

    level: str
    num_bytes: int
    threads: int
    gb_per_second: float


def ceilings(
    threads: Sequence[int], *, clock: Callable[[], float] = perf_counter
) -> tuple[Ceiling, ...]:
    """Measure each level with each number of `threads`, in about half a second.

    Raises MachineError without a compiler.
    """
    numbers = tuple(dict.fromkeys(threads))
    readers = {number: BandwidthReader(number) for number in numbers}
    sizes = level_sizes(cache_bytes())
    most = max(num_bytes * (max(numbers) if level == "L2" else 1) for level, num_bytes in sizes)
    data = torch.ones(most, dtype=torch.uint8)
    found: list[Ceiling] = []
    # One level at a time: data of a larger level left in the caches would slow it.
    for level, num_bytes in sizes:
        own = {n: data[: num_bytes * (n if level == "L2" else 1)] for n in numbers}
        times = {n: -(-MIN_TURN_BYTES // own[n].nbytes) for n in numbers}
        seconds: dict[int, list[float]] = {n: [] for n in numbers}
        for turn in range(WARM_TURNS + NUM_TURNS):
            for n in numbers if turn % 2 else reversed(numbers):
                before = clock()
                readers[n].read([own[n]], times[n])
                seconds[n].append(clock() - before)
        for n in numbers:
            median = statistics.median(seconds[n][WARM_TURNS:])
            rate = own[n].nbytes * times[n] / median / 1e9
            found.append(Ceiling(level, own[n].nbytes, n, round(rate, 2)))
    return tuple(found)


def level_sizes(caches: dict[int, int]) -> list[tuple[str, int]]:
    """Bytes to read: half of each cache from L2 on, and for memory more than any cache."""
    last = max(caches.values(), default=0)
    memory = min(max(2 * last, MIN_MEMORY_BYTES), MAX_MEMORY_BYTES)
    inner = [(f"L{level}", size // 2) for level, size in caches.items() if level > 1]
    return [*(found for found in inner if found[1] < memory), ("memory", memory)]


# In the order of `Kind` in csrc/peak.cpp.
ARITHMETIC = ("bfloat16", "bfloat16 dots", "int8", "int4", "bfloat16 tiles", "int8 tiles")
# The best turn counts: in others, a thread of PyTorch or of another program interfered.
SPEED_TURNS = 12
# So many that a turn takes some milliseconds.
STEPS = 1 << 17


@dataclass(frozen=True, slots=True)
class ArithmeticCeiling:
    """Billions of operations a second by `threads` threads; a multiplication with its addition is
    two. `arithmetic` is "bfloat16" (products in float32), "bfloat16 dots" (dot products of pairs),
    "int8", "int4", "bfloat16 tiles" or "int8 tiles"; dots and tiles if the CPU has them."""

    arithmetic: str
    threads: int
    gflops: float


def arithmetic_ceilings(
    threads: Sequence[int], *, clock: Callable[[], float] = perf_counter
) -> tuple[ArithmeticCeiling, ...]:
    """Measure all arithmetics with each of `threads`, in half a second. Raises MachineError."""
    library = needed_library("arithmetic cannot be timed")
    peak = function(library, "peak")
    found: list[ArithmeticCeiling] = []
    no_tiles = tiles_refusal(library)
    for kind, name in enumerate(ARITHMETIC):
        if no_tiles and name.endswith(TILES):
            continue
        for number in dict.fromkeys(threads):
            address = team(library, number)
            rates: list[float] = []
            for _ in range(SPEED_TURNS):
                before = clock()
                num_operations = peak(address, kind, STEPS)
                rates.append(num_operations / (clock() - before))
            if any(rates):
                found.append(ArithmeticCeiling(name, number, round(max(rates) / 1e9, 1)))
    return tuple(found)
