"""What rounds of a target and its drafters cost here, timed in at most so many seconds.

Phases are small and large batches of short texts, and long texts, one and several. Where passes are
slow, less is measured: fewer depths in a turn, shallower drafts for large batches, and shorter long
texts. All phases are gone through several times, so that a machine that slows down for a while
slows them alike; prompts that were read once are still in memory then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outrider.api.llm import LLM
from outrider.core.params import SamplingParams
from outrider_lab.bench.calibrate.engines import TimedEngine, TimedEngines
from outrider_lab.bench.calibrate.fit import (
    Point,
    SharedCosts,
    are_even,
    draft_costs,
    drafting_of,
    points_of,
    scatter,
    shared_costs,
)
from outrider_lab.bench.calibrate.rounds import (
    ALIKE,
    LEAST_TURNS,
    MOST_TURNS,
    WARM_SECONDS,
    Phase,
    Span,
    Timed,
    run_phase,
)
from outrider_lab.bench.workload import ECHO, builtin_texts
from outrider_lab.planner.calibration import DrafterCosts

SECONDS = 20.0
# So chosen that batches share numbers of rows, 4 x (7 + 1) = 16 x (1 + 1): only then can what a
# sequence costs be told from what a row does.
KS = (1, 2, 3, 5, 7, 8, 11, 12, 15, 16)
# K of four sequences at which a pass has a row more than whole row tiles of 8, 12 or 16 rows: 17,
# 25, 33, 37 and 49. Alone they are 9, 13 and 17 rows at a K above. Only short texts are tried with
# them: long ones would outgrow their window.
EDGES = (3.25, 5.25, 7.25, 8.25, 11.25)
# Larger batches are tried with every other K: between many rows time goes straight on.
_FEW = 4
BATCHES = (1, 4, 16)
# Two whole pages, which sequences that begin alike share, and little more.
_SHORT = 66
# Of the time, what long texts may take to be read.
_READING_SHARE = 0.3
# Of a phase's time, what its short texts may take to be read. Where it takes more they begin alike
# and are read once, though passes over one text for all are quicker by a tenth than usual ones.
_OPENING_SHARE = 0.1
# Passes that a point should have at least.
LEAST_PASSES = 3
# Long texts shorter than this say nothing of contexts.
_LEAST_LONG = 256
# Long texts at once: sequences that begin alike do not tell what keys and values of their own cost.
_SEVERAL = 4
# Tokens of a long text that may be emitted while others are read.
_OPENING_ROOM = 128
_PILOT_TOKENS, _PILOT_ROUNDS = 128, 16
# Of the time of a glance, what the text that is repeated may take to be written.
_PILOT_SHARE = 0.1
# Rounds of drafts that take as long as the pass.
_DRAFTING = 2.0
# How often all phases are gone through.
_CYCLES = 3

Tell = Callable[[str, float], None]
# Tokens that a model writes before texts are timed, and the last ones, which are repeated.
_WRITTEN, _REPEATED = 128, 32


def repetition(llm: LLM, go_on: Callable[[], bool] = lambda: True) -> list[int]:
    """The last tokens of what `llm` wrote after a text with a copy in it, while `go_on`. A model
    that writes greedily soon repeats itself: what it wrote last, again and again, is a prompt that
    it goes on with, so that every drafter, lookups too, has something to draft as deep as asked."""
    ids = llm.tokenizer.encode(builtin_texts(ECHO)[0])
    params = SamplingParams(max_tokens=_WRITTEN, ignore_eos=True)
    handle = llm.submit(ids, params)
    try:
        while not handle.done and go_on():
            llm.advance()
    finally:
        llm.cancel(handle)
    return [*ids, *handle.result().token_ids][-_REPEATED:]


def prompts_of(piece: Sequence[int], *, length: int, count: int) -> list[list[int]]:
    """`count` prompts of `length` tokens that end as `piece` does. They differ in their first
    token, so that no sequence finds its beginning in another's memory."""
    copies = list(piece) * (length // len(piece) + 1)
    return [[number + 1, *copies[len(copies) - length + 1 :]] for number in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which points, with tokens drawn by `params`; `seconds` is how long all of it may take. With
    `is_glance` short texts come first, and phases are left out that would not end in time; then
    `least_ks` are tried of any drafter. `room` is how many tokens an engine may hold. With a
    `context` one text of so many tokens is all that is timed."""

    batches: Sequence[int] = BATCHES
    ks: Sequence[int] = KS
    seconds: float = SECONDS
    params: SamplingParams = field(default_factory=SamplingParams)
    is_glance: bool = False
    least_ks: tuple[int, ...] = ()
    room: int | None = None
    context: int = 0


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a plain round of one sequence, and of a row among many, roughly."""

    plain: float
    row: float

    @classmethod
    def of(
        cls,
        engine: TimedEngine,
        piece: Sequence[int],
        clock: Callable[[], float],
        *,
        is_glance: bool = False,
    ) -> Pace:
        """From reading a prompt and going on from it, both short for a glance."""
        num_tokens, num_rounds = (_SHORT, 6) if is_glance else (_PILOT_TOKENS, _PILOT_ROUNDS)
        (prompt,) = prompts_of(piece, length=num_tokens, count=1)
        params = SamplingParams(max_tokens=num_rounds + 1, ignore_eos=True)
        started = clock()
        (result,) = engine.llm.generate([prompt], params)
        seconds, first = clock() - started, result.token_seconds[0]
        return cls((seconds - first) / num_rounds, first / num_tokens)

    def opening(self, batch: int) -> float:
        """Seconds of the rounds of a turn before those that count."""
        return _DRAFTING * self.warm(batch) * self._pass(2 * batch)

    def rounds(self, batch: int, k: float) -> float:
        """Seconds of a turn's rounds at `k`."""
        return _DRAFTING * ALIKE * self._pass(batch * (k + 1))

    def warm(self, batch: int) -> int:
        """Rounds before those that count; none where a pass takes longer than any cache to fill."""
        return round(WARM_SECONDS / self._pass(2 * batch))

    def _pass(self, num_rows: float) -> float:
        return self.plain + self.row * (num_rows - 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """A phase to come: `batch` sequences of `context` tokens, on `engines`, with drafts of up to
    `ks` tokens, `most_ks` of them in a turn. Texts that are quickly read are read `again` when they
    fill their window."""

    batch: int
    context: int
    engines: Sequence[TimedEngine]
    ks: Sequence[float]
    most_ks: int
    alike: bool
    again: bool = False

    def least_seconds(self, pace: Pace) -> float:
        """Of reading the texts and of a turn of every engine."""
        read = self.context * (1 if self.alike else self.batch) * pace.row
        rounds = sum(pace.rounds(self.batch, k) for k in (0, *sorted(self.ks)[: self.most_ks]))
        return len(self.engines) * (read + pace.opening(self.batch) + rounds / _DRAFTING)

    def phase(self, piece: Sequence[int], warm: int, params: SamplingParams) -> Phase:
        count = 1 if self.alike else self.batch
        prompts = prompts_of(piece, length=self.context, count=count)
        if self.alike:
            prompts *= self.batch
        ks = {one.name: (0,) if one.is_plain else (0, *self.ks) for one in self.engines}
        return Phase(prompts, ks, self.most_ks, self.alike, self.again, warm, params)


def plans_of(engines: TimedEngines, wanted: Wanted, pace: Pace) -> list[Plan]:
    """Long texts come first: what they take to be read is known best before."""
    if wanted.context:
        return [_only_plan(engines, wanted, pace)]
    every = engines.present
    reading = _READING_SHARE * wanted.seconds / pace.row
    window = engines.plain.llm.spec.max_tokens
    room = math.inf if wanted.room is None else wanted.room
    # Where not all engines can read a long text, one that drafts tells what contexts cost.
    readers = every if reading / len(every) >= _LEAST_LONG else every[1:2]
    found: list[Plan] = []
    num_phases = 2 + len(wanted.batches)
    share = reading / len(readers)
    for batch in (_SEVERAL, 1):
        ks, most_ks = _affordable(wanted, pace, batch, len(readers), num_phases)
        # Half of what may be read goes to several texts, if it is worth that.
        tokens = share / 2 / batch if batch > 1 or found else share
        fits = min(window, room // batch) - _room(ks, most_ks, pace.warm(batch))
        long = int(min(fits, tokens))
        if long >= _LEAST_LONG:
            found.append(Plan(batch, long, readers, ks, most_ks, alike=False))
    for batch in wanted.batches:
        edges = EDGES if batch == _FEW else ()
        ks, most_ks = _affordable(wanted, pace, batch, len(every), num_phases, edges=edges)
        read = batch * _SHORT * pace.row * len(every)
        alike = read > _OPENING_SHARE * wanted.seconds / num_phases
        found.append(Plan(batch, _SHORT, every, ks, most_ks, alike, again=True))
    if wanted.is_glance:
        first = wanted.batches[0]
        found.sort(key=lambda plan: (plan.context > _SHORT, plan.batch != first, plan.batch))
    return found


def _only_plan(engines: TimedEngines, wanted: Wanted, pace: Pace) -> Plan:
    """Of one text of the context that is asked for, as far as there is room."""
    every = engines.present
    ks, most_ks = _affordable(wanted, pace, 1, len(every), 1)
    window = engines.plain.llm.spec.max_tokens
    window = window if wanted.room is None else min(window, wanted.room)
    most = window - _room(ks, most_ks, pace.warm(1))
    context = max(min(wanted.context, most), _SHORT)
    return Plan(1, context, every, ks, most_ks, alike=False, again=True)


def _room(ks: Sequence[float], most_ks: int, warm: int) -> int:
    """Tokens that a text may grow by in the least turns, if all drafts are kept and the next is as
    deep."""
    deepest = sorted(ks)[-most_ks:]
    turn = warm * (min(ks) + 1) + ALIKE * sum(k + 1 for k in (0, *deepest))
    return _OPENING_ROOM + LEAST_TURNS * math.ceil(turn) + math.ceil(max(ks))


def _affordable(
    wanted: Wanted,
    pace: Pace,
    batch: int,
    num_engines: int,
    num_phases: int,
    *,
    edges: Sequence[float] = (),
) -> tuple[tuple[float, ...], int]:
    """Of `ks` and `edges` those that fit into a turn, and how many do together on the mean, one at
    least."""
    share = wanted.seconds / num_phases / num_engines / (LEAST_PASSES + 1)
    share -= pace.opening(batch) + pace.rounds(batch, 0)
    ks = sorted((*(wanted.ks if batch <= _FEW else wanted.ks[::2]), *edges))
    fitting = [k for k in ks if pace.rounds(batch, k) <= share] or ks[:1]
    if len(fitting) < len(wanted.least_ks):
        return wanted.least_ks, len(wanted.least_ks)
    mean = statistics.fmean(pace.rounds(batch, k) for k in fitting)
    return tuple(fitting), max(1, min(len(fitting), int(share / mean)))


def firm_points(points: Sequence[Point]) -> list[Point]:
    """Points of at least `LEAST_PASSES` passes; an engine that has none of them, with drafts or
    without, keeps all of its own. On a busy machine few passes are timed, and what they say of a
    drafter is better than a guess."""
    firm = [point for point in points if point.count >= LEAST_PASSES]
    known = {(point.name, are_even(point)) for point in firm}
    return [*firm, *(one for one in points if (one.name, are_even(one)) not in known)]


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured, and in how many seconds."""

    shared: SharedCosts
    drafts: dict[str, DrafterCosts]
    points: tuple[Point, ...]
    scatter: float
    seconds: float


@dataclass(slots=True)
class Timing:
    """Rounds that were timed so far, in so many `seconds`. Whoever times them again learns more:
    all of them count."""

    engines: TimedEngines
    plans: Sequence[Plan]
    phases: Sequence[Phase]
    clock: Callable[[], float]
    pace: Pace
    is_glance: bool = False
    timed: list[Timed] = field(default_factory=list[Timed])
    num_cycles: int = 0
    seconds: float = 0.0

    @classmethod
    def planned(
        cls, engines: TimedEngines, wanted: Wanted, *, clock: Callable[[], float] = perf_counter
    ) -> Timing:
        """Nothing is timed yet but what a round takes roughly."""
        started = clock()
        until = started + (_PILOT_SHARE * wanted.seconds if wanted.is_glance else math.inf)
        piece = repetition(engines.plain.llm, lambda: clock() < until)
        pace = Pace.of(engines.plain, piece, clock, is_glance=wanted.is_glance)
        plans = plans_of(engines, wanted, pace)
        phases = [plan.phase(piece, pace.warm(plan.batch), wanted.params) for plan in plans]
        seconds = clock() - started
        return cls(engines, plans, phases, clock, pace, wanted.is_glance, seconds=seconds)

    def run(
        self,
        seconds: float,
        *,
        tell: Tell = lambda _what, _share: None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """For `seconds`, or until each phase was run once; a glance ends in time whatever was not
        run. `tell` hears what is being measured, and which share of the time has gone; `tick` is
        called often."""
        started = self.clock()
        stop = started + seconds if self.is_glance else math.inf
        for cycle in range(_CYCLES):
            first = MOST_TURNS * self.num_cycles
            self.num_cycles += 1
            for number, plan in enumerate(self.plans):
                gone = self.clock() - started
                if self.timed and gone + plan.least_seconds(self.pace) > stop - started:
                    continue
                left = (_CYCLES - cycle) * len(self.plans) - number
                share = min(gone / seconds, 1.0) if seconds > 0 else 1.0
                tell(f"{plan.batch} x {plan.context} tokens", share)
                until = started + gone + (seconds - gone) / left
                self.timed += run_phase(
                    plan.engines,
                    self.phases[number],
                    number=number,
                    turns=range(first, first + MOST_TURNS),
                    span=Span(until, self.clock, stop, tick),
                )
            if self.clock() - started > seconds:
                break
        self.seconds += self.clock() - started

    def costs(self) -> Costs:
        """Of all rounds. At least one run must have been."""
        points = firm_points(points_of(self.timed))
        shared = shared_costs(points, self.engines.plain.name)
        passes = drafting_of(self.timed)
        drafts: dict[str, DrafterCosts] = {}
        for name in (engine.name for engine in self.engines.drafting):
            own = [point for point in points if point.name == name]
            found = draft_costs(own, [one for one in passes if one.name == name], shared)
            if found is not None:
                drafts[name] = found
        return Costs(shared, drafts, tuple(points), scatter(points), self.seconds)
