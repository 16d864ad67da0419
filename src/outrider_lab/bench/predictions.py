"""How good predicted speed-ups were, in files of studies/plan_cells.py: errors and signs.

The error of a cell is |predicted / measured - 1| of the speed-up. A sign is right where predicted
and measured speed-up are on the same side of 1; it is surely known where the interval of the
measured one, from its repeats, leaves out 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.plugins.measure.turns import ratio_of_medians

SCHEMA = "outrider-plan-cells/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A cell with both of its lines. `low` and `high` bound the measured speed-up. `predicted` is
    of these very texts; `by_law` and `by_places` of texts that are like them in that, if told."""

    number: int
    drafter: str
    k: int
    batch: int
    context: int
    stratum: str
    predicted: float
    measured: float
    low: float | None
    high: float | None
    same: bool | None
    by_law: float | None = None
    by_places: float | None = None

    @property
    def error(self) -> float:
        """Signed: above 0 where too much was promised."""
        return self.predicted / self.measured - 1

    @property
    def sign_is_right(self) -> bool:
        return (self.predicted > 1) == (self.measured > 1)

    @property
    def is_sure(self) -> bool:
        """Whether the measured interval leaves out 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Over `count` cells; `bias` is the median of signed errors. Shares of right signs are None
    where there is no cell to count."""

    count: int
    median: float
    percentile_95: float
    bias: float
    right_signs: float
    sure: int
    right_of_sure: float | None
    losing: int


def results_of(
    cells: Mapping[int, Mapping[str, Any]],
    predictions: Mapping[int, Mapping[str, Any]],
    measured: Mapping[int, Mapping[str, Any]],
) -> list[Result]:
    """Those cells that have been predicted and measured, in the order of the draw."""
    found: list[Result] = []
    for number in sorted(cells.keys() & predictions.keys() & measured.keys()):
        cell, line = cells[number], measured[number]
        ratio = ratio_of_medians(line["plain"], line["drafted"])
        found.append(
            Result(
                number=number,
                drafter=cell["drafter"],
                k=cell["k"],
                batch=cell["batch"],
                context=cell["context"],
                stratum=cell["stratum"],
                predicted=predictions[number]["speed_up"],
                measured=ratio.value,
                low=ratio.low,
                high=ratio.high,
                same=line["same"],
                by_law=predictions[number].get("by_law"),
                by_places=predictions[number].get("by_places"),
            )
        )
    return found


def accuracy(results: Sequence[Result]) -> Accuracy:
    """Of at least one cell."""
    errors = [abs(result.error) for result in results]
    sure = [result for result in results if result.is_sure]
    return Accuracy(
        count=len(results),
        median=statistics.median(errors),
        percentile_95=float(np.percentile(errors, 95)),
        bias=statistics.median(result.error for result in results),
        right_signs=statistics.fmean(result.sign_is_right for result in results),
        sure=len(sure),
        right_of_sure=statistics.fmean(r.sign_is_right for r in sure) if sure else None,
        losing=sum(result.measured < 1 for result in results),
    )


def by_kind(results: Sequence[Result], kind: Callable[[Result], str]) -> list[tuple[str, Accuracy]]:
    """Accuracy of each kind of cells, by name."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(kind(result), []).append(result)
    return [(name, accuracy(groups[name])) for name in sorted(groups)]


def of_unseen(results: Sequence[Result]) -> list[tuple[str, Accuracy]]:
    """How good predictions of texts that nobody replayed round by round are: by the distribution of
    their rounds, as `outrider plan` reckons, and by places alone."""
    ways: Mapping[str, Callable[[Result], float | None]] = {
        "by distribution": lambda one: one.by_law,
        "by places": lambda one: one.by_places,
    }
    found: list[tuple[str, Accuracy]] = []
    for name, way in ways.items():
        judged = [replace(one, predicted=said) for one in results if (said := way(one)) is not None]
        if judged:
            found.append((name, accuracy(judged)))
    return found
