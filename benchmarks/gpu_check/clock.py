"""Medians of device time: events on CUDA, the host's clock elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from gpu_check.setting import Setting

from outrider.api.profile import DeviceTimer, synced_seconds


def seconds_of(work: Callable[[], object], setting: Setting, *, calls: int = 1) -> float:
    """Median seconds of one call of `work`, timed over `calls` at a time, after a warm-up."""
    work()
    found: list[float] = []
    for _ in range(setting.repeats):
        synced_seconds(setting.device)
        with DeviceTimer(setting.device) as timer:
            for _ in range(calls):
                work()
        found.append(timer.elapsed_ms / 1e3 / calls)
    return statistics.median(found)


def race(
    contestants: Mapping[str, Callable[[], object]], setting: Setting, *, calls: int = 1
) -> dict[str, float]:
    """Median seconds of each; they take turns, in an order that rotates."""
    names = list(contestants)
    found: dict[str, list[float]] = {name: [] for name in names}
    for work in contestants.values():
        work()
    for repeat in range(setting.repeats):
        for turn in range(len(names)):
            name = names[(repeat + turn) % len(names)]
            with DeviceTimer(setting.device) as timer:
                for _ in range(calls):
                    contestants[name]()
            found[name].append(timer.elapsed_ms / 1e3 / calls)
    return {name: statistics.median(times) for name, times in found.items()}
