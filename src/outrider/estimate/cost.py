"""Cost model of rounds, measured while running: seconds by packed rows and by drafted depth.

A round of b sequences with drafts of K_1 to K_b tokens takes

    T = overhead + host b + judge (K_1 + ... + K_b)
        + target(b + K_1 + ... + K_b) + draft(max K, number of K > 0)

The target reads its weights once for all rows of a pass, so its seconds depend on rows. Host work
after a pass (text, memory, records) depends on sequences, and computing the distributions that
judge drafted tokens on these: with a large vocabulary they may cost more than the pass. A draft
model runs once a token for all sequences that still draft, so its seconds depend on depth, for each
number of sequences.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from outrider.core.draft import RoundTrace
from outrider.core.errors import ConfigError
from outrider.core.tree import Shape, fill_rows
from outrider.estimate.acceptance import BySequence, FadingRate, RunningMedian, fit_line

# Prices, as shares of a plain pass of the target.

# Prices and thresholds that decide whether a token is worth a row of the target's pass.
#
# Each was measured for its own use, and none follows from another: a controller that knows the cost
# of rows drafts tokens that a lookup, which does not know it, leaves out. Changing one changes the
# drafted tokens, never their distribution.
# One more row: for the watchdog, and to compare several drafters. Measured on CPUs, and smallest
# for a pass that reads much memory.
ROW_COST = 0.04
# One more row, for the goodput controller before it has measured: sixteen make a pass a quarter
# slower.
ASSUMED_ROW_COST = 1 / 64
# A pass of the drafter, until it is measured.
ASSUMED_DRAFT = 0.1

# Least probabilities of acceptance of drafted tokens.

# In a chain of a drafter that scores its own tokens: a row costs some hundredths of a pass.
LEAST_KEPT = 0.12
# In a tree of such a drafter: a caller that requests a tree has rows to spare.
LEAST_IN_TREE = 0.04
# The first token of prompt lookup: below this it would cost its row and mostly gain nothing.
LEAST_BEGUN = 0.15
# Later tokens of prompt lookup, which follow a likely one.
LEAST_GONE_ON = 0.03
# A node of a tree without a measured row cost, unless its row fills a tile and so costs
# nothing.
LEAST_WORTH = 0.02
# A position whose cost and gain the goodput controller weighs: below, no gain is worth computing.
LEAST_WEIGHED = 0.005


def worthwhile(shape: Shape, price: float | None = None) -> Shape:
    """The shape with only the nodes that are worth a row."""
    return shape.first(num_worthwhile(shape.worths, price))


def num_worthwhile(worths: Sequence[float], price: float | None = None) -> int:
    """The number of nodes to draft, given their worths, which never rise: those that gain at least
    the cost of a row, and at least one. Without a price, those above `LEAST_WORTH`, increased to
    fill the last tile of rows."""
    if price is not None:
        return max(sum(worth >= price for worth in worths), min(1, len(worths)))
    wanted = sum(worth >= LEAST_WORTH for worth in worths)
    return fill_rows(wanted, len(worths))


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost that never falls, through `points` (x, seconds) with growing x. At least one.

    Between measured points a cost is interpolated, and it never falls as rows or depth grow: where
    noise says otherwise, points are pooled to their common mean. Below the first point the cost is
    that of the first, above the last it continues the line from the first to the last point.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points or not all(map(_are_costs, self.points)):
            raise ConfigError("a curve of costs needs points of numbers from 0 up.", hint=_HINT)
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(self.points)):
            raise ConfigError("a curve of costs has points that fall back.", hint=_HINT)

    @classmethod
    def through(cls, samples: Iterable[tuple[float, float, float]]) -> Curve:
        """The curve nearest to samples (x, seconds, weight) by squares (pool adjacent violators).

        Ayer et al. 1955, An empirical distribution function for sampling with incomplete
        information."""
        blocks: list[tuple[tuple[float, ...], float, float]] = []
        for x, seconds, weight in sorted(samples):
            blocks.append(((x,), seconds, weight))
            while len(blocks) > 1 and blocks[-2][1] > blocks[-1][1]:
                blocks[-2:] = [_pooled(blocks[-2], blocks[-1])]
        return cls(tuple((x, seconds) for xs, seconds, _ in blocks for x in xs))

    def at(self, x: float) -> float:
        """Seconds at `x`."""
        points = self.points
        index = bisect_left(points, (x, -1.0))
        if index == 0:
            return points[0][1]
        if index == len(points):
            (left, low), (right, high) = points[0], points[-1]
            slope = (high - low) / (right - left) if right > left else 0.0
            return high + slope * (x - right)
        (left, low), (right, high) = points[index - 1], points[index]
        return low + (high - low) * (x - left) / (right - left)

    def scaled(self, factor: float) -> Curve:
        return Curve(tuple((x, factor * seconds) for x, seconds in self.points))


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs of rounds in seconds. `target` is by rows of a pass; `drafts` is by depth for each
    measured number of sequences, in growing order. `overhead` is the other time of a round, `host`
    that of each of its sequences, and `judge` that of each drafted token after the pass."""

    target: Curve
    drafts: tuple[tuple[int, Curve], ...]
    overhead: float = 0.0
    host: float = 0.0
    judge: float = 0.0

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.drafts]
        if not counts or counts[0] < 1 or any(a >= b for a, b in pairwise(counts)):
            raise ConfigError("a table of costs needs drafts, by growing batch.", hint=_HINT)
        if not _are_costs((self.overhead, self.host, self.judge)):
            raise ConfigError("a table of costs needs overheads from 0 up.", hint=_HINT)

    def target_seconds(self, num_rows: int) -> float:
        return self.target.at(num_rows)

    def draft_seconds(self, depth: int, num_sequences: int) -> float:
        """Seconds measured for the nearest number of sequences, by ratio; 0 for no draft."""
        if depth == 0:
            return 0.0
        near = min(self.drafts, key=lambda entry: abs(math.log(entry[0] / num_sequences)))
        return near[1].at(depth)

    def round_seconds(
        self, num_sequences: int, num_rows: int, depth: int, num_drafting: int
    ) -> float:
        """T of a pass over `num_rows` rows, after `num_drafting` drafts of at most `depth`."""
        drafting = self.draft_seconds(depth, num_drafting) if depth else 0.0
        host = self.host * num_sequences + self.judge * (num_rows - num_sequences)
        return self.overhead + host + self.target.at(num_rows) + drafting

    def token_seconds(self, num_sequences: int, num_drafting: int, size: float) -> float:
        """The time of one more drafted token in a round in which so many draft `size` tokens each:
        the slope from half as many to twice as many, as the first one costs what any draft does."""
        if not num_drafting:
            return 0.0
        few, many = max(round(size / 2), 1), max(round(2 * size), 2)
        less, more = (
            self.round_seconds(num_sequences, num_sequences + num_drafting * n, n, num_drafting)
            for n in (few, many)
        )
        return (more - less) / (num_drafting * (many - few))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> CostTable:
        """The table that `to_json` wrote. Raises ConfigError for any other text."""
        try:
            record = json.loads(text)
            drafts = [(int(count), curve_of(curve)) for count, curve in record["drafts"]]
            shared = [float(record[name]) for name in ("overhead", "host")]
            shared.append(float(record.get("judge", 0.0)))
            return cls(curve_of(record["target"]), tuple(drafts), *shared)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"no table of costs: {error}.", hint=_HINT) from error


