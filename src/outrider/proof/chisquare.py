"""The chi-square test with a false-alarm rate that is stated and kept.

Counts of cells are compared with what the law gives; cells that expect fewer than five are pooled,
since the statistic follows its limit law only above that. Of all p-values of a certificate the
smallest is held against FAMILY_LEVEL divided by their number (Bonferroni), so that the chance of
one false alarm in a whole certificate is below FAMILY_LEVEL.

Pearson 1900; pooling at five is Cochran 1954.

Shapes:  S = samples (runs), C = cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

FAMILY_LEVEL = 1e-6
MIN_EXPECTED = 5.0


def p_values(counts_SC: Tensor, probs_C: Tensor) -> Tensor:
    """One p-value a run, in float64; all runs drew equally often.

    A cell of no probability that was hit makes its run's p-value 0, and where all mass lies in one
    cell there is nothing to test and the p-value is 1.
    """
    counts_SC = counts_SC.double()
    probs_C = probs_C.double()
    num_draws = float(counts_SC[0].sum())
    impossible_S = counts_SC[:, probs_C == 0].sum(-1) > 0
    groups = _groups([float(count) for count in probs_C * num_draws])
    statistic_S = torch.zeros(counts_SC.shape[0], dtype=torch.float64)
    for group in groups:
        expected = float(probs_C[group].sum()) * num_draws
        statistic_S += (counts_SC[:, group].sum(-1) - expected) ** 2 / expected
    if len(groups) < 2:
        values_S = torch.ones_like(statistic_S)
    else:
        freedom_S = torch.full_like(statistic_S, (len(groups) - 1) / 2)
        values_S = _upper_gamma(freedom_S, statistic_S / 2)
    return values_S.masked_fill(impossible_S, 0.0)


def p_value(counts: Sequence[int], probs: Sequence[float]) -> float:
    """Of a single run."""
    counts_1C = torch.tensor([counts], dtype=torch.float64)
    return float(p_values(counts_1C, torch.tensor(probs, dtype=torch.float64))[0])


def threshold(num_tests: int) -> float:
    """The p-value below which a certificate of so many tests fails."""
    return FAMILY_LEVEL / num_tests


def _upper_gamma(half_freedom_S: Tensor, half_statistic_S: Tensor) -> Tensor:
    """The chance of a statistic at least so large."""
    special = cast("Any", torch.special)
    return cast("Tensor", special.gammaincc(half_freedom_S, half_statistic_S))


def _groups(expected: Sequence[float]) -> list[list[int]]:
    """Cells that are tested together: each that expects enough alone, and the rest as one."""
    alone = [[cell] for cell, count in enumerate(expected) if count >= MIN_EXPECTED]
    pooled = [cell for cell, count in enumerate(expected) if 0 < count < MIN_EXPECTED]
    if not pooled:
        return alone
    if alone and sum(expected[cell] for cell in pooled) < MIN_EXPECTED:
        smallest = min(alone, key=lambda group: expected[group[0]])
        alone.remove(smallest)
        pooled = sorted([*pooled, *smallest])
    return [*alone, pooled]
