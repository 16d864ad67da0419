"""What the sections measure on and with: a device, shapes that fit it, medians of its time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.kernels.operators import DTYPES
from outrider.plugins.measure.timers import DeviceTimer, synced_seconds
from outrider.plugins.measure.turns import Texts, rotated
from outrider_lab.models.inflate import SHAPES, ModelShape

ROOT = Path(__file__).resolve().parents[2]
# Llama 3 has so many tokens; the accept step is measured at this size.
VOCABULARY = 128_256


class NotRunError(Exception):
    """This section cannot be run here; the message is why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`quick` means sizes that a CPU runs in seconds: a test of the sections, no measurement.
    `precision` names the dtype of weights, where it is not the device's usual one."""

    device: torch.device
    quick: bool
    precision: str = ""

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        if self.precision:
            return DTYPES[self.precision]
        return torch.bfloat16 if self.on_cuda else torch.float32

    @property
    def shapes(self) -> dict[str, ModelShape]:
        """Tier B and C shapes by name; a quick run has one that is hardly a shape at all."""
        if self.quick:
            return {"tiny": ModelShape(256, 8, 4, 2, 704)}
        return {name: SHAPES[name] for name in ("1b", "8b")}

    @property
    def repeats(self) -> int:
        return 1 if self.quick else 20

    @property
    def schemes(self) -> tuple[str, ...]:
        return ("none", "int4") if self.quick else ("none", "int8", "int4")

    @property
    def rounds(self) -> int:
        """Launches that one timing covers."""
        return 1 if self.quick else 32

    @property
    def vocabulary(self) -> int:
        return 512 if self.quick else VOCABULARY

    def need_cuda(self, why: str) -> None:
        """Raises NotRunError elsewhere."""
        if not self.on_cuda:
            raise NotRunError(f"{why} need a CUDA device")

    def need_triton(self) -> None:
        """Raises NotRunError where Triton is not installed, or its interpreter, which a CPU needs,
        fails at a kernel that adds numbers up."""
        try:
            # Imported here: the file defines a Triton kernel.
            from gpu_check import reading_kernel
        except ImportError as error:
            raise NotRunError(f"Triton cannot be imported: {error}") from error
        if self.on_cuda:
            return
        try:
            total = reading_kernel.read(torch.ones(5, dtype=torch.int32), 1)
        except Exception as error:
            last = str(error).strip().splitlines() or [""]
            raise NotRunError(f"Triton's interpreter fails here: {last[-1]}") from error
        if total.tolist() != [5]:
            raise NotRunError(f"Triton's interpreter adds five ones up to {total.tolist()}")


def cell(record: dict[str, Any], **values: object) -> None:
    """Note a row of the section's table."""
    record.setdefault("cells", []).append(values)


def check(record: dict[str, Any], name: str, *, passed: bool, detail: str = "") -> None:
    """Note a check: a section that has one that fails has failed, and goes on."""
    record.setdefault("checks", []).append({"name": name, "passed": passed, "detail": detail})


def check_same(
    record: dict[str, Any], name: str, texts: Texts, plain: Texts, *, exact: bool
) -> int:
    """How many texts are those of `plain`; with `exact` kernels all must be. Where kernels are not
    row-invariant a difference is a near-tie that fell the other way, and no check fails."""
    same = sum(tuple(a) == tuple(b) for a, b in zip(texts, plain, strict=True))
    if exact:
        check(record, name, passed=same == len(plain), detail=f"{same} of {len(plain)}")
    return same


def seconds_of(work: Callable[[], object], setting: Setting, *, calls: int = 1) -> float:
    """Median seconds of one call of `work`, timed over `calls` at a time, after a warm-up."""
    return race({"": work}, setting, calls=calls)[""]


def race(
    contestants: Mapping[str, Callable[[], object]], setting: Setting, *, calls: int = 1
) -> dict[str, float]:
    """Median seconds of each; they take turns, in an order that rotates."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for work in contestants.values():
        work()
    for repeat in range(setting.repeats):
        for name in rotated(list(contestants), repeat):
            synced_seconds(setting.device)
            with DeviceTimer(setting.device) as timer:
                for _ in range(calls):
                    contestants[name]()
            found[name].append(timer.elapsed_ms / 1e3 / calls)
    return {name: statistics.median(times) for name, times in found.items()}
