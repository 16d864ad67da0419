"""From medians of timed rounds to the costs of a calibration.

A target's pass takes rows(R) + c sum S_i + r sum R_i S_i + v b. Within one number of rows only
contexts and the number of sequences differ, so the slopes are fitted to what is left when every R
has a level of its own, and the levels follow. What a round takes beside drafting and the pass is
overhead + h b + u R + t E for E emitted tokens; since both terms in b are of every round, h + v is
`host`.

A drafter is charged with its own seconds and with what its rounds take more than others, which is
what it makes the target's pass and the host do besides (states that it reads, memory that it
empties, rounds that are not one call). That is fitted as e0 + e1 R, of either sign, over all of its
rounds: times of passes scatter more than such differences. Own seconds go by depth and number of
sequences, as curves, after slopes in depth times context, and in the tokens emitted since the draft
before, are taken out. At one K these go together, for long texts are foretold less well than short
ones that repeat themselves; rounds that follow another K tell them apart, so the slopes are fitted
to these as well, with levels of their own.

All fits are relative: a deviation counts as a share of the time.

Points are medians once the drift of the machine is taken out. In every turn the rounds that drafted
nothing say how slow it was: the median, over engines, of their time over the usual one of the same
engine and phase. Times are divided by that level, smoothed over neighbouring turns.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from outrider.estimate.cost import Curve
from outrider_lab.bench.calibrate.rounds import Pass, Timed
from outrider_lab.measure.frame import grouped
from outrider_lab.planner.calibration import DrafterCosts, PassCosts

# Turns that a level is smoothed over.
_SMOOTHED = 5

_Turn = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Medians of `count` passes of engine `name`; what they read and emitted are means. `scatter`
    is the median relative deviation of their seconds."""

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


def are_even(one: Pass | Point) -> bool:
    """Whether all sequences drafted, and equally many tokens."""
    return bool(one.depth) and one.rows == one.batch * (one.depth + 1)


def points_of(timed: Sequence[Timed]) -> list[Point]:
    # Drafts of a batch that are not equally long make points of their own.
    groups = grouped(
        (one for one in levelled(timed) if not one.first),
        key=lambda one: (one.name, one.phase, one.batch, one.rows, one.depth, one.drafting),
    )
    return [_point(group) for group in groups.values()]


def drafting_of(timed: Sequence[Timed]) -> list[Timed]:
    """Passes in which all sequences drafted equally many tokens, first ones at a K as well."""
    return [one for one in levelled(timed) if are_even(one)]


def levelled(timed: Sequence[Timed]) -> list[Timed]:
    """With the seconds that they would have taken at the machine's usual pace."""
    level = levels(timed)
    pace = [level.get((one.phase, one.turn), 1.0) for one in timed]
    return [
        replace(one, draft=one.draft / by, verify=one.verify / by, host=one.host / by)
        for one, by in zip(timed, pace, strict=True)
    ]


def levels(timed: Sequence[Timed]) -> dict[_Turn, float]:
    """By phase and turn, how slow the machine was; 1 is its usual pace over all of the phase."""
    anchors: defaultdict[tuple[str, int], dict[int, list[float]]] = defaultdict(dict)
    for one in timed:
        if not one.depth and not one.first:
            anchors[one.name, one.phase].setdefault(one.turn, []).append(one.seconds)
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


def _point(group: Sequence[Timed]) -> Point:
    first, middle = group[0], statistics.median(one.seconds for one in group)

    def each(name: str) -> list[float]:
        return [getattr(one, name) for one in group]

    return Point(
        name=first.name,
        batch=first.batch,
        rows=first.rows,
        depth=first.depth,
        drafting=first.drafting,
        **{
            name: statistics.fmean(each(name)) for name in ("context", "reads", "before", "emitted")
        },
        **{name: statistics.median(each(name)) for name in ("draft", "verify", "host")},
        count=len(group),
        scatter=statistics.median(abs(one.seconds / middle - 1) for one in group),
    )


