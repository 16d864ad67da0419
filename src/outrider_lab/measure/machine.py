"""The machine that measures: its weights, its load meanwhile, and turns whose errors are results.

A fingerprint says which weights were measured: hashing gigabytes would take longer than many a
sweep, so of each weights file only its size, both ends and evenly spaced blocks between them are
read. That distinguishes checkpoints; it is no protection against a person who wants two files to
look the same.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import TYPE_CHECKING, Generic, TypeVar

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.errors import CheckpointError
from outrider.core.files import FileKind, open_regular, read_bytes, read_text
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.plugins.measure.turns import Neighbours, Score, Texts, cpu_name, rotated
from outrider_lab.measure.store import Plain

if TYPE_CHECKING:
    from outrider.api.llm import LLM


def new_run_id() -> str:
    """The time and a random number: sorts by time and is unique."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"


_BLOCK_BYTES = 64 * 1024
_NUM_BLOCKS = 16


def weights_digest(folder: Path) -> str:
    """12 hexadecimal digits of a hash of config.json and samples of every safetensors file, or of a
    GGUF file, the first if there are several.

    Raises CheckpointError for a folder without config.json.
    """
    checkpoint = open_checkpoint(folder)
    if not checkpoint.has(CONFIG):
        raise CheckpointError(
            f"{folder} has no config.json, so it is not a model.",
            hint="`outrider models list` shows those on this machine",
        )
    config = checkpoint.file(CONFIG)
    digest = hashlib.sha256(b"" if config is None else read_bytes(config, FileKind.CONFIG))
    for path in [folder] if checkpoint.is_gguf else sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        last = max(size - _BLOCK_BYTES, 0)
        with open_regular(path) as file:
            for i in range(_NUM_BLOCKS):
                file.seek(last * i // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:12]


def machine(device: str) -> dict[str, Plain]:
    """The properties that seconds depend on; `device` is a setting, resolved in the answer."""
    import torch

    from outrider.kernels.operators import pick_device

    kind = pick_device(device).type
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "device": kind,
        "gpu": torch.cuda.get_device_name() if kind == "cuda" else None,
    }


INTERVAL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Reading:
    """Values `seconds` after the monitor was entered. CPU percent is over the time since the
    reading before; the other values are of the moment."""

    seconds: float
    cpu_percent: float | None = None
    rss_bytes: int | None = None
    free_tokens: int | None = None
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Every reading, in order. `gpu_why_not` is the reason if there is none of the GPU."""

    readings: tuple[Reading, ...]
    gpu_why_not: str | None

    def series(self, name: str) -> list[float]:
        """The values of one field that were measured."""
        values = (getattr(reading, name) for reading in self.readings)
        return [value for value in values if value is not None]

    def summary(self) -> dict[str, float | None]:
        """Mean percentages, peak memory, least free tokens; None for unmeasured values.

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
        """The summary, and `series` by field with an entry per reading."""
        return {
            "summary": self.summary(),
            "gpu_why_not": self.gpu_why_not,
            "series": {
                item.name: [getattr(reading, item.name) for reading in self.readings]
                for item in fields(Reading)
            },
        }

    def rows(self) -> list[dict[str, object]]:
        """A row per reading, for a CSV file."""
        return [asdict(reading) for reading in self.readings]

    def _cpu(self) -> float | None:
        """Mean CPU percent over time, as readings may be late on a busy machine."""
        spans = [
            (after.seconds - before.seconds, after.cpu_percent)
            for before, after in zip(self.readings, self.readings[1:], strict=False)
        ]
        total = sum(span for span, percent in spans if percent is not None)
        if total <= 0:
            return None
        return sum(span * percent for span, percent in spans if percent is not None) / total


def resident_bytes(path: Path = Path("/proc/self/statm")) -> int | None:
    """Resident memory of this process; None if the system has no such file."""
    try:
        pages = read_text(path, FileKind.SYSTEM).split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Gauges:
    """Sources of readings: seconds of CPU time so far, resident bytes, percent and bytes of the
    GPU. A gauge returns None if there is nothing to read."""

    cpu_seconds: Callable[[], float | None] = time.process_time
    rss_bytes: Callable[[], int | None] = resident_bytes
    gpu: Callable[[], tuple[float | None, int | None]] = lambda: (None, None)
    gpu_why_not: str | None = None


