"""Memory for weights, which a thread takes from the system while modules are imported.

The system zeroes a page when it is first written, and may have to collect small pages to a huge one
before. For a large model that takes about as long as its packing. PyTorch's import keeps one core
busy for longer than both. So a thread on another core packs a file's matrices into the pages
meanwhile (models/gguf/packing.py), or writes zeros where it cannot pack.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from outrider.core.files import available_bytes, group_limits

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE = 2 << 20
_ALIGNMENT = 64
# Written at once: the first part waits for one step at most.
_STEP = 16 << 20
# Seconds after which modules that are imported leave the interpreter's lock to the thread, which
# needs it for a moment between two matrices.
_LOCK_SECONDS = 5e-4
# Small models start without; more than a share of the free memory is left to the plan, which says
# what does not fit.
_LEAST_BYTES = 128 << 20
_SHARE = 0.5
# A block takes a little more in memory than in a file (models/gguf/blocks.py). Not all bytes of a
# file are written early, so that no page is written that no weight takes.
_GROWTH, _WRITTEN = 1.04, 0.95


# Rows of a file: its key (models/gguf/reader.py), their first byte there, and the order of rows as
# bytes of an int32 each, if it is another one.
Origin = tuple[str, int, bytes]


class Pages:
    """`num_bytes` of zeros in huge pages, of which parts are taken from the first one on. Until the
    first part is taken, a thread calls `packs`, which packs matrices, and writes zeros to the rest
    of the first `num_early` bytes. So only its owner writes to a part."""

    def __init__(
        self, num_bytes: int, num_early: int, packs: Callable[[Pages], None] | None = None
    ) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, -(-num_bytes // _HUGE + 1) * _HUGE + _HUGE, flags=flags)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._at = -self._start % _HUGE
        self._end = self._at + -(-num_bytes // _HUGE) * _HUGE
        self._memory.madvise(mmap.MADV_HUGEPAGE, self._at, self._end - self._at)
        self._written, self._last = self._at, self._at + num_early
        # Those that are not taken: by the origins of their parts, where they begin and end.
        self._packed: dict[tuple[Origin, ...], tuple[int, int]] = {}
        self._packs = packs
        self._waits = True
        self._thread = Thread(target=self._prepare, name="outrider-pages", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        if self._packs is not None:
            before = sys.getswitchinterval()
            sys.setswitchinterval(min(before, _LOCK_SECONDS))
            try:
                # The model's own loading meets what is wrong with a file, and reports it.
                with suppress(Exception):
                    self._packs(self)
            finally:
                sys.setswitchinterval(before)
        for at in range(self._at, self._last, _STEP):
            if not self._waits:
                return
            # Without the interpreter's lock.
            ctypes.memset(self._start + at, 0, min(_STEP, self._last - at))
            self._written = min(at + _STEP, self._last)

    @property
    def unused(self) -> tuple[int, int]:
        """Bytes that no part has: those that were written, and all."""
        packed = sum(end - start for start, end in [*self._packed.values()])
        return packed + max(0, self._written - self._at), packed + self._end - self._at

    def pack(self, origins: Sequence[Origin], num_bytes: int, write: Callable[[int], None]) -> bool:
        """Have `write` pack the matrix of these parts, at an address. False if the thread is to
        stop, or less is left. Only the thread may call it."""
        start = self._at
        if not self._waits or num_bytes > self._end - start:
            return False
        self._at += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        write(self._start + start)
        self._packed[tuple(origins)] = start, start + num_bytes
        return True

    def take_packed(self, origins: Sequence[Origin]) -> memoryview | None:
        """The packed matrix of these parts, if the thread packed it. Matrices with one of the parts
        among others are freed, since they are packed again."""
        self._stop()
        found = self._packed.pop(tuple(origins), None)
        if found is not None:
            return memoryview(self._memory)[slice(*found)]
        rows = {one[:2] for one in origins}
        for others in [key for key in self._packed if any(one[:2] in rows for one in key)]:
            self._free(*self._packed.pop(others))
        return None

    def take(self, num_bytes: int) -> memoryview | None:
        """A part that begins at a cache line; None if less is left."""
        self._stop()
        at = self._at
        if num_bytes > self._end - at:
            return None
        self._at += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return memoryview(self._memory)[at : at + num_bytes]

    def release(self) -> None:
        """Return the pages that no part has; the others are freed with the last part."""
        self._stop()
        for start, end in self._packed.values():
            self._free(start, end)
        self._packed.clear()
        self._free(self._at, self._end)
        self._at = self._end

    def _free(self, start: int, end: int) -> None:
        """Return the pages that lie between two bytes as a whole."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE
        if first < last * mmap.PAGESIZE:
            self._memory.madvise(mmap.MADV_DONTNEED, first, last * mmap.PAGESIZE - first)

    def _stop(self) -> None:
        self._waits = False
        self._thread.join()


# Those of the model that is being loaded.
pages: Pages | None = None


def begin(model: str, pack: Callable[[Path, Pages], None] | None = None) -> None:
    """Have `pages` for the weights of a file or folder until `end`; for any other name, and where
    the machine gains nothing, have none. A file's matrices are packed with `pack` meanwhile."""
    global pages  # noqa: PLW0603 - many modules allocate weights, and one model is loaded
    end()
    with suppress(OSError, ValueError, RuntimeError):
        path = Path(model)
        packs = partial(pack, path) if pack is not None and path.is_file() else None
        pages = _made(weights_in(path), packs)


def end() -> None:
    """Have no `pages`; the unused ones are returned."""
    global pages
    found, pages = pages, None
    if found is not None:
        found.release()


def load_library() -> None:
    """Load PyTorch's largest library on another thread, unless it is loaded. PyTorch's import would
    hold the interpreter's lock meanwhile."""
    found = None if "torch" in sys.modules else find_spec("torch")
    if found is None or found.origin is None or len(os.sched_getaffinity(0)) == 1:
        return
    folder = Path(found.origin).with_name("lib")
    library = folder / "libtorch_cpu.so"
    # With CUDA, PyTorch first loads libraries of other packages.
    if library.is_file() and not (folder / "libtorch_cuda.so").exists():
        # A call of a C function lets the lock go, other than CDLL.
        load = ctypes.CDLL(None).dlopen
        load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        name = os.fsencode(library)
        Thread(target=load, args=(name, os.RTLD_NOW), name="outrider-library", daemon=True).start()


@contextmanager
def pages_for(model: str, pack: Callable[[Path, Pages], None] | None = None) -> Generator[None]:
    """A context with `pages` for the weights of `model`, as `begin` makes them."""
    begin(model, pack)
    try:
        yield
    finally:
        end()


def weights_in(path: Path) -> int:
    """Bytes of the weight files of a model; 0 for a name that is no path of one."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return path.stat().st_size if path.suffix == ".gguf" and path.is_file() else 0


def _made(num_bytes: int, packs: Callable[[Pages], None] | None) -> Pages | None:
    num_early, num_bytes = int(num_bytes * _WRITTEN), int(num_bytes * _GROWTH)
    free = [available_bytes(), *(limit - used for limit, used in group_limits())]
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    # Pages of several nodes lie on all of them in turn (kernels/native/huge_pages.py).
    is_worth = _LEAST_BYTES <= num_bytes <= _SHARE * min(free)
    if _ADVICE is None or not is_worth or len(nodes) > 1 or len(os.sched_getaffinity(0)) == 1:
        return None
    return Pages(num_bytes, num_early, packs)
