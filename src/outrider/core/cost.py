"""What a round costs on this machine, as measured: seconds by packed rows and by drafted depth.

A round of b sequences with drafts of K_1 to K_b tokens takes

    T = overhead + host b + target(b + K_1 + ... + K_b) + draft(max K, number of K > 0)

The target reads its weights once for all rows of a pass, so its seconds go by rows, whoever they
belong to. What the host does after a pass (text, memory, records) goes by sequences. A drafter that
is a model runs once a token for all sequences that still draft, so its seconds go by depth, for
each number of sequences.

Between measured points a cost is interpolated, and it never falls as rows or depth grow: where
noise says otherwise, points are pooled to their common mean. Below the first point it is that of
the first, above the last it goes on along the line from the first to the last point.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from outrider.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost that never falls, through `points` (x, seconds) with growing x. At least one."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points or not all(map(_are_costs, self.points)):
            raise ConfigError("a curve of costs needs points of numbers from 0 up.", hint=_HINT)
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(self.points)):
            raise ConfigError("a curve of costs has points that fall back.", hint=_HINT)

    @classmethod
    def through(cls, samples: Iterable[tuple[float, float, float]]) -> Curve:
        """The nearest curve to samples (x, seconds, weight), by squares (pool adjacent violators).

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
    """`target` is seconds by rows of a pass; `drafts` has seconds by depth for each number of
    sequences that was measured, in growing order. `overhead` is what a round takes besides, and
    `host` what each of its sequences does."""

    target: Curve
    drafts: tuple[tuple[int, Curve], ...]
    overhead: float = 0.0
    host: float = 0.0

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.drafts]
        if not counts or counts[0] < 1 or any(a >= b for a, b in pairwise(counts)):
            raise ConfigError("a table of costs needs drafts, by growing batch.", hint=_HINT)
        if not _are_costs((self.overhead, self.host)):
            raise ConfigError("a table of costs needs overheads from 0 up.", hint=_HINT)

    def target_seconds(self, num_rows: int) -> float:
        return self.target.at(num_rows)

    def draft_seconds(self, depth: int, num_sequences: int) -> float:
        """As measured for the nearest number of sequences, by ratio; nothing for no draft."""
        if depth == 0:
            return 0.0
        near = min(self.drafts, key=lambda entry: abs(math.log(entry[0] / num_sequences)))
        return near[1].at(depth)

    def round_seconds(
        self, num_sequences: int, num_rows: int, depth: int, num_drafting: int
    ) -> float:
        """T of a pass over `num_rows` of so many sequences, after drafts of at most `depth` for
        `num_drafting` of them."""
        drafting = self.draft_seconds(depth, num_drafting) if depth else 0.0
        return self.overhead + self.host * num_sequences + self.target.at(num_rows) + drafting

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> CostTable:
        """What `to_json` wrote. Raises ConfigError if this is something else."""
        try:
            record = json.loads(text)
            drafts = [(int(count), _curve(curve)) for count, curve in record["drafts"]]
            shared = float(record["overhead"]), float(record["host"])
            return cls(_curve(record["target"]), tuple(drafts), *shared)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"no table of costs: {error}.", hint=_HINT) from error


_HINT = "measure anew: run without a stored table of costs"


def _curve(record: dict[str, Sequence[Sequence[float]]]) -> Curve:
    return Curve(tuple((float(x), float(seconds)) for x, seconds in record["points"]))


def _are_costs(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) and value >= 0 for value in values)


def _pooled(
    left: tuple[tuple[float, ...], float, float], right: tuple[tuple[float, ...], float, float]
) -> tuple[tuple[float, ...], float, float]:
    weight = left[2] + right[2]
    return (
        (*left[0], *right[0]),
        (left[1] * left[2] + right[1] * right[2]) / weight,
        weight,
    )
