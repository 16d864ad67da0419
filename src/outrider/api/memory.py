"""Memory: a check that a pair fits this machine, before allocation, and measured peaks of a run.

The parts (memory_parts.py) are compared with every limit of the machine (cache/pages.py). A KV
cache without a requested size shrinks until all fits; a pair that does not fit is refused, with the
parts and the settings under which it would. CUDA's allocator has a peak that can be reset, so each
stretch has its own. The peak of a process cannot be reset: if a stretch raised it, it is the
stretch's own, else the usage at the stretch's end counts. MPS reports usage and no peak.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from outrider.api.memory_parts import (
    Part,
    files_of,
    memory_parts,
    needed,
    tables_bytes,
    target_room,
)
from outrider.api.plan import LoadPlan
from outrider.cache.pages import ARENA_SHARE, MemoryLimit, limits, total_bytes
from outrider.core.config import EngineConfig
from outrider.core.errors import CapacityError
from outrider.core.fields import size
from outrider.core.files import FileKind, read_bytes
from outrider.engine.build import whole_pages
from outrider.kernels.kinds import pick_device
from outrider.models.hf_config import FAMILIES
from outrider.models.loading import spec_of_config

_STATUS = Path("/proc/self/status")


class Gauge(Protocol):
    """Bytes held by one allocator."""

    def take(self) -> int:
        """The peak since the last call, as far as it is known."""
        ...

    def peak(self) -> int | None:
        """The peak so far; None if it is not counted."""
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
    """Tensors of this process on a CUDA device. `take` resets the allocator's own peak."""

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
    """Memory that Metal allocated for this process."""

    def take(self) -> int:
        return torch.mps.driver_allocated_memory()

    def peak(self) -> None:
        return None


class MemoryWatch:
    """One LLM's memory: while loading, and in each pass.

    Only an `active` watch, that of a profile, reads those: reading resets CUDA's counter. The peak
    is there for every result.
    """

    def __init__(self, gauge: Gauge, *, active: bool) -> None:
        self._gauge = gauge
        self._active = active
        self._load_bytes = gauge.take() if active else 0
        self._pass_index: int | None = None
        self._pass_bytes = 0

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of this process so far, for any purpose; None if unknown."""
        return self._gauge.peak()

    @property
    def load_bytes(self) -> int:
        """Peak memory between the watch's creation and `end_load`."""
        return self._load_bytes

    def end_load(self) -> None:
        if self._active:
            self._load_bytes = self._gauge.take()

    def during(self, pass_index: int) -> int:
        """Peak memory in this pass, if called at its end; 0 from an inactive watch.

        Sequences of one pass get the same answer.
        """
        if self._active and pass_index != self._pass_index:
            self._pass_index, self._pass_bytes = pass_index, self._gauge.take()
        return self._pass_bytes


def gauge(device: torch.device) -> Gauge:
    """The gauge of the allocator of `device`."""
    match device.type:
        case "cuda":
            return CudaGauge(device)
        case "mps":
            return MpsGauge()
        case _:
            return ProcessGauge()


def _resident_bytes() -> tuple[int, int]:
    """Resident bytes now, and at most so far. Without /proc, the latter is both."""
    try:
        lines = read_bytes(_STATUS, FileKind.SYSTEM).splitlines()
    except OSError:
        high = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        high *= 1 if sys.platform == "darwin" else 1024
        return high, high
    pairs = (line.split(b":", 1) for line in lines if line.startswith((b"VmRSS", b"VmHWM")))
    sizes = {name: 1024 * int(value.split()[0]) for name, value in pairs}
    return sizes[b"VmRSS"], max(sizes.values())


# Largest share of an arena's memory, if its size is automatic, for tables of positions and lists of
# pages. Models of any size stay far below it; windows that no model has do not.
_TABLES_SHARE = 1 / 32
# A shrunk arena leaves a tenth of the free memory to others; advised settings leave more, as they
# must fit when they are tried.
_HEADROOM, _ADVISED = 0.9, 0.8
# The smallest useful arena: a short prompt and its answer.
_LEAST_TOKENS = 256


