"""Release of unused memory: Python's garbage collector, and the allocator's free blocks."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """Suspend garbage collection. A collection would walk all objects of torch, a tenth of a
    second, and free nothing. Also a decorator."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def give_back() -> None:
    """Return freed memory to the operating system; glibc's allocator would hold on to it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
