"""Which hardware threads this process may use, and how large the caches above them are."""

from __future__ import annotations

import os
from pathlib import Path

from outrider.core.files import Kind, read_text

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def hardware_threads() -> tuple[int, ...]:
    """Their numbers, in order."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0)))


def cache_bytes() -> dict[int, int]:
    """Bytes of the first core's data caches by level; empty where the system does not tell."""
    found: dict[int, int] = {}
    for folder in _CACHES.glob("index*"):
        try:
            level, kind, size = (
                read_text(folder / name, Kind.SYSTEM).strip() for name in ("level", "type", "size")
            )
            if kind != "Instruction":
                found[int(level)] = int(size[:-1]) * _UNITS[size[-1]]
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return dict(sorted(found.items()))


def last_cache_bytes() -> int:
    """Of the largest cache; 32 MiB where the system does not tell."""
    return max(cache_bytes().values(), default=32 << 20)