def fitted(plan: LoadPlan, *, has_weights: bool = False) -> tuple[LoadPlan, tuple[Part, ...]]:
    """`plan`, with a smaller arena if that alone makes it fit and its size is automatic, and with
    fewer requests at once if their number is automatic; and its parts. With `has_weights` another
    engine holds the target's. Raises CapacityError if it does not fit, CheckpointError if files are
    missing."""
    files = files_of(plan)
    bounds = _bounds(plan)
    parts_of = partial(memory_parts, files=files, has_weights=has_weights)

    def fits(tried: LoadPlan, share: float) -> bool:
        return not _lacking(parts_of(tried), bounds, share)

    def refuse(tried: LoadPlan) -> CapacityError:
        parts = parts_of(tried)
        ways = _ways(tried, lambda other: fits(other, _ADVISED))
        return _refusal(parts, _lacking(parts, bounds, 1.0)[0], next(ways, None))

    if plan.auto_batch:
        plan = _as_many_as_fit(plan, fits)
    if plan.settings.arena_tokens:
        if not fits(plan, 1.0):
            raise refuse(plan)
        return plan, parts_of(plan)
    least = replace(plan, num_slots=_least_slots(plan))
    if not fits(least, 1.0):
        raise refuse(least)
    plan = _with_small_tables(plan)
    if not fits(plan, 1.0):
        whole = plan.num_slots
        plan = _largest_arena(plan, lambda other: fits(other, _HEADROOM)) or least
        note = f"memory is short: the arena holds {plan.num_slots} tokens, not {whole}"
        plan = replace(plan, notes=(*plan.notes, note))
    return plan, parts_of(plan)


