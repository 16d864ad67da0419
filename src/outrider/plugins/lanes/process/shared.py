"""Memory that the engine and a drafter's process share: distributions, and streams of messages.

Shapes:  L = rows for distributions, N = nodes of a draft, V = vocabulary.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core import env
from outrider.core.errors import DrafterError
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.ranks import NativeRanks, shared_memory
from outrider.plugins.lanes.process.frames import TICK_SECONDS


@dataclass(frozen=True, slots=True)
class SharedProbs:
    """Shared memory for distributions, float32 for every dtype of the draft model.

    The memory is an anonymous file, mapped by both processes. It has no name, so nothing is left
    behind however a process ends. Each distribution has a row of fixed size in `probs_LV`; an
    answer names the rows of its distributions. The process writes them only while it makes drafts,
    and the engine copies them before its next request, so no row is written while it is read.
    """

    probs_LV: Tensor

    @classmethod
    def over(cls, file: int, num_distributions: int, vocab_size: int) -> SharedProbs:
        """Map `file`, whose size is that of `num_bytes`. It may be closed after that."""
        memory = mmap.mmap(file, num_bytes(num_distributions, vocab_size))
        flat = torch.frombuffer(memory, dtype=torch.float32, count=num_distributions * vocab_size)
        return cls(flat.view(num_distributions, vocab_size))

    def write(self, first: int, probs_NV: Tensor) -> None:
        self._rows(first, len(probs_NV)).copy_(probs_NV)

    def read(self, first: int, count: int, device: str) -> Tensor:
        """Return a copy on `device`. Raises DrafterError if there are no such rows."""
        return self._rows(first, count).to(device, copy=True)

    def _rows(self, first: int, count: int) -> Tensor:
        if not 0 <= first <= first + count <= len(self.probs_LV):
            raise DrafterError(
                f"a drafter's process names distributions {first} to {first + count} of shared "
                f"memory that holds {len(self.probs_LV)}."
            )
        return self.probs_LV[first : first + count]


class MemoryPipe:
    """A Pipe through memory (csrc/ranks.h): a peer that has just begun to wait is reached without a
    system call. The engine is rank 0.

    The engine waits TICK_SECONDS at a time, the process as long as it takes. `end` frees a waiting
    peer: memory does not show that the other one is gone.
    """

    def __init__(self, ranks: NativeRanks) -> None:
        self._ranks, self._peer = ranks, 1 - ranks.rank
        self._patience = 0.0 if ranks.rank else TICK_SECONDS
        self.end = ranks.end

    @classmethod
    def over(cls, descriptor: int, *, rank: int) -> MemoryPipe | None:
        """Map the memory that `message_memory` made. It may be closed after that."""
        library = built_kernels(env.compiler(), env.cache_folder()).library
        if library is None:
            return None
        return cls(NativeRanks(library, descriptor, rank=rank, size=2, patience=0.0))

    def send(self, data: memoryview, /) -> int:
        count = self._ranks.put(bytes(data[:_PIECE]), self._peer, self._patience)
        if count is None:
            raise ConnectionError("the other end is gone")
        if not count:
            raise TimeoutError
        return count

    def recv(self, size: int, /) -> bytes:
        data = self._ranks.take(size, self._peer, self._patience)
        if data is None:
            return b""
        if not data:
            raise TimeoutError
        return data


# Bytes of a message that are sent at once.
_PIECE = 1 << 16


def message_memory() -> int | None:
    """Return a descriptor of memory, None without native kernels. Raises MachineError."""
    library = built_kernels(env.compiler(), env.cache_folder()).library
    return None if library is None else shared_memory(library, 2)


def num_bytes(num_distributions: int, vocab_size: int) -> int:
    # An empty mapping is an error.
    return max(num_distributions * vocab_size * 4, 1)
