"""Discrete-event simulator: engines, a router, policies of `sched/`, and a simulated clock.

The seconds of jobs, chance (events.py), contention between jobs and failures of replicas
are simulated. Records are those of a real run (JobTrace, RoundTrace).
"""

from __future__ import annotations

import math
from collections import deque

from outrider.core.config import EngineConfig
from outrider.core.errors import ContractError
from outrider_lab.simulator.engine import LABEL_END, Records, SimulatedEngine
from outrider_lab.simulator.events import Chance, JobCosts, Running, Simulated, SimulatedResult
from outrider_lab.simulator.load import Fleet, Router, SimulatedLoad


def simulate(
    config: EngineConfig,
    load: SimulatedLoad,
    costs: JobCosts,
    chance: Chance,
    *,
    contention: float = 0.0,
    fleet: Fleet | None = None,
) -> Simulated:
    """Run `load` to its end. Of `config` it reads schedule, which must be resolved, k, batch sizes,
    chunk, threshold and lane order. `contention` is that among the lanes of an engine; replicas
    share nothing. The same arguments give the same result."""
    fleet = fleet or Fleet()
    records = Records()
    engines = [
        SimulatedEngine(
            config,
            costs,
            chance,
            contention=contention,
            records=records,
            label=f"{number}{LABEL_END}" if fleet.replicas > 1 else "",
        )
        for number in range(fleet.replicas)
    ]
    return _Simulation(load, fleet, engines, records).run()


class _Simulation:
    def __init__(
        self, load: SimulatedLoad, fleet: Fleet, engines: list[SimulatedEngine], records: Records
    ) -> None:
        self._load, self._engines, self._records = load, engines, records
        self._router = Router(fleet.routing)
        self._changes = deque(sorted({at for one in fleet.failures for at in (one.at, one.ends)}))
        self._failures = fleet.failures
        self._is_up = [True] * len(engines)
        self._now = 0.0
        self._coming = deque(enumerate(load.requests))
        # Requests that came, or were lost, while no replica was up.
        self._homeless: list[Running] = []
        self._served: list[SimulatedResult] = []

    def run(self) -> Simulated:
        self._change()
        self._arrive()
        while self._coming or self._num_in_flight:
            for engine in self._up:
                engine.work(self._now)
            ends = (engine.next_end for engine in self._up)
            self._now = min(*ends, self._next_arrival, self._next_change)
            if not self._now < math.inf:
                raise ContractError("sequences wait, and no lane does anything")
            for number, engine in enumerate(self._engines):
                self._served += [seq.served(number) for seq in engine.finish(self._now)]
            self._change()
            self._arrive()
        for engine in self._engines:
            engine.stop(self._now)
        jobs, rounds = self._records.jobs, self._records.rounds
        return Simulated(self._now, tuple(jobs), tuple(rounds), tuple(self._served))

    # Requests

    @property
    def _num_in_flight(self) -> int:
        return len(self._homeless) + sum(engine.num_in_flight for engine in self._engines)

    @property
    def _next_arrival(self) -> float:
        by_clock = self._coming and self._load.in_flight is None
        return self._coming[0][1].arrives if by_clock else math.inf

    def _arrive(self) -> None:
        """Add the requests that come now: by the clock, or because a user was answered."""
        users = self._load.in_flight
        while self._coming and (
            self._next_arrival <= self._now if users is None else self._num_in_flight < users
        ):
            seq_id, one = self._coming.popleft()
            self._assign(Running(seq_id, self._now if users is not None else one.arrives, one))

    def _assign(self, seq: Running) -> None:
        if not self._up:
            self._homeless.append(seq)
            return
        ids = seq.request.prompt_ids(seq.seq_id)
        self._router.choose(self._up, ids, is_moved=seq.num_moves > 0).add(seq)

    # Failures

    @property
    def _up(self) -> list[SimulatedEngine]:
        return [one for one, is_up in zip(self._engines, self._is_up, strict=True) if is_up]

    @property
    def _next_change(self) -> float:
        return self._changes[0] if self._changes else math.inf

    def _change(self) -> None:
        """Apply the failures and returns of replicas that are due now."""
        if self._next_change > self._now:
            return
        self._changes.popleft()
        was_up = self._is_up
        down = {one.replica for one in self._failures if one.at <= self._now < one.ends}
        self._is_up = [number not in down for number in range(len(self._engines))]
        lost = list[Running]()
        for engine, before, after in zip(self._engines, was_up, self._is_up, strict=True):
            if before and not after:
                lost += engine.lose(self._now)
        waited, self._homeless = self._homeless, []
        for seq in sorted((*waited, *lost), key=lambda seq: seq.seq_id):
            self._assign(seq)
