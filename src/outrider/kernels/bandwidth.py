"""How fast this machine reads from each cache and from memory, by one thread and by all.

A pass reads every weight once, so these are the ceilings of decoding. Each thread has its own share
of the bytes (csrc/stream.cpp), so a size for all threads is that for one times their number where
the cache is a core's own, and the same where it is shared. Medians of turns that rotate.

How fast this machine reads a model's weights, if it does nothing else with them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from outrider.core import env
from outrider.core.errors import MachineError
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.cpu import cache_bytes, num_physical_cores
from outrider.kernels.native.ops import function, team


class BandwidthReader:
    """Reads tensors by the threads that multiply by them. Raises MachineError without a compiler.

    `threads` 0 are the physical cores.
    """

    def __init__(self, threads: int = 0) -> None:
        built = built_kernels(env.compiler(), env.cache_folder())
        if built.library is None:
            raise MachineError(
                f"memory cannot be read at full speed: {built.refusal}.", hint="outrider doctor"
            )
        self._team = team(built.library, threads or num_physical_cores())
        self._stream = function(built.library, "stream")

    def read(self, tensors: Sequence[Tensor]) -> int:
        """All bytes of contiguous CPU tensors, once; their exclusive or, of 8 bytes."""
        found = 0
        for tensor in tensors:
            found ^= self._stream(self._team, tensor.data_ptr(), tensor.nbytes)
        return found


NUM_TURNS = 7
# A turn reads at least this much, so that starting the team counts for little.
MIN_TURN_BYTES = 16 << 20
MIN_MEMORY_BYTES, MAX_MEMORY_BYTES = 64 << 20, 192 << 20


@dataclass(frozen=True, slots=True)
class Ceiling:
    """`level` is "L2", "L3" or "memory"; `num_bytes` were read again and again."""

    level: str
    num_bytes: int
    threads: int
    gb_per_second: float


@dataclass(frozen=True, slots=True)
class _Work:
    level: str
    threads: int
    data: Tensor
    times: int


def ceilings(
    threads: Sequence[int], *, clock: Callable[[], float] = perf_counter
) -> tuple[Ceiling, ...]:
    """One for each level and each of `threads`, in about half a second.

    Raises MachineError without a compiler.
    """
    sizes = level_sizes(cache_bytes())
    most = max(num_bytes * (max(threads) if level == "L2" else 1) for level, num_bytes in sizes)
    data = torch.ones(most, dtype=torch.uint8)
    works: list[_Work] = []
    for level, num_bytes in sizes:
        for number in dict.fromkeys(threads):
            own = num_bytes * (number if level == "L2" else 1)
            works.append(_Work(level, number, data[:own], -(-MIN_TURN_BYTES // own)))
    readers = {number: BandwidthReader(number) for number in threads}
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(NUM_TURNS + 1):
        for place in range(len(works)):
            index = (turn + place) % len(works)
            work = works[index]
            before = clock()
            readers[work.threads].read([work.data] * work.times)
            if turn:
                seconds[index].append(clock() - before)
    return tuple(map(_ceiling, works, seconds))


def level_sizes(caches: dict[int, int]) -> list[tuple[str, int]]:
    """Half of the second and of the last cache, and more than any cache: bytes by level."""
    last = max(caches.values(), default=0)
    memory = min(max(2 * last, MIN_MEMORY_BYTES), MAX_MEMORY_BYTES)
    inner = [(f"L{level}", size // 2) for level, size in caches.items() if level > 1]
    return [*(found for found in inner if found[1] < memory), ("memory", memory)]


def _ceiling(work: _Work, seconds: Sequence[float]) -> Ceiling:
    num_bytes = work.data.nbytes * work.times
    rate = num_bytes / statistics.median(seconds) / 1e9
    return Ceiling(work.level, work.data.nbytes, work.threads, round(rate, 2))
