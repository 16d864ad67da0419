"""Measured memory of a run: peaks of the process, of CUDA and of MPS.

CUDA's allocator keeps a peak that can be reset, so each stretch has its own. An operating system
keeps a peak of the whole process that cannot: a stretch that raised it held just that much, any
other is known by what it held at its end. MPS tells what is held and no peak.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Protocol

import torch

from outrider.core.files import FileKind, read_bytes

_STATUS = Path("/proc/self/status")


class Gauge(Protocol):
    """Bytes held by one allocator."""

    def take(self) -> int:
        """The most since the last call, as far as it can be told."""
        ...

    def peak(self) -> int | None:
        """The most so far; None where nobody counts it."""
        ...


class ProcessGauge:
    """Resident memory of this process, of which models and arena are a part."""

    def __init__(self) -> None:
        self._high = _resident_bytes()[1]

    def take(self) -> int:
        now, high = _resident_bytes()
        raised, self._high = high > self._high, high
        return high if raised else now

    def now(self) -> int:
        return _resident_bytes()[0]

    def peak(self) -> int:
        return _resident_bytes()[1]


class CudaGauge:
    """Tensors of this process on a CUDA device. Taking resets the allocator's own peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest = 0

    def take(self) -> int:
        held = torch.cuda.max_memory_allocated(self._device)
        self._highest = max(self._highest, held)
        torch.cuda.reset_peak_memory_stats(self._device)
        return held

    def peak(self) -> int:
        return max(self._highest, torch.cuda.max_memory_allocated(self._device))


class MpsGauge:
    """What Metal gave to this process."""

    def take(self) -> int:
        return torch.mps.driver_allocated_memory()

    def peak(self) -> None:
        return None


class MemoryWatch:
    """One LLM's memory: while loading, and in each pass.

    Only an `active` watch, that of a profile, asks for those: asking resets what CUDA counts. The
    peak is there for every result.
    """

    def __init__(self, gauge: Gauge, *, active: bool) -> None:
        self._gauge = gauge
        self._active = active
        self._load_bytes = gauge.take() if active else 0
        self._pass_index: int | None = None
        self._pass_bytes = 0

    @property
    def peak_bytes(self) -> int | None:
        """The most that was held so far, by this process and whatever it did; None if unknown."""
        return self._gauge.peak()

    @property
    def load_bytes(self) -> int:
        """The most that was held between the watch's making and `end_load`."""
        return self._load_bytes

    def end_load(self) -> None:
        if self._active:
            self._load_bytes = self._gauge.take()

    def during(self, pass_index: int) -> int:
        """The most that was held in this pass, to be asked at its end; 0 from an idle watch.

        Sequences that shared the pass get one answer.
        """
        if self._active and pass_index != self._pass_index:
            self._pass_index, self._pass_bytes = pass_index, self._gauge.take()
        return self._pass_bytes


def gauge(device: torch.device) -> Gauge:
    """The allocator that `device` takes its tensors from."""
    match device.type:
        case "cuda":
            return CudaGauge(device)
        case "mps":
            return MpsGauge()
        case _:
            return ProcessGauge()


def _resident_bytes() -> tuple[int, int]:
    """Held now, and at most so far. Where there is no /proc, the latter stands for both."""
    try:
        lines = read_bytes(_STATUS, FileKind.SYSTEM).splitlines()
    except OSError:
        high = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        high *= 1 if sys.platform == "darwin" else 1024
        return high, high
    pairs = (line.split(b":", 1) for line in lines if line.startswith((b"VmRSS", b"VmHWM")))
    sizes = {name: 1024 * int(value.split()[0]) for name, value in pairs}
    return sizes[b"VmRSS"], max(sizes.values())
