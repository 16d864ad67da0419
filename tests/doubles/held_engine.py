"""An engine that a test holds between its jobs and lets go so many jobs at a time."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider import LLM
from outrider.core.config import EngineConfig
from outrider.core.draft import JobTrace
from outrider.server.thread_port import ThreadPort


@dataclass
class Steps:
    """Holds the engine after a job, from the first one on of which `stops` says so."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    stops: Callable[[JobTrace], bool] | None = None
    num_by_lane: Counter[str] = field(default_factory=Counter[str])
    """Jobs that ended."""
    newest: int = -1
    num_allowed: float = math.inf
    is_held: bool = False

    def note(self, trace: JobTrace) -> None:
        """In the engine's thread, after each job."""
        with self.changed:
            self.num_by_lane[trace.lane] += 1
            self.newest = max(self.newest, *trace.seq_ids)
            if self.stops is not None and self.stops(trace):
                self.stops, self.num_allowed = None, 0
            self.is_held = self.num_allowed <= 0
            self.changed.wait_for(lambda: self.num_allowed > 0)
            self.num_allowed -= 1

    @property
    def num_jobs(self) -> int:
        return self.num_by_lane.total()

    def allow(self, num_jobs: float) -> None:
        with self.changed:
            self.num_allowed, self.is_held = num_jobs, False
            self.changed.notify_all()

    def release(self) -> None:
        """For good."""
        self.stops = None
        self.allow(math.inf)


class HeldPort(ThreadPort):
    """An engine of the embedded pair, of which `steps` decides when it works."""

    def __init__(self, config: EngineConfig) -> None:
        self.steps = Steps()
        self.made: list[LLM] = []

        def load() -> LLM:
            self.made.append(LLM(config=config, on_job=self.steps.note))
            return self.made[0]

        super().__init__(load)

    async def aclose(self) -> None:
        self.steps.release()
        await super().aclose()

    @property
    def llm(self) -> LLM:
        return self.made[0]

    @property
    def num_left(self) -> int:
        """Requests that the engine has, running and waiting."""
        return self.status.num_running + self.status.num_waiting
