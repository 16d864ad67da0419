"""Laws that two processes see: the drafter's writes them, the engine's reads them.

The memory is an anonymous file, mapped by both. It has no name, so nothing is left behind however a
process ends. A law has a place of fixed size, row i of `laws_LV`; an answer says in which rows its
laws are. The process writes to them only while it is being asked for drafts, and the engine copies
what it got before it asks again, so no row is written while it is read.

Shapes:  L = places for laws, N = nodes of a draft, V = vocabulary.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.errors import DrafterError


@dataclass(frozen=True, slots=True)
class SharedLaws:
    """float32 throughout, whatever the draft model computes in."""

    laws_LV: Tensor

    @classmethod
    def over(cls, file: int, num_laws: int, vocab_size: int) -> SharedLaws:
        """Over `file`, of the size that `anonymous_file` gave it. It may be closed after that."""
        memory = mmap.mmap(file, num_bytes(num_laws, vocab_size))
        flat = torch.frombuffer(memory, dtype=torch.float32, count=num_laws * vocab_size)
        return cls(flat.view(num_laws, vocab_size))

    def write(self, first: int, laws_NV: Tensor) -> None:
        self._rows(first, len(laws_NV)).copy_(laws_NV)

    def read(self, first: int, count: int, device: str) -> Tensor:
        """A copy on `device`. Raises DrafterError if there are no such rows."""
        return self._rows(first, count).to(device, copy=True)

    def _rows(self, first: int, count: int) -> Tensor:
        if not 0 <= first <= first + count <= len(self.laws_LV):
            raise DrafterError(
                f"a drafter's process names laws {first} to {first + count} of shared memory that "
                f"holds {len(self.laws_LV)}."
            )
        return self.laws_LV[first : first + count]


def num_bytes(num_laws: int, vocab_size: int) -> int:
    # An empty mapping is an error.
    return max(num_laws * vocab_size * 4, 1)


def anonymous_file(size: int) -> int:
    """A descriptor of `size` bytes that no name leads to. Pages are taken when first written."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("outrider-laws")
    else:
        with tempfile.TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    os.truncate(file, size)
    return file
