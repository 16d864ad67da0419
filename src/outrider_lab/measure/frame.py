"""Numbers of a table from samples: groups, medians, shares, spreads, ratios, CSV.

A value that was not measured is None and is left out; a statistic of nothing is None.

A speed-up is a ratio of medians over the same pieces of work (outrider/plugins/measure/turns.py). A
piece keeps its two sides together, and its repeats are first reduced to their median: they are not
independent pieces.
"""

from __future__ import annotations

import csv
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Generic, TypeVar

from outrider.plugins.measure.turns import Ratio, ratio_of_medians

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

_DIGITS = 4


def spoken(ratio: Ratio) -> str:
    """The ratio in words: 1.05× (1.01 to 1.09), or without the interval if there is none."""
    interval = "" if ratio.low is None else f" ({ratio.low:.3f} to {ratio.high:.3f})"
    return f"{ratio.value:.3f}×{interval}"


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
