"""What a lane does with a task, whatever thread it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from outrider.core.protocols import DraftAhead
from outrider.engine.guard import guarded_ahead
from outrider.engine.lanes.task import Task, Work
from outrider.engine.round import Round
from outrider.engine.stages import Stages
from outrider.sched.jobs import Stage


@dataclass(frozen=True, slots=True)
class LaneRunner:
    """`round` and `stages` are over the lane's own buffers of the target."""

    round: Round
    stages: Stages

    def __call__(self, task: Task) -> Work:
        stages = task.stages
        if stages == (Stage.AHEAD,):
            drafter = cast("DraftAhead", self.stages.drafter)
            return Work(faults=guarded_ahead(drafter, task.ahead))
        if stages == (Stage.DRAFT,):
            self.stages.allot(task.batch)
            return Work(proposals=self.stages.propose(task.batch))
        run = self.round.run if Stage.DRAFT in stages else self.round.verify
        return Work(outcomes=run(task.batch, task.chunks, num_waiting=task.num_waiting))
