"""History of the last hour in steps of two seconds, for the dashboard and `outrider top`.

Percentiles of a step come from counts of durations in bins that grow by 5 %, so memory depends
neither on the number of requests nor on their length.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import to_builtins

from outrider.server.port import EngineStatus

STEP_SECONDS = 2.0
NUM_STEPS = 1800
_SHORTEST = 1e-6
_GROWTH = math.log(1.05)


class Durations:
    """Number of durations in each bin."""

    __slots__ = ("bins", "count")

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}
        self.count = 0

    def add(self, seconds: float) -> None:
        index = int(math.log(max(seconds, _SHORTEST) / _SHORTEST) / _GROWTH)
        self.bins[index] = self.bins.get(index, 0) + 1
        self.count += 1

    def percentile(self, percent: float) -> float | None:
        """Return the middle of the percentile's bin, at most 2.5 % off; None without a duration."""
        left = math.ceil(self.count * percent / 100)
        for index in sorted(self.bins):
            left -= self.bins[index]
            if left <= 0:
                return float(f"{_SHORTEST * math.exp((index + 0.5) * _GROWTH):.4g}")
        return None


@dataclass(slots=True)
class Step:
    """Counts within one step. `drafters` has drafted and accepted tokens of each drafter."""

    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_requests: int = 0
    num_refused: int = 0
    first_token: Durations = field(default_factory=Durations)
    inter_token: Durations = field(default_factory=Durations)
    drafters: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


Row = dict[str, float | None]


class History:
    """Rows of the last hour. `statuses` returns the engines' current status by model."""

    def __init__(
        self,
        statuses: Callable[[], Mapping[str, EngineStatus]],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._statuses, self._clock = statuses, clock
        self._began, self._began_wall = clock(), wall()
        self._rows: deque[Row] = deque(maxlen=NUM_STEPS)
        self._drafters: deque[dict[str, list[int]]] = deque(maxlen=NUM_STEPS)
        self._number = 0
        self._step = Step()

    @property
    def step(self) -> Step:
        """The current step; steps that have ended become rows."""
        number = int((self._clock() - self._began) / STEP_SECONDS)
        # If the machine slept for more than an hour, the whole history is empty.
        skipped = number - self._number - NUM_STEPS
        if skipped > 0:
            self._number += skipped
        while self._number < number:
            self._rows.append(self._row(self._step))
            self._drafters.append(self._step.drafters)
            self._step = Step()
            self._number += 1
        return self._step

    def _row(self, step: Step) -> Row:
        """Return the row of an ended step. Its gauges are the current values."""
        gauges = self._statuses().values()
        return {
            "tokens_per_second": step.num_tokens / STEP_SECONDS,
            "prompt_tokens_per_second": step.num_prompt_tokens / STEP_SECONDS,
            "requests_per_second": step.num_requests / STEP_SECONDS,
            "refusals_per_second": step.num_refused / STEP_SECONDS,
            "first_token_p50": step.first_token.percentile(50),
            "first_token_p95": step.first_token.percentile(95),
            "first_token_p99": step.first_token.percentile(99),
            "inter_token_p50": step.inter_token.percentile(50),
            "inter_token_p95": step.inter_token.percentile(95),
            "inter_token_p99": step.inter_token.percentile(99),
            "running": sum(status.num_running for status in gauges),
            "waiting": sum(status.num_waiting for status in gauges),
            "kv_usage": round(max((status.kv_usage for status in gauges), default=0.0), 4),
            "preempted": sum(status.num_preempted for status in gauges),
            "restarts": sum(status.num_restarts for status in gauges),
        }

    def since(self, number: int = 0) -> dict[str, Any]:
        """Return the steps from `number` on, as columns. `first` is the number of the first row,
        `next` that for the next call. Step i began at Unix time `began + i * step_seconds`."""
        _ = self.step
        first = self._number - len(self._rows)
        start = min(max(number, first), self._number)
        rows = list(self._rows)[start - first :]
        drafts = list(self._drafters)[start - first :]
        names = list(rows[0]) if rows else []
        drafters = sorted({name for one in drafts for name in one})
        return {
            "step_seconds": STEP_SECONDS,
            "began": round(self._began_wall, 3),
            "first": start,
            "next": self._number,
            "columns": {name: [row[name] for row in rows] for name in names},
            "drafters": {
                name: {
                    "drafted": [one.get(name, (0, 0))[0] for one in drafts],
                    "accepted": [one.get(name, (0, 0))[1] for one in drafts],
                }
                for name in drafters
            },
            "engines": {name: to_builtins(one) for name, one in self._statuses().items()},
        }
