"""Packing of a GGUF file's matrices while other modules are imported (core/early.py).

Nothing here imports PyTorch. A thread packs matrices as most decoders read them: q, k and v as one,
and so gate and up. The loader finds a matrix by its parts and the orders of their rows, so that it
takes none that it would pack otherwise. It packs all others itself.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.core import env
from outrider.core.config import EngineConfig
from outrider.core.early import Pages
from outrider.kernels.native.build import built_kernels, must_compile
from outrider.models.gguf.architectures import PAIRED, sizes_of
from outrider.models.gguf.blocks import TensorType, codebook, has_codebook
from outrider.models.gguf.config import Sizes
from outrider.models.gguf.reader import Entry, file_key, header_of, map_file

# Parts of a packed matrix begin at a cache line (kernels/native/ops.py).
_ALIGNMENT = 64
# The first part of matrices that decoders read as one, and the others.
_FUSED = {
    "attn_q": ("attn_k", "attn_v"),
    "ffn_gate": ("ffn_up",),
    "ffn_gate_exps": ("ffn_up_exps",),
}


def packer_for(config: EngineConfig) -> Callable[[Path, Pages], None] | None:
    """`pack_early`; None if an engine of this configuration holds matrices in another format than
    their file does, or other processes hold them."""
    stays = config.quantise == "none" and config.dtype == "auto" and not config.force_reference
    return pack_early if stays and config.tensor_parallel == 1 else None


def pack_early(path: Path, pages: Pages) -> None:
    """Pack matrices of the file at `path` until `pages` waits no longer. Does nothing where kernels
    would have to be compiled first. Raises CheckpointError for a damaged file."""
    compiler, folder = env.compiler(), env.cache_folder()
    if must_compile(compiler, folder):
        return
    library = built_kernels(compiler, folder).library
    if library is not None:
        sizes = sizes_of(header_of(path))
        packer = _Packer(library, pages, sizes)
        for group in _groups(sizes):
            if not packer.pack(group):
                return


def _groups(sizes: Sizes) -> Iterator[Sequence[Entry]]:
    """The matrices that are packed, in the order of the file; those that decoders read as one are
    together."""
    entries, done = sizes.header.entries, set[str]()
    for own in sorted(entries.values(), key=lambda one: one.offset):
        part = _part(own.name)
        firsts = [_of(own.name, first) for first, others in _FUSED.items() if part in others]
        name = next((first for first in firsts if first in entries), own.name)
        if name in done:
            continue
        done.add(name)
        names = [name, *(_of(name, other) for other in _FUSED.get(_part(name), ()))]
        group = [entries[one] for one in names if one in entries]
        is_moved = _part(name) in sizes.row.transposed
        if not is_moved and all(
            one.kind.is_quantised and len(one.shape) in (2, 3) for one in group
        ):
            yield group


def _part(name: str) -> str:
    """`attn_q` of `blk.0.attn_q.weight`."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _of(name: str, part: str) -> str:
    """The name of another part of the same block."""
    return f"{name.rpartition('.')[0].rpartition('.')[0]}.{part}.weight"


class _Packer:
    """Packs on one thread: another core imports modules meanwhile."""

    def __init__(self, library: ctypes.CDLL, pages: Pages, sizes: Sizes) -> None:
        make, self._size = library.outrider_team, library.outrider_grouped_bytes
        self._pack = library.outrider_pack_grouped
        make.argtypes, make.restype = [c_int, c_void_p], c_void_p
        self._size.argtypes, self._size.restype = [c_int] * 3, c_int64
        self._pack.argtypes = [c_void_p, c_int, *[c_void_p] * 4, c_int, c_int]
        self._pack.restype = None
        self._team, self._pages, self._model = make(1, None), pages, sizes
        self._files: dict[Path, tuple[str, mmap.mmap]] = {}

    def pack(self, group: Sequence[Entry]) -> bool:
        """Pack the matrices of `group`, one after another for stacks of them. False if the pages
        are full, or no longer wait."""
        stack, num_in = group[0].shape[:-2], group[0].shape[-1]
        sizes = [self._size(one.kind.number, *one.shape[-2:]) for one in group]
        alike = all(one.shape[:-2] == stack and one.shape[-1] == num_in for one in group)
        if not alike or not all(sizes):
            return True
        ends = [*accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        count = prod(stack)
        for index in range(count):
            parts = [_Part.of(one, index, self._order(one)) for one in group]
            origins = [(self._file(one.path)[0], one.offset, one.order) for one in parts]
            write = partial(self._write, parts, [0, *ends[:-1]])
            if not self._pages.pack(origins, ends[-1], write):
                return False
        return True

    def _file(self, path: Path) -> tuple[str, mmap.mmap]:
        """The key of a file, as it was before it was mapped, and the file."""
        if path not in self._files:
            self._files[path] = file_key(path), map_file(path)
        return self._files[path]

    def _order(self, entry: Entry) -> NDArray[np.int32] | None:
        """The order of rows, as in `TensorSource.order` (checkpoint.py)."""
        num_out, size = entry.shape[-2], self._model.head_dim
        if not self._model.row.paired or _part(entry.name) not in PAIRED or num_out % size:
            return None
        order_H = np.arange(size).reshape(-1, 2).T.flatten()
        return np.arange(num_out).reshape(-1, size)[:, order_H].flatten().astype(np.int32)

    def _write(self, parts: Sequence[_Part], starts: Sequence[int], to: int) -> None:
        for one, start in zip(parts, starts, strict=True):
            (_, file), kind = self._file(one.path), one.kind
            raw = np.frombuffer(file, np.uint8, one.num_bytes, one.offset).ctypes.data
            book = codebook(kind.name) if has_codebook(kind.name) else None
            both = book, one.order_O
            values, order = (None if array is None else array.ctypes.data for array in both)
            self._pack(self._team, kind.number, raw, order, values, to + start, *one.shape)
            # The pages of the file would count as memory of this process.
            file.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One matrix of a tensor, of `num_bytes` bytes from `offset` on; `shape` is outputs, inputs.
    Output o is row `order_O[o]`, or row o if there is no order."""

    path: Path
    offset: int
    num_bytes: int
    kind: TensorType
    shape: tuple[int, ...]
    order_O: NDArray[np.int32] | None

    @classmethod
    def of(cls, entry: Entry, index: int, order_O: NDArray[np.int32] | None) -> _Part:
        """Matrix `index` of a tensor."""
        size, shape = entry.num_bytes // prod(entry.shape[:-2]), entry.shape[-2:]
        return cls(entry.path, entry.offset + index * size, size, entry.kind, shape, order_O)

    @property
    def order(self) -> bytes:
        return b"" if self.order_O is None else self.order_O.tobytes()
