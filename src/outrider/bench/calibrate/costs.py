"""Calibrates: what rounds of a target and its drafters cost here, in at most so many seconds.

Rounds of the engine that users run are timed, in phases (phases.py, turns.py). All phases are gone
through several times, so that a machine that slows down for a while slows them alike; prompts that
were read once are still in memory then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outrider.bench.calibrate.fit import DraftCosts, SharedCosts, draft_costs, scatter, shared_costs
from outrider.bench.calibrate.phases import LEAST_PASSES, Pace, Plan, Wanted, plans_of
from outrider.bench.calibrate.points import Point, drafting_of, points_of
from outrider.bench.calibrate.stands import Stands
from outrider.bench.calibrate.texts import repetition
from outrider.bench.calibrate.turns import MOST_TURNS, Phase, Timed, run_phase

# How often all phases are gone through.
_CYCLES = 3

Tell = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured, and in how many seconds."""

    shared: SharedCosts
    drafts: dict[str, DraftCosts]
    points: tuple[Point, ...]
    scatter: float
    seconds: float


@dataclass(slots=True)
class Timing:
    """Rounds that were timed so far, in so many `seconds`. Whoever times them again learns more:
    all of them count."""

    stands: Stands
    plans: Sequence[Plan]
    phases: Sequence[Phase]
    clock: Callable[[], float]
    timed: list[Timed] = field(default_factory=list[Timed])
    num_cycles: int = 0
    seconds: float = 0.0

    @classmethod
    def planned(
        cls, stands: Stands, wanted: Wanted, *, clock: Callable[[], float] = perf_counter
    ) -> Timing:
        """Nothing is timed yet but what a round takes roughly."""
        started = clock()
        piece = repetition(stands.plain.llm)
        pace = Pace.of(stands.plain, piece, clock)
        plans = plans_of(stands, wanted, pace)
        phases = [plan.phase(piece, pace.warm(plan.batch), wanted.params) for plan in plans]
        return cls(stands, plans, phases, clock, seconds=clock() - started)

    def run(self, seconds: float, *, tell: Tell = lambda _what, _share: None) -> None:
        """For `seconds`, or until each phase was run once. `tell` hears what is being measured, and
        which share of the time has gone."""
        started = self.clock()
        for cycle in range(_CYCLES):
            first = MOST_TURNS * self.num_cycles
            self.num_cycles += 1
            for number, plan in enumerate(self.plans):
                gone = self.clock() - started
                left = (_CYCLES - cycle) * len(self.plans) - number
                share = min(gone / seconds, 1.0) if seconds > 0 else 1.0
                tell(f"{plan.batch} x {plan.context} tokens", share)
                self.timed += run_phase(
                    plan.stands,
                    self.phases[number],
                    number=number,
                    turns=range(first, first + MOST_TURNS),
                    until=started + gone + (seconds - gone) / left,
                    clock=self.clock,
                )
            if self.clock() - started > seconds:
                break
        self.seconds += self.clock() - started

    def costs(self) -> Costs:
        """Of all rounds. At least one run must have been."""
        every = points_of(self.timed)
        # A point with fewer passes is noise.
        points = [point for point in every if point.count >= LEAST_PASSES] or every
        shared = shared_costs(points, self.stands.plain.name)
        passes = drafting_of(self.timed)
        drafts: dict[str, DraftCosts] = {}
        for name in (stand.name for stand in self.stands.drafting):
            own = [point for point in points if point.name == name]
            found = draft_costs(own, [one for one in passes if one.name == name], shared)
            if found is not None:
                drafts[name] = found
        return Costs(shared, drafts, tuple(points), scatter(points), self.seconds)


def measure_costs(
    stands: Stands,
    wanted: Wanted,
    *,
    tell: Tell = lambda _what, _share: None,
    clock: Callable[[], float] = perf_counter,
) -> Costs:
    """One run."""
    timing = Timing.planned(stands, wanted, clock=clock)
    timing.run(wanted.seconds - timing.seconds, tell=tell)
    return timing.costs()
