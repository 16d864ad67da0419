"""Head to head: in how many visits one engine did better than another.

A visit counts for a pair of engines if both served all of its requests. Counts say how steady a
lead is and nothing of its size, which is what the ratios are for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from outrider.bench.engines.samples import Sample
from outrider.bench.load.tally import Numbers

# What is compared, as a number of which more is better.
METRICS: Mapping[str, Callable[[Numbers], float | None]] = {
    "throughput": lambda n: n.tokens_per_second,
    "ITL p95": lambda n: None if n.itl_p95_ms is None else -n.itl_p95_ms,
    "TTFT p95": lambda n: None if n.ttft_p95_ms is None else -n.ttft_p95_ms,
    "end-to-end": lambda n: None if n.total_mean_ms is None else -n.total_mean_ms,
}


@dataclass(frozen=True, slots=True)
class HeadToHead:
    """Visits that `first` won, that `second` won, and that neither did."""

    metric: str
    first: str
    second: str
    first_wins: int
    second_wins: int
    ties: int


def head_to_head(samples: Sequence[Sample]) -> list[HeadToHead]:
    """Every pair of engines in every metric, in the order in which engines were measured."""
    engines = list(dict.fromkeys(sample.engine for sample in samples))
    found = {
        (sample.engine, sample.level, sample.repeat): sample.numbers
        for sample in samples
        if sample.ok and sample.numbers is not None
    }
    places = sorted({(level, repeat) for _, level, repeat in found})
    rows: list[HeadToHead] = []
    for metric, value in METRICS.items():
        for first, second in combinations(engines, 2):
            signs = [
                _sign(found.get((first, *place)), found.get((second, *place)), value)
                for place in places
            ]
            rows.append(
                HeadToHead(metric, first, second, signs.count(1), signs.count(-1), signs.count(0))
            )
    return rows


def _sign(
    first: Numbers | None, second: Numbers | None, value: Callable[[Numbers], float | None]
) -> int | None:
    if first is None or second is None:
        return None
    a, b = value(first), value(second)
    return None if a is None or b is None else (a > b) - (a < b)
