"""The speed of reading from each cache and from memory, by one thread and by all threads.

A pass reads every weight once, so these speeds are the ceilings of decoding. Each thread reads its
own share of the bytes (csrc/stream.cpp). So for a cache of each core, the size for all threads is
that for one thread times their number; for a shared cache it is the same. Speeds are medians of
turns that rotate; each turn first brings its bytes into the level that it measures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from outrider.kernels.native.build import needed_library
from outrider.kernels.native.cpu import cache_bytes, num_physical_cores
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