_HINT = "measure anew: run without a stored table of costs"


def curve_of(record: Mapping[str, Sequence[Sequence[float]]]) -> Curve:
    return Curve(tuple((float(x), float(seconds)) for x, seconds in record["points"]))


def _are_costs(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) and value >= 0 for value in values)


def _pooled(
    left: tuple[tuple[float, ...], float, float], right: tuple[tuple[float, ...], float, float]
) -> tuple[tuple[float, ...], float, float]:
    weight = left[2] + right[2]
    return ((*left[0], *right[0]), (left[1] * left[2] + right[1] * right[2]) / weight, weight)


WINDOW = 64
LEVEL_WINDOW = 31
# Times of a bucket before it counts for the level.
SETTLED = 8
# Rows have buckets of their own up to here; beyond, an eighth of an octave is one bucket.
EXACT_ROWS = 16
# Deviation of costs from a straight line, as a share, at which a point's own times outweigh it.
MISFIT = 0.1
# The mean deviation of normal noise, in medians of absolute deviations.
_DEVIATIONS = 1.48
# Costs that are assumed before any measurement. Seconds are those of no machine.
ASSUMED = CostTable(
    target=Curve(((1.0, 1.0), (33.0, 1.0 + 32 * ASSUMED_ROW_COST))),
    drafts=((1, Curve(((0.0, 0.0), (1.0, ASSUMED_DRAFT)))),),
)
# Rounds without drafts after which rounds with drafts give the cost of judging.
_FEW = 3
# A stored table counts as so many measurements of each point.
_TRUST = 4