class Monitor:
    """Reads all gauges again and again while entered; `usage` holds the readings. CPU percent is of
    one core, so two busy cores are 200; the GPU's utilisation is the share of time in which any
    kernel of any program ran, as NVML reports it. An unmeasurable value is None, never 0.

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

    def __exit__(self, *_: object) -> None:
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
    """The gauges of this machine. Only this function uses torch to find a GPU."""
    import torch

    if not torch.cuda.is_available():
        return Gauges(gpu_why_not="there is no CUDA device")
    reason = None
    try:
        torch.cuda.utilization()
    except _nvml_errors() as error:
        reason = f"NVML cannot be read: {error}"

    def gpu() -> tuple[float | None, int | None]:
        free, total = torch.cuda.mem_get_info()
        return (None if reason else float(torch.cuda.utilization())), total - free

    return Gauges(gpu=gpu, gpu_why_not=reason)


def _nvml_errors() -> tuple[type[Exception], ...]:
    """Errors that a query may raise: torch's own, and those of the library below it."""
    try:
        library = import_module("pynvml")
    except ImportError:
        return ImportError, RuntimeError
    return ImportError, RuntimeError, library.NVMLError


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


# Contestants that take turns: two or more methods for the same work, timed in alternation.
#
# Every contestant runs every piece of work once before the next piece begins, in an order that
# rotates from visit to visit, so that drift of the machine (clock, neighbours, caches) falls on all
# alike. Results are ratios within visits; seconds are stored for the record only.
C = TypeVar("C")
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Visit(Generic[R]):
    """The result of each contestant's turn, in the order of the contestants, not of their turns.
    `foreign_cpu_share` is the CPU share of other programs meanwhile (machine.py)."""

    results: Sequence[R]
    foreign_cpu_share: float | None


def visit(contestants: Sequence[C], turn: int, run: Callable[[C], R]) -> Visit[R]:
    """Let every contestant `run` once, in rotated order beginning with number `turn`."""
    found: dict[int, R] = {}
    with Neighbours() as neighbours:
        for number in rotated(range(len(contestants)), turn):
            found[number] = run(contestants[number])
    return Visit([found[number] for number in range(len(contestants))], neighbours.share)


def in_turns(groups: Iterable[Sequence[T]]) -> list[T]:
    """The first of every group, then the second of every group, and so on."""
    return [one for row in zip_longest(*groups) for one in row if one is not None]


@dataclass(frozen=True, slots=True)
class Attempt(Generic[R]):
    """The result of a turn: its `value`, or the `reason` for which there is none."""

    value: R | None
    reason: str | None
    seconds: float


def attempt(work: Callable[[], R], clock: Callable[[], float] = perf_counter) -> Attempt[R]:
    """Run and time `work`. One contestant must not end hours of others: any error becomes the
    reason of its attempt, and only an interrupt passes through."""
    began = clock()
    try:
        value = work()
    except Exception as error:  # noqa: BLE001 - see above
        return Attempt(None, f"{type(error).__name__}: {error}", clock() - began)
    return Attempt(value, None, clock() - began)


def different_tokens(ours: Texts, theirs: Texts, name: str, more: str = "") -> str | None:
    """The reason of a failed sample whose tokens must be those of the contestant `name` and are
    not, followed by `more`. None if they are the same."""
    for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if tuple(a) != tuple(b):
            differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            token = next(differing, min(len(a), len(b)))
            where = f"token {token}" if len(theirs) == 1 else f"token {token} of prompt {row}"
            return f"DifferentTokens: not those of {name} from {where} on{more}"
    return None


def facts_of(llm: LLM) -> dict[str, object]:
    """Facts about a loaded contestant, for the record of a run."""
    return {
        "drafter": llm.drafter,
        "kernels": {choice.op: choice.name for choice in llm.kernels.choices},
        "row_exact_kernels": llm.kernels.exact,
        "notes": list(llm.notes),
    }


def digest_of(texts: Texts) -> str:
    """12 hexadecimal digits of a hash of token ids: equal for two runs with equal texts."""
    return hashlib.sha256(json.dumps([list(ids) for ids in texts]).encode()).hexdigest()[:12]


def best(scores: Mapping[str, Score], names: Sequence[str]) -> str:
    """The fastest of `names`."""
    return max(names, key=lambda name: scores[name].tokens_per_second)