def _as_many_as_fit(plan: LoadPlan, fits: Callable[[LoadPlan, float], bool]) -> LoadPlan:
    """Halve the requests at once until the arena that fits holds a usual text for each."""
    while plan.settings.most_batch > 1:
        small = plan if plan.settings.arena_tokens else _with_small_tables(plan)
        if not fits(small, 1.0):
            small = _largest_arena(plan, lambda other: fits(other, _HEADROOM))
        if small is not None and small.holds_all:
            break
        plan = plan.with_batch(plan.settings.most_batch // 2)
    return plan


def _bounds(plan: LoadPlan) -> dict[str, tuple[MemoryLimit, ...]]:
    config = plan.settings
    home = config.device if config.drafter_device == "auto" else config.drafter_device
    names = {config.device, home if plan.model_folder is not None else config.device}
    devices = [pick_device(name) for name in names]
    return {str(device): limits(device, config.memory_share) for device in devices}


def _lacking(
    parts: Sequence[Part], bounds: Mapping[str, tuple[MemoryLimit, ...]], share: float
) -> list[tuple[int, MemoryLimit]]:
    """(bytes needed, limit) of limits with less than `share` left, the most exceeded ones first."""
    found: list[tuple[int, MemoryLimit]] = []
    for device, all_limits in bounds.items():
        own = [part for part in parts if part.device == device]
        for limit in all_limits:
            total = needed(own, of_addresses=limit.of_addresses)
            if total > limit.free * share:
                found.append((total, limit))
    return sorted(found, key=lambda one: one[1].free - one[0])


def _least_slots(plan: LoadPlan) -> int:
    """Slots that must fit: a requested context, or else a short text."""
    config = plan.settings
    least = plan.window if config.context else min(plan.window, _LEAST_TOKENS, plan.num_slots)
    return whole_pages(least, config.page_size)


def _largest_arena(plan: LoadPlan, fits: Callable[[LoadPlan], bool]) -> LoadPlan | None:
    """The largest arena of at most `plan.num_slots`, None if the smallest does not fit either."""
    size = plan.settings.page_size
    high = plan.num_slots // size
    low = min(_least_slots(plan) // size, high)
    if not fits(replace(plan, num_slots=low * size)):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if fits(replace(plan, num_slots=middle * size)):
            low = middle
        else:
            high = middle - 1
    return replace(plan, num_slots=low * size)


def _with_small_tables(plan: LoadPlan) -> LoadPlan:
    """Shrink the arena until its tables are small: unlike it, they are written whole at once."""
    config = plan.settings
    if config.context:
        return plan
    spec = spec_of_config(plan.target, config.dtype)
    whole = total_bytes(pick_device(config.device)) * config.memory_share
    most = whole * ARENA_SHARE * _TABLES_SHARE

    def fits(tried: LoadPlan) -> bool:
        return tables_bytes(spec, target_room(tried, None)) <= most

    return plan if fits(plan) else _largest_arena(plan, fits) or plan


def _ways(plan: LoadPlan, fits: Callable[[LoadPlan], bool]) -> Iterator[str]:
    """Flags under which it fits, the smallest changes first."""
    config = plan.settings
    if config.arena_tokens:
        found = _largest_arena(plan, fits)
        if found is not None:
            yield f"--arena-tokens {found.num_slots}"
    elif config.context:
        found = _largest_arena(plan.with_settings(replace(config, context=0)), fits)
        if found is not None and found.num_slots > config.most_k + 2:
            yield f"--context {min(found.num_slots, plan.window)}"
    steps = list(_steps(plan))
    for flag, how in steps:
        if fits(plan.with_settings(how)):
            yield flag
    # No single flag is enough: combine them one after another.
    flags: list[str] = []
    together = config
    for flag, how in _strongest(steps):
        flags.append(flag)
        changed = {
            name: getattr(how, name)
            for name in ("batch_size", "prefill_chunk", "quantise")
            if getattr(how, name) != getattr(config, name)
        }
        together = replace(together, **changed)
        small = plan.with_settings(together)
        if not config.arena_tokens:
            small = replace(small, num_slots=_least_slots(small))
        if fits(small):
            yield " ".join(flags)


def _steps(plan: LoadPlan) -> Iterator[tuple[str, EngineConfig]]:
    config = plan.settings
    for batch in _halves(config.most_batch, 1):
        yield f"--batch-size {batch}", replace(config, batch_size=batch)
    for chunk in _halves(config.prefill_chunk, 32):
        yield f"--prefill-chunk {chunk}", replace(config, prefill_chunk=chunk)
    if plan.target.family in FAMILIES and config.tensor_parallel == 1:
        order = ("none", "int8", "int4")
        for kind in order[order.index(config.quantise) + 1 :]:
            yield f"--quantise {kind}", replace(config, quantise=kind)


def _strongest(steps: Sequence[tuple[str, EngineConfig]]) -> Iterator[tuple[str, EngineConfig]]:
    """The last step of each flag."""
    last = {flag.split()[0]: (flag, how) for flag, how in steps}
    yield from last.values()


def _halves(count: int, least: int) -> Iterator[int]:
    while count // 2 >= least:
        count //= 2
        yield count


def table_of(parts: Sequence[Part]) -> str:
    """A line for each part that takes a megabyte or more."""
    shown = [part for part in parts if part.num_bytes >= 1_000_000 and part.when != "addresses"]
    width = max((len(part.name) for part in shown), default=0)
    return "\n".join(f"  {part.name:{width}}  {size(part.num_bytes):>9}" for part in shown)


def _refusal(
    parts: Sequence[Part], lacking: tuple[int, MemoryLimit], way: str | None
) -> CapacityError:
    total, limit = lacking
    other = "higher limit" if limit.of_addresses else "machine with more memory"
    loading = [part for part in parts if part.when != "loading"]
    return CapacityError(
        f"the models and their memory need {size(total)}, and {size(limit.free)} are left "
        f"({limit.name}):\n{table_of(loading)}",
        hint=way or f"a smaller model, or a {other}",
    )