class CostMeter:
    """Measures the costs of rounds. A pure function of its observations, and of `start`, an earlier
    table.

    Every count of rows, and every depth of a draft, has the running median of its last `WINDOW`
    times. A pass that read prompt tokens gives no time of verification, and a draft whose model
    first had to catch up with the text no time of drafting; both are left out. A point counts for
    its median and, as far as its times scatter, for the straight line through all points.

    A machine's speed drifts with its clock, its other users and the length of contexts. So times
    are relative to a common level, which follows the newest passes: old times stay comparable.
    """

    def __init__(self, start: CostTable | None = None) -> None:
        self._target: dict[int, RunningMedian] = {}
        self._drafts: dict[tuple[int, int], RunningMedian] = {}
        self._levels = RunningMedian(LEVEL_WINDOW)
        self._scatter = RunningMedian(WINDOW)
        self._overhead = self._host = self._judge = 0.0
        self._gaps, self._hosts = RunningMedian(LEVEL_WINDOW), RunningMedian(LEVEL_WINDOW)
        self._mixed, self._judges = RunningMedian(LEVEL_WINDOW), RunningMedian(LEVEL_WINDOW)
        if start is not None:
            self._recall(start)

    @property
    def level(self) -> float:
        """Present slowness of the machine, relative to the stored times."""
        return self._levels.median if len(self._levels) > LEVEL_WINDOW // 2 else 1.0

    def observe(self, traces: Sequence[RoundTrace], *, caught_up: bool) -> None:
        """Count the traces of one pass. `caught_up` says that no drafter had text to read first."""
        rounds = [trace for trace in traces if trace.num_emitted]
        if not rounds or any(trace.num_prompt_tokens for trace in traces):
            return
        shared = rounds[0]
        seconds = shared.verify_seconds
        num_rows = sum(1 + trace.num_drafted for trace in rounds)
        times = self._target.setdefault(_rows_bucket(num_rows), RunningMedian(WINDOW))
        level = self.level
        if len(times) >= SETTLED and (usual := times.median) > 0:
            self._levels.add(seconds / usual)
            level = self.level
            self._scatter.add(abs(seconds / usual / level - 1))
        times.add(seconds / level)
        # Host work between passes costs every round alike; the median leaves idling out.
        self._gaps.add(shared.gap_seconds)
        self._overhead = self._gaps.median
        self._time_host(shared.accept_seconds / level, len(rounds), num_rows - len(rounds))
        depths = [trace.num_drafted for trace in rounds if trace.num_drafted]
        if depths and caught_up:
            key = (_count_bucket(len(depths)), max(depths))
            self._drafts.setdefault(key, RunningMedian(WINDOW)).add(shared.draft_seconds / level)

    def _time_host(self, seconds: float, num_sequences: int, num_drafted: int) -> None:
        """Learn host times. Rounds without drafts give the time per sequence, and the rest of other
        rounds is judging; before there are a few of the first kind, judging counts as 0."""
        self._mixed.add(seconds / num_sequences)
        if not num_drafted:
            self._hosts.add(seconds / num_sequences)
        if len(self._hosts) < _FEW:
            self._host = self._mixed.median
            return
        self._host = self._hosts.median
        if num_drafted:
            self._judges.add((seconds - num_sequences * self._host) / num_drafted)
            self._judge = max(self._judges.median, 0.0)

    def table(self) -> CostTable | None:
        """The costs so far; None before the first informative pass."""
        if not self._target:
            return None
        target = self._curve(self._target)
        by_count: dict[int, dict[int, RunningMedian]] = {}
        for (count, depth), times in self._drafts.items():
            by_count.setdefault(count, {})[depth] = times
        drafts = tuple((count, self._from_nothing(by_count[count])) for count in sorted(by_count))
        guess = Curve(((0.0, 0.0), (1.0, ASSUMED_DRAFT * target.points[0][1])))
        host, judge = self.level * self._host, self.level * self._judge
        return CostTable(target, drafts or ((1, guess),), self._overhead, host, judge)

    def _from_nothing(self, points: dict[int, RunningMedian]) -> Curve:
        """The curve through the points and through (0, 0): no draft takes no time."""
        return Curve(((0.0, 0.0), *self._curve(points).points))

    def _curve(self, points: dict[int, RunningMedian]) -> Curve:
        samples = [(x, self.level * times.median, len(times)) for x, times in points.items()]
        start, slope = fit_line(samples)
        scatter = _DEVIATIONS * self._scatter.median if self._scatter else 0.0
        doubt = (scatter / MISFIT) ** 2
        return Curve.through(
            (x, (weight * seconds + doubt * (start + slope * x)) / (weight + doubt), weight)
            for x, seconds, weight in samples
        )

    def _recall(self, table: CostTable) -> None:
        self._overhead, self._host, self._judge = table.overhead, table.host, table.judge
        for rows, seconds in table.target.points:
            times = self._target.setdefault(_rows_bucket(round(rows)), RunningMedian(WINDOW))
            for _ in range(_TRUST):
                times.add(seconds)
        for count, curve in table.drafts:
            for depth, seconds in curve.points:
                if depth:
                    times = self._drafts.setdefault((count, round(depth)), RunningMedian(WINDOW))
                    for _ in range(_TRUST):
                        times.add(seconds)


