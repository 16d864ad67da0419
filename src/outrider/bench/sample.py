"""One measurement: what a contestant did with a piece of work at one repeat.

Every study extends `Sample` by what names its cells (a configuration, a domain, a level), and says
what its numbers are. Samples of one visit were measured in turns, a moment after one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.bench.frame import mean

# What a study measures.
N = TypeVar("N")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Generic[N]):
    """`reason` says why it failed, None if it did not; a failed one may have numbers all the same.
    `foreign_cpu_share` is that of other programs during the visit (bench/machine.py)."""

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
    """Of the samples that did not fail."""
    return [numbers for sample in samples if (numbers := sample.good) is not None]


def mean_foreign_share(samples: Iterable[Sample[N]]) -> float | None:
    """Of the CPUs, over all visits."""
    return mean(sample.foreign_cpu_share for sample in samples)
