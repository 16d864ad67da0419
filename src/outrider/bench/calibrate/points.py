"""Medians of what was timed, point by point, once the drift of the machine is taken out.

A point is an engine, a phase, a number of sequences and of rows, and a depth. In every turn the
rounds that drafted nothing say how slow the machine was: the median, over engines, of their time
over the usual one of the same engine and phase. Times are divided by that level, smoothed over
neighbouring turns, so that what was measured late compares with what was measured early.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.calibrate.rounds import Pass, Timed

# Turns that a level is smoothed over.
_SMOOTHED = 5

_Turn = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Medians of `count` passes of engine `name`; contexts are means. `scatter` is the median
    relative deviation of their seconds."""

    name: str
    batch: int
    rows: int
    depth: int
    drafting: int
    context: float
    reads: float
    before: float
    emitted: float
    draft: float
    verify: float
    host: float
    count: int
    scatter: float

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Of one pass in which all sequences drafted `depth` tokens, the drafting. Of `first` rounds at
    a K as well."""

    name: str
    batch: int
    depth: int
    first: bool
    context: float
    before: float
    seconds: float


def are_even(one: Pass | Point) -> bool:
    """Whether all sequences drafted, and equally many tokens."""
    return bool(one.depth) and one.rows == one.batch * (one.depth + 1)


def points_of(timed: Sequence[Timed]) -> list[Point]:
    level = levels(timed)
    groups: defaultdict[tuple[object, ...], list[Timed]] = defaultdict(list)
    for one in timed:
        if one.first:
            continue
        found = one.one
        # Drafts of a batch that are not equally long make points of their own.
        key = (one.name, one.phase, found.batch, found.rows, found.depth, found.drafting)
        groups[key].append(one)
    return [_point(group, level) for group in groups.values()]


def drafting_of(timed: Sequence[Timed]) -> list[Drafting]:
    level = levels(timed)
    return [
        Drafting(
            name=one.name,
            batch=one.one.batch,
            depth=one.one.depth,
            first=one.first,
            context=one.one.context,
            before=one.one.before,
            seconds=one.one.draft / level.get((one.phase, one.turn), 1.0),
        )
        for one in timed
        if are_even(one.one)
    ]


def levels(timed: Sequence[Timed]) -> dict[_Turn, float]:
    """By phase and turn, how slow the machine was; 1 is its usual pace over all of the phase."""
    anchors: defaultdict[tuple[str, int], dict[int, list[float]]] = defaultdict(dict)
    for one in timed:
        if not one.one.depth and not one.first:
            turns = anchors[one.name, one.phase]
            turns.setdefault(one.turn, []).append(one.one.seconds)
    ratios: defaultdict[_Turn, list[float]] = defaultdict(list)
    for (_, phase), turns in anchors.items():
        medians = {turn: statistics.median(times) for turn, times in turns.items()}
        usual = statistics.median(medians.values())
        for turn, seconds in medians.items():
            ratios[phase, turn].append(seconds / usual)
    raw = {turn: statistics.median(found) for turn, found in ratios.items()}
    return {turn: _smoothed(raw, turn) for turn in raw}


def _smoothed(raw: Mapping[_Turn, float], at: _Turn) -> float:
    phase, turn = at
    near = range(turn - _SMOOTHED // 2, turn + _SMOOTHED // 2 + 1)
    return statistics.median(raw[phase, other] for other in near if (phase, other) in raw)


def _point(group: Sequence[Timed], level: Mapping[_Turn, float]) -> Point:
    passes, first = [one.one for one in group], group[0].one
    pace = [level.get((one.phase, one.turn), 1.0) for one in group]

    def times(of: Callable[[Pass], float]) -> list[float]:
        return [of(one) / by for one, by in zip(passes, pace, strict=True)]

    def mean(of: Callable[[Pass], float]) -> float:
        return statistics.fmean(map(of, passes))

    seconds = times(lambda one: one.seconds)
    middle = statistics.median(seconds)
    return Point(
        name=group[0].name,
        batch=first.batch,
        rows=first.rows,
        depth=first.depth,
        drafting=first.drafting,
        context=mean(lambda one: one.context),
        reads=mean(lambda one: one.reads),
        before=mean(lambda one: one.before),
        emitted=mean(lambda one: one.emitted),
        draft=statistics.median(times(lambda one: one.draft)),
        verify=statistics.median(times(lambda one: one.verify)),
        host=statistics.median(times(lambda one: one.host)),
        count=len(group),
        scatter=statistics.median(abs(one / middle - 1) for one in seconds),
    )
