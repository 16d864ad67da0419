"""Memory that is not needed: Python's collector of garbage, and what the allocator keeps."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """A collection within would look at all of torch, a tenth of a second, and find nothing. Also a
    decorator."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def give_back() -> None:
    """Let the operating system have what was freed; of glibc's allocator, which keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
