"""Numbers of a table from samples: groups, medians, shares, spreads, ratios, CSV.

A value that was not measured is None and is left out; a statistic of nothing is None.

A speed-up is the ratio of median seconds a token of plain decoding over those of the other side,
over the same pieces of work. Its 95 % interval comes from drawing as many pieces again, with
replacement, many times (Efron, "Bootstrap Methods: Another Look at the Jackknife", 1979; percentile
interval). A piece keeps its two sides together, and its repeats are first reduced to their median:
they are not independent pieces. The draws have a fixed seed, so the same samples in the same order
give the same interval. With few pieces the draws are too much alike: intervals from two pieces hold
the true value about half of the time and from three 75 %; from five on they hold it 95 % of the
time, so fewer pieces get no interval.
"""

from __future__ import annotations

import csv
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Generic, TypeVar

import numpy as np

# The numbers that a study measures.
N = TypeVar("N")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Generic[N]):
    """One measurement. `reason` says why it failed, None if it did not; a failed one may have
    numbers all the same. `foreign_cpu_share` is the CPU share of other programs during the visit
    (machine.py)."""

    repeat: int
    reason: str | None
    numbers: N | None = None
    foreign_cpu_share: float | None = None

    @property
    def ok(self) -> bool:
        return self.reason is None

    @property
    def good(self) -> N | None:
        """The numbers of a sample that did not fail."""
        return self.numbers if self.ok else None


def good_numbers(samples: Iterable[Sample[N]]) -> list[N]:
    """Numbers of the samples that did not fail."""
    return [numbers for sample in samples if (numbers := sample.good) is not None]


def mean_foreign_share(samples: Iterable[Sample[N]]) -> float | None:
    """Mean share of the CPUs that other programs used, over all visits."""
    return mean(sample.foreign_cpu_share for sample in samples)


T = TypeVar("T")
G = TypeVar("G", bound=Hashable)

MIN_PAIRS = 5
_NUM_DRAWS = 4000
_PERCENTILES = (2.5, 97.5)
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio. `low` and `high` bound its 95 % interval; they are None below MIN_PAIRS."""

    value: float
    low: float | None
    high: float | None
    num_pairs: int

    def __post_init__(self) -> None:
        """Raises ValueError for values that only an edited results file can have."""
        if not self.value > 0:
            raise ValueError(f"a ratio is {self.value!r:.40}")
        if (self.low is None) != (self.high is None):
            raise ValueError("an interval has one end only")

    @property
    def verdict(self) -> str:
        """The verdict by the interval alone; above 1 is better."""
        if self.low is None or self.high is None:
            return "not judged"
        return "gain" if self.low > 1 else "loss" if self.high < 1 else "no measurable difference"


def spoken(ratio: Ratio) -> str:
    """The ratio in words: 1.05× (1.01 to 1.09), or without the interval if there is none."""
    interval = "" if ratio.low is None else f" ({ratio.low:.3f} to {ratio.high:.3f})"
    return f"{ratio.value:.3f}×{interval}"


def ratio_of_medians(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """median(over) / median(under); values of one index belong to one piece of work."""
    above, below = np.asarray(over, dtype=np.float64), np.asarray(under, dtype=np.float64)
    value = float(np.median(above) / np.median(below))
    num = len(above)
    if num < MIN_PAIRS:
        return Ratio(value, None, None, num)
    picks = np.random.default_rng(0).integers(num, size=(_NUM_DRAWS, num))
    drawn = np.median(above[picks], axis=1) / np.median(below[picks], axis=1)
    low, high = np.percentile(drawn, _PERCENTILES)
    return Ratio(value, float(low), float(high), num)


def paired_ratio(over: Mapping[G, float], under: Mapping[G, float]) -> Ratio | None:
    """The ratio over the pieces that both have, in the order of `under`; None without any."""
    both = [piece for piece in under if piece in over]
    if not both:
        return None
    return ratio_of_medians([over[piece] for piece in both], [under[piece] for piece in both])


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and sample standard deviation; `std` is None for a single value."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        known = _known(values)
        if not known:
            return None
        std = round(statistics.stdev(known), 6) if len(known) > 1 else None
        return cls(round(statistics.fmean(known), 6), std)


def grouped(items: Iterable[T], key: Callable[[T], G]) -> dict[G, list[T]]:
    """The items of each key, both in the order in which they came."""
    found: dict[G, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def medians(values: Iterable[tuple[G, float]]) -> dict[G, float]:
    """The median of each key's values: the repeats of each piece of work, for a ratio."""
    by_key = grouped(values, key=lambda pair: pair[0])
    return {key: statistics.median(value for _, value in pairs) for key, pairs in by_key.items()}


def median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return round(statistics.median(known), _DIGITS) if known else None


def mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return round(statistics.fmean(known), _DIGITS) if known else None


def share(part: float, whole: float) -> float | None:
    """A share or a rate: tokens a round, accepted drafts of those drafted."""
    return round(part / whole, _DIGITS) if whole else None


def failures(reasons: Iterable[str | None]) -> dict[str, int]:
    """The number of times that each reason was given, by its words."""
    return dict(sorted(Counter(reason for reason in reasons if reason is not None).items()))


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """A CSV file: a header and a line per row; the empty string for no rows."""
    text = StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
