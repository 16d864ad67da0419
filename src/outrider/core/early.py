"""Memory for weights, taken from the system while modules are imported.

The system zeroes a page when it is first written, and may have to collect small pages to a huge one
before. For a large model that takes about as long as its packing. PyTorch's import keeps one core
busy for longer, so a thread on another core writes to the pages meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from outrider.core.files import available_bytes, group_limits

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE = 2 << 20
_ALIGNMENT = 64
# Written at once: the first part waits for one step at most.
_STEP = 16 << 20
# Small models start without; more than a share of the free memory is left to the plan, which says
# what does not fit.
_LEAST_BYTES = 128 << 20
_SHARE = 0.5
# A block takes a little more in memory than in a file (models/gguf/blocks.py). Not all bytes of a
# file are written early, so that no page is written that no weight takes.
_GROWTH, _WRITTEN = 1.04, 0.95


class Pages:
    """`num_bytes` of zeros in huge pages, of which parts are taken from the first one on. A thread
    writes to the first `num_early` of them until the first part is taken, so that only its owner
    writes to a part."""

    def __init__(self, num_bytes: int, num_early: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, -(-num_bytes // _HUGE + 1) * _HUGE + _HUGE, flags=flags)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._at = -self._start % _HUGE
        self._end = self._at + -(-num_bytes // _HUGE) * _HUGE
        self._memory.madvise(mmap.MADV_HUGEPAGE, self._at, self._end - self._at)
        self._written, self._last = self._at, self._at + num_early
        self._waits = True
        self._thread = Thread(target=self._write, name="outrider-pages", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        for at in range(self._at, self._last, _STEP):
            if not self._waits:
                return
            # Without the interpreter's lock.
            ctypes.memset(self._start + at, 0, min(_STEP, self._last - at))
            self._written = min(at + _STEP, self._last)

    @property
    def unused(self) -> tuple[int, int]:
        """Bytes that no part has: those that were written, and all."""
        return max(0, self._written - self._at), self._end - self._at

    def take(self, num_bytes: int) -> memoryview | None:
        """A part that begins at a cache line; None if less is left."""
        self._stop()
        at = self._at
        if num_bytes > self._end - at:
            return None
        self._at += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return memoryview(self._memory)[at : at + num_bytes]

    def release(self) -> None:
        """Return the pages behind the last part; the others are freed with the last part."""
        self._stop()
        first = -(-self._at // mmap.PAGESIZE) * mmap.PAGESIZE
        if first < self._end:
            self._memory.madvise(mmap.MADV_DONTNEED, first, self._end - first)
        self._at = self._end

    def _stop(self) -> None:
        self._waits = False
        self._thread.join()


# Those of the model that is being loaded.
pages: Pages | None = None


def begin(model: str) -> None:
    """Have `pages` for the weights of a file or folder until `end`; for any other name, and where
    the machine gains nothing, have none."""
    global pages  # noqa: PLW0603 - many modules allocate weights, and one model is loaded
    end()
    with suppress(OSError, ValueError, RuntimeError):
        pages = _made(weights_in(Path(model)))


def end() -> None:
    """Have no `pages`; the unused ones are returned."""
    global pages
    found, pages = pages, None
    if found is not None:
        found.release()


@contextmanager
def pages_for(model: str) -> Generator[None]:
    """A context with `pages` for the weights of `model`."""
    begin(model)
    try:
        yield
    finally:
        end()


def weights_in(path: Path) -> int:
    """Bytes of the weight files of a model; 0 for a name that is no path of one."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return path.stat().st_size if path.suffix == ".gguf" and path.is_file() else 0


def _made(num_bytes: int) -> Pages | None:
    num_early, num_bytes = int(num_bytes * _WRITTEN), int(num_bytes * _GROWTH)
    free = [available_bytes(), *(limit - used for limit, used in group_limits())]
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    # Pages of several nodes lie on all of them in turn (kernels/native/huge_pages.py).
    is_worth = _LEAST_BYTES <= num_bytes <= _SHARE * min(free)
    if _ADVICE is None or not is_worth or len(nodes) > 1 or len(os.sched_getaffinity(0)) == 1:
        return None
    return Pages(num_bytes, num_early)
