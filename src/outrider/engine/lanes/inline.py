"""The reference executor: a task runs when it is started, on the caller's thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.errors import ordinary
from outrider.core.interrupts import breakable, is_interrupt
from outrider.engine.lanes.runner import LaneRunner
from outrider.engine.lanes.task import Done, Task, Work
from outrider.engine.round import Round


@dataclass(slots=True)
class InlineLanes:
    """Deterministic: lanes run in the order in which they are started, one after another."""

    runners: Mapping[str, LaneRunner]
    clock: Clock = HOST_CLOCK
    _done: list[Done] = field(default_factory=list[Done])

    @property
    def busy(self) -> Mapping[str, float]:
        return {done.lane: done.began for done in self._done}

    def is_here(self) -> bool:
        return False

    def start(self, lane: str, task: Task) -> None:
        began = self.clock()
        work, error = Work(), None
        try:
            with breakable():
                work = self.runners[lane](task)
        except BaseException as caught:  # noqa: BLE001
            # An interrupt as well: the engine first undoes the job.
            error = caught if is_interrupt(caught) else ordinary(caught)
        self._done.append(Done(lane, task, work, error, began, self.clock()))

    @property
    def round(self) -> Round:
        """What the first lane runs."""
        return next(iter(self.runners.values())).round

    def exchange(self, other: Round) -> None:
        """Have every lane run `other` from now on."""
        self.runners = {lane: replace(runner, round=other) for lane, runner in self.runners.items()}

    def wait(self, seconds: float | None = None) -> list[Done]:
        del seconds
        done, self._done = self._done, []
        return done

    def abandon(self, lane: str) -> None:
        raise AssertionError(f"lane {lane} runs on the caller's thread and cannot be left")

    def close(self) -> None:
        pass
