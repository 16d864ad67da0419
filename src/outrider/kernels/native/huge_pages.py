"""CPU tensors in huge pages, which begin at a cache line and are spread over all NUMA nodes."""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import platform
from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

from outrider.core import early
from outrider.core.errors import ContractError
from outrider.kernels.native.cpu import memory_nodes
from outrider.kernels.plan import BlockRows

PAGE_BYTES = 2 << 20
# Size of a region that small tensors share, of any model; a full region is freed with the last of
# them. The unused rest takes memory only in a page that a tensor reaches into.
_REGION_BYTES = 64 << 20
_ALIGNMENT = 64
# Zeros of at least this size are left to the system, which allocates them page by page.
_LAZY_BYTES = 1 << 20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
# Linux's number of mbind(2), which its C library does not export, and MPOL_INTERLEAVE.
_MBIND = {"x86_64": 237, "aarch64": 235}
_INTERLEAVE = 3
# Bits of a mask of nodes.
_MASK_BITS = 1024
_log = logging.getLogger(__name__)


class Regions:
    """Allocates small tensors as parts of the newest region.

    A pass reads every weight once. In pages of 4 KB even a small model has more pages than a core's
    TLB holds; in pages of 2 MB a pass reads about a tenth faster. Linux uses huge pages for private
    memory that requests them (`madvise(2)`) and begins on a boundary of such a page. Smaller
    matrices share a region.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def part(self, num_bytes: int) -> Tensor | None:
        """A part of `num_bytes` that begins at a cache line; None if the system refuses."""
        padded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if padded > len(self._rest):
                fresh = _region(_REGION_BYTES)
                if fresh is None:
                    return None
                self._rest = fresh
            data, self._rest = self._rest[:num_bytes], self._rest[padded:]
        return data


_regions = Regions()


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """A contiguous, undefined CPU tensor on a cache line, in huge pages if there are any."""
    num_bytes = math.prod(shape) * dtype.itemsize
    data = _taken(num_bytes) if num_bytes and _ADVICE is not None else None
    if data is None:
        return torch.empty(shape, dtype=dtype)
    return data.view(dtype).view(shape)


@torch.inference_mode(False)
def packed(parts: Sequence[BlockRows]) -> Tensor | None:
    """The bytes of a matrix of these parts that was packed early; None if there is none."""
    origins = [one.origin for one in parts if one.origin is not None]
    if early.pages is None or len(origins) < len(parts):
        return None
    found = early.pages.take_packed(origins)
    return None if found is None else torch.frombuffer(found, dtype=torch.uint8)


def zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor of zeros. On a CPU, only the written pages of a large one take memory.
    They are ordinary pages: one token's keys and values are stored separately for each layer and
    head, and a huge page for each would be most of the arena. Raises MemoryError or OSError."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LAZY_BYTES or device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


# Other models get parts of the same region, whatever mode it was opened in.
@torch.inference_mode(False)
def _taken(num_bytes: int) -> Tensor | None:
    part = None if early.pages is None else early.pages.take(num_bytes)
    if part is not None:
        return torch.frombuffer(part, dtype=torch.uint8)
    large = num_bytes > _REGION_BYTES // 4
    return _region(num_bytes) if large else _regions.part(num_bytes)


def _region(num_bytes: int) -> Tensor | None:
    """Memory on a boundary of a huge page, freed with its last tensor; None if refused."""
    if _ADVICE is None:
        raise ContractError("this system does not support madvise for huge pages")
    size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, size + PAGE_BYTES, flags=flags)
        data = torch.frombuffer(memory, dtype=torch.uint8)
        first = -data.data_ptr() % PAGE_BYTES
        # A rest of less than half a page would take a whole one: it lies in ordinary pages.
        num_huge = (num_bytes + PAGE_BYTES // 2) // PAGE_BYTES * PAGE_BYTES
        if num_huge:
            memory.madvise(_ADVICE, first, num_huge)
        if num_huge < size:
            memory.madvise(mmap.MADV_NOHUGEPAGE, first + num_huge)
    except OSError:
        return None
    if len(nodes := memory_nodes()) > 1:
        spread(data[first : first + size], nodes)
    return data[first : first + num_bytes]


def spread(data: Tensor, nodes: Sequence[int]) -> bool:
    """Make the system allocate the pages of `data` on NUMA nodes in turn, so that a pass has the
    bandwidth of all nodes whichever thread wrote the data. `data` begins on a page boundary and was
    not written to. Return True on success: a container may forbid it."""
    number = _MBIND.get(platform.machine())
    if number is None or max(nodes) >= _MASK_BITS:
        return False
    mask = sum(1 << node for node in nodes).to_bytes(_MASK_BITS // 8, "little")
    arguments = (data.data_ptr(), data.numel(), _INTERLEAVE, mask, _MASK_BITS + 1, 0)
    types = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int, ctypes.c_char_p, ctypes.c_ulong)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, *types, ctypes.c_uint)
    if call(number, *arguments):
        _log.debug("Weights stay on one NUMA node: errno %d.", ctypes.get_errno())
        return False
    return True
