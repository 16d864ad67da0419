"""What a process uses while a benchmark runs: a thread that looks every 0.2 seconds.

What cannot be measured here is None, never 0. CPU time is that of this process with all its
threads, in percent of one core, so two busy cores are 200. The GPU's own figures are those of NVML,
asked through torch: utilisation is the share of time in which any kernel ran, by whomever. Free
tokens are those of an arena, when a callable for them is given.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.files import Kind, read_text

INTERVAL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Reading:
    """`seconds` since the monitor was entered. CPU percent is over the time since the reading
    before; the others are of the moment."""

    seconds: float
    cpu_percent: float | None = None
    rss_bytes: int | None = None
    free_tokens: int | None = None
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """All readings, in order. `gpu_why_not` says why there is none of the GPU, if so."""

    readings: tuple[Reading, ...]
    gpu_why_not: str | None

    def series(self, name: str) -> list[float]:
        """The values of one field that were measured."""
        values = (getattr(reading, name) for reading in self.readings)
        return [value for value in values if value is not None]

    def summary(self) -> dict[str, float | None]:
        """Means of percentages, the most memory, the least room; None for what nobody measured.

        `cpu_percent` is the mean over time. `rss_growth_bytes` is the most resident memory less
        that of the first reading.
        """
        resident = self.series("rss_bytes")
        return {
            "seconds": self.readings[-1].seconds if self.readings else 0.0,
            "cpu_percent": self._cpu(),
            "peak_rss_bytes": max(resident, default=None),
            "rss_growth_bytes": max(resident) - resident[0] if resident else None,
            "least_free_tokens": min(self.series("free_tokens"), default=None),
            "gpu_percent": _mean(self.series("gpu_percent")),
            "peak_gpu_percent": max(self.series("gpu_percent"), default=None),
            "peak_gpu_memory_bytes": max(self.series("gpu_memory_bytes"), default=None),
        }

    def to_dict(self) -> dict[str, object]:
        """`series` by field, an entry a reading."""
        return {
            "summary": self.summary(),
            "gpu_why_not": self.gpu_why_not,
            "series": {
                item.name: [getattr(reading, item.name) for reading in self.readings]
                for item in fields(Reading)
            },
        }

    def rows(self) -> list[dict[str, object]]:
        """A row a reading, for a CSV file."""
        return [asdict(reading) for reading in self.readings]

    def _cpu(self) -> float | None:
        """A mean over time: readings may be late on a busy machine."""
        spans = [
            (after.seconds - before.seconds, after.cpu_percent)
            for before, after in zip(self.readings, self.readings[1:], strict=False)
        ]
        total = sum(span for span, percent in spans if percent is not None)
        if total <= 0:
            return None
        return sum(span * percent for span, percent in spans if percent is not None) / total


def resident_bytes(path: Path = Path("/proc/self/statm")) -> int | None:
    """What this process holds in memory now; None where the system has no such file."""
    try:
        pages = read_text(path, Kind.SYSTEM).split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Gauges:
    """Where readings come from: seconds of CPU time so far, resident bytes, percent and bytes of
    the GPU. A gauge answers None where there is nothing to read."""

    cpu_seconds: Callable[[], float | None] = time.process_time
    rss_bytes: Callable[[], int | None] = resident_bytes
    gpu: Callable[[], tuple[float | None, int | None]] = lambda: (None, None)
    gpu_why_not: str | None = None


class Monitor:
    """While entered, reads all gauges again and again; `usage` holds what was read.

    with Monitor(free_tokens=lambda: llm.free_tokens) as monitor:
        ...
    print(monitor.usage.summary())

    The first reading is taken on entering and the last one on leaving, so even a short run has two.
    """

    def __init__(
        self,
        *,
        free_tokens: Callable[[], int] | None = None,
        gauges: Gauges | None = None,
        interval_seconds: float = INTERVAL_SECONDS,
        clock: Clock = HOST_CLOCK,
    ) -> None:
        self._gauges = gauges or machine_gauges()
        self._free_tokens, self._interval, self._clock = free_tokens, interval_seconds, clock
        self._readings: list[Reading] = []
        self._leaving = Event()
        self._thread = Thread(target=self._watch, name="outrider-monitor", daemon=True)
        self._began = 0.0
        self._cpu_before: tuple[float, float | None] = 0.0, None

    @property
    def usage(self) -> Usage:
        return Usage(tuple(self._readings), self._gauges.gpu_why_not)

    def __enter__(self) -> Monitor:
        self._began = self._clock()
        self._read()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leaving.set()
        self._thread.join()
        self._read()

    def _watch(self) -> None:
        while not self._leaving.wait(self._interval):
            self._read()

    def _read(self) -> None:
        now, cpu = self._clock() - self._began, self._gauges.cpu_seconds()
        before, cpu_before = self._cpu_before
        percent = None
        if cpu is not None and cpu_before is not None and now > before:
            percent = 100 * (cpu - cpu_before) / (now - before)
        self._cpu_before = now, cpu
        gpu_percent, gpu_bytes = self._gauges.gpu()
        self._readings.append(
            Reading(
                seconds=now,
                cpu_percent=percent,
                rss_bytes=self._gauges.rss_bytes(),
                free_tokens=None if self._free_tokens is None else self._free_tokens(),
                gpu_percent=gpu_percent,
                gpu_memory_bytes=gpu_bytes,
            )
        )


def machine_gauges() -> Gauges:
    """Those of this machine. torch is asked for a GPU only here."""
    import torch

    if not torch.cuda.is_available():
        return Gauges(gpu_why_not="there is no CUDA device")
    reason = None
    try:
        torch.cuda.utilization()
    except _nvml_errors() as error:
        reason = f"NVML cannot be asked: {error}"

    def gpu() -> tuple[float | None, int | None]:
        free, total = torch.cuda.mem_get_info()
        return (None if reason else float(torch.cuda.utilization())), total - free

    return Gauges(gpu=gpu, gpu_why_not=reason)


def _nvml_errors() -> tuple[type[Exception], ...]:
    """What asking may raise: torch's own, and those of the library that it asks through."""
    try:
        library = import_module("pynvml")
    except ImportError:
        return ImportError, RuntimeError
    return ImportError, RuntimeError, library.NVMLError


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