# Number of remembered readings, and the tokens of a reading that is long enough to count.
NUM_READINGS = 31
LEAST_READ = 16


# The most tokens of a text that must repay the time in which a drafter reads it.
HORIZON = 64.0


class Reading:
    """Time in which the drafter called `by`, or any if it is "", reads text, learnt from the traces
    of passes in their order."""

    def __init__(self, by: str = "") -> None:
        self._by = by
        # Unread tokens; 0 for a sequence whose last round had a draft.
        self._unread: BySequence[int] = BySequence()
        self._seconds_a_token = RunningMedian(NUM_READINGS)
        # A few tokens, such as those of another drafter's round, take one short pass.
        self._seconds_of_few = RunningMedian(NUM_READINGS)
        # Tokens that are written in its rounds from one reading to the next.
        self._run = FadingRate(1 - 1 / NUM_READINGS)

    def ended(self, traces: Sequence[RoundTrace]) -> int:
        """Count a pass. Returns the tokens that its drafter had to read first; 1 for a new text."""
        unread, total = self._unread, 0
        for trace in traces:
            seq_id = trace.seq_id
            if trace.num_drafted and trace.drafter == (self._by or trace.drafter):
                num_read = unread.get(seq_id, 1)
                total += num_read
                self._run.add(trace.num_emitted, float(num_read > 0))
                unread.note(seq_id, 0)
            else:
                fresh = trace.num_prompt_tokens + trace.num_emitted
                unread.note(seq_id, unread.get(seq_id, 0) + fresh)
        return total

    def add(self, seconds: float, num_tokens: int) -> None:
        """Count a reading of so many tokens."""
        if num_tokens >= LEAST_READ:
            self._seconds_a_token.add(max(seconds, 0.0) / num_tokens)
        elif num_tokens > 1:
            self._seconds_of_few.add(max(seconds, 0.0))

    @property
    def horizon(self) -> float:
        """Tokens of a text that must repay the time of a reading."""
        return min(self._run.posterior(HORIZON, 1.0), HORIZON)

    def is_due(self, seq_id: int) -> bool:
        """True if the drafter would have to read tokens of this text."""
        return bool(self._unread.get(seq_id))

    def seconds(self, seq_ids: Iterable[int]) -> float:
        """Time of reading the rest of these texts; 0 before it was measured."""
        few, many = self._seconds_of_few, self._seconds_a_token
        counts = [self._unread.get(seq_id, 0) for seq_id in seq_ids]
        num_tokens = sum(counts)
        if few and num_tokens < LEAST_READ:
            return few.low if num_tokens else 0.0
        return many.low * num_tokens if many else 0.0


def _rows_bucket(num_rows: int) -> int:
    """The rows that represent `num_rows`."""
    if num_rows <= EXACT_ROWS:
        return num_rows
    return round(EXACT_ROWS * 2 ** (round(8 * math.log2(num_rows / EXACT_ROWS)) / 8))


def _count_bucket(count: int) -> int:
    """The power of two from `count` up."""
    return 1 << (count - 1).bit_length()


# Passes of the target that learning may cost at first, and its share of all later passes; the most
# passes that gains may save for a time of losses.
FIRST_LOSS = 6.0
LOSS_SHARE = 0.0025
MOST_SAVED = 16.0
# The part of a draft that is expected to be refused may take so much of what is left: a few bad
# ones do not spend all.
_STAKE = 0.25


@dataclass(slots=True)
class Allowance:
    """Time that drafts may lose against decoding without them, in passes of the target.

    Every round adds `LOSS_SHARE` of a pass, every draft takes its cost and gives back the tokens
    that it gained. Nothing is saved above `most`, so a long good time pays for no long bad one. A
    draft that it cannot pay is not made: in any N rounds drafts lose at most

        most + LOSS_SHARE N passes, and one draft

    whatever the text, the acceptance and the estimates are; and `FIRST_LOSS` instead of `most`
    before anything was gained.
    """

    left: float = FIRST_LOSS
    most: float = FIRST_LOSS

    def add(self, passes: float) -> None:
        """Book the passes that were gained, or lost if below 0. A bad moment, in which a draft
        seems to cost any time, counts as at most twice what may be lost at first."""
        self.left = max(min(self.left + passes, self.most), -FIRST_LOSS)

    def refill(self, passes: float) -> None:
        """Add what every round adds: up to `FIRST_LOSS`, unlike gains."""
        self.left = max(self.left, min(self.left + passes, FIRST_LOSS))

    def pays(self, passes: float) -> bool:
        return self.left >= passes

    def risks(self, passes: float) -> bool:
        """True if so much may be expected to be lost: what is left pays for a few such losses."""
        return passes <= _STAKE * self.left