def nonnegative(
    columns: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Coefficients c >= 0 that bring sum of c_j columns_j nearest to `values`, by squares, each
    multiplied by its weight; 0 where a column tells nothing. Every set of columns is tried, which
    is exact and quick for the two or three that a cost has (Lawson and Hanson 1974, chapter 23,
    search smartly for many)."""
    root = np.sqrt(np.asarray(weights, dtype=np.float64))
    rows = np.asarray(columns, dtype=np.float64).T * root[:, None]
    wanted = np.asarray(values, dtype=np.float64) * root
    # Columns of one size, for the numbers that decide what is singular.
    sizes = np.linalg.norm(rows, axis=0)
    rows = rows / np.where(sizes > 0, sizes, 1.0)
    best, found = float(wanted @ wanted), np.zeros(len(columns))
    for count in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), count):
            part = rows[:, chosen]
            some, _, _, _ = np.linalg.lstsq(part, wanted, rcond=1e-9)
            left = wanted - part @ some
            if (some >= 0).all() and left @ left < best * (1 - 1e-12):
                best, found = float(left @ left), np.zeros(len(columns))
                found[list(chosen)] = some
    return [float(c / size) if size > 0 else 0.0 for c, size in zip(found, sizes, strict=True)]


def within_groups(
    groups: Sequence[Hashable], values: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """`values` less the weighted mean of their group: what is left for slopes that all groups
    share, whatever the level of each."""
    means = group_means(groups, values, weights)
    return [value - means[group] for group, value in zip(groups, values, strict=True)]


def group_means(
    groups: Sequence[Hashable], values: Sequence[float], weights: Sequence[float]
) -> dict[Hashable, float]:
    sums: dict[Hashable, tuple[float, float]] = {}
    for group, value, weight in zip(groups, values, weights, strict=True):
        total, mass = sums.get(group, (0.0, 0.0))
        sums[group] = total + weight * value, mass + weight
    return {group: total / mass for group, (total, mass) in sums.items()}


# How much longer the host may be busy with a round that is still like a plain one.
_ALIKE = 1.5
# Drafting that takes so many times its median waited for something else.
_INTERRUPTED = 1.6


@dataclass(frozen=True, slots=True)
class SharedCosts:
    """What all rounds have in common, whoever drafts."""

    target: PassCosts
    overhead: float
    host: float
    rule: float
    token: float

    def seconds(self, point: Point) -> float:
        """Of a round of `point` without its drafting."""
        target = self.target.seconds(point.rows, point.context, point.reads)
        host = self.overhead + self.host * point.batch + self.rule * point.rows
        return target + host + self.token * point.emitted


def shared_costs(points: Sequence[Point], plain: str) -> SharedCosts:
    """From the rounds of `plain` and of those who do no more in a round than it does."""
    points = _like(points, plain)
    weights = [point.count / point.host**2 for point in points]
    columns = [
        [1.0] * len(points),
        [float(point.batch) for point in points],
        [float(point.rows) for point in points],
        [point.emitted for point in points],
    ]
    overhead, host, rule, token = nonnegative(columns, [point.host for point in points], weights)
    target, a_sequence = _pass_costs(points)
    return SharedCosts(target, overhead, host + a_sequence, rule, token)


def _like(points: Sequence[Point], plain: str) -> Sequence[Point]:
    """Without the points of those whose rounds without a draft keep the host longer than plain
    decoding's: they read states, or are not one call, which is their own cost. All points, if then
    nobody is left who drafts."""
    quiet: dict[tuple[str, int], float] = {}
    for point in points:
        if not point.depth:
            place = point.name, point.batch
            quiet[place] = min(quiet.get(place, point.host), point.host)
    slow = {
        name
        for (name, batch), host in quiet.items()
        if (plain, batch) in quiet and host > _ALIKE * quiet[plain, batch]
    }
    found = [point for point in points if point.name not in slow]
    return found if any(point.depth for point in found) else points


def _pass_costs(points: Sequence[Point]) -> tuple[PassCosts, float]:
    """And what a sequence of the batch costs in a pass."""
    rows = [point.rows for point in points]
    seconds = [point.verify for point in points]
    weights = [point.count / point.verify**2 for point in points]
    known = [
        [point.context for point in points],
        [point.reads for point in points],
        [float(point.batch) for point in points],
    ]
    columns = [within_groups(rows, column, weights) for column in known]
    slopes = nonnegative(columns, within_groups(rows, seconds, weights), weights)
    slopes[2] = min(slopes[2], _most_a_sequence(points))
    left = [
        own - sum(slope * column[i] for slope, column in zip(slopes, known, strict=True))
        for i, own in enumerate(seconds)
    ]
    levels = [(r, max(own, 0.0), w) for r, own, w in zip(rows, left, weights, strict=True)]
    per_context, per_read, a_sequence = slopes
    return PassCosts(_curve(levels), per_context, per_read), a_sequence


def _most_a_sequence(points: Sequence[Point]) -> float:
    """What a sequence more costs where it brings a row as well, in rounds without drafts: noise
    must not charge sequences with all that a pass takes."""
    plain = {point.batch: point.verify for point in points if not point.depth}
    if len(plain) < 2:
        return 0.0
    few, many = min(plain), max(plain)
    return max(plain[many] - plain[few], 0.0) / (many - few)


def draft_costs(
    points: Sequence[Point], passes: Sequence[Timed], shared: SharedCosts
) -> DrafterCosts | None:
    """From the rounds of one drafter in which all sequences drafted alike; None if there are
    none."""
    drafting = [point for point in points if are_even(point)]
    if not drafting:
        return None
    weights = [point.count / point.seconds**2 for point in drafting]
    per_context, per_emitted = _slopes(passes)
    fixed, a_row = _extra(drafting, weights, shared)
    by_count: dict[int, list[tuple[float, float, float]]] = {}
    for point, weight in zip(drafting, weights, strict=True):
        more = fixed + a_row * point.rows
        more -= per_context * point.depth * point.context + per_emitted * point.before
        curve = by_count.setdefault(point.batch, [])
        curve.append((point.depth, max(point.draft + more, 0.0), weight))
    curves = tuple((count, _curve(by_count[count])) for count in sorted(by_count))
    return DrafterCosts(
        name=drafting[0].name, draft=curves, per_context=per_context, per_emitted=per_emitted
    )


def _slopes(passes: Sequence[Timed]) -> tuple[float, float]:
    """Seconds of drafting a token of context and step, and a token since the draft before."""
    by_place: defaultdict[tuple[int, int, bool], list[Timed]] = defaultdict(list)
    for one in passes:
        by_place[one.batch, one.depth, one.first].append(one)
    usual = {key: statistics.median(p.draft for p in own) for key, own in by_place.items()}
    # What took much longer was interrupted.
    kept = [
        (key, one)
        for key, own in by_place.items()
        for one in own
        if one.draft < _INTERRUPTED * usual[key]
    ]
    groups = [key for key, _ in kept]
    weights = [usual[key] ** -2 for key in groups]
    known = [[one.depth * one.context for _, one in kept], [one.before for _, one in kept]]
    columns = [within_groups(groups, column, weights) for column in known]
    seconds = within_groups(groups, [one.draft for _, one in kept], weights)
    per_context, per_emitted = nonnegative(columns, seconds, weights)
    return per_context, per_emitted


def _extra(
    points: Sequence[Point], weights: Sequence[float], shared: SharedCosts
) -> tuple[float, float]:
    """e0 and e1: what these rounds take beside drafting, more than others do."""
    left = [point.verify + point.host - shared.seconds(point) for point in points]
    root = np.sqrt(np.asarray(weights, dtype=np.float64))
    rows = np.asarray([[1.0, point.rows] for point in points]) * root[:, None]
    (fixed, a_row), _, _, _ = np.linalg.lstsq(rows, np.asarray(left) * root, rcond=1e-9)
    return float(fixed), float(a_row)


def scatter(points: Sequence[Point]) -> float:
    return statistics.median(point.scatter for point in points)


def _curve(samples: Sequence[tuple[float, float, float]]) -> Curve:
    """Through the weighted mean of each x."""
    xs, seconds, weights = ([sample[i] for sample in samples] for i in range(3))
    means = group_means(xs, seconds, weights)
    mass = group_means(xs, weights, [1.0] * len(xs))
    return Curve.through((x, means[x], mass[x]) for x in dict.fromkeys(xs))
