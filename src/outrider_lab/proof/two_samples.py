"""Two samples of texts compared by exact permutation tests, without a model and without tensors.

Texts of one prompt are exchangeable if speculation changes nothing: which side wrote which text can
be shuffled. A p-value is the share of shuffles whose statistic is at least the observed one, so it
holds for any number of texts and any distribution. It assumes only that requests are independent.

"Tokens by position" and "adjacent tokens" are squared distances of the distributions of units at
each position and of pairs in a text (maximum mean discrepancy with kernels that count equal ones).
Other statistics are differences of means of a text's values.

Gretton et al. 2012 (maximum mean discrepancy); Phipson and Smyth 2010 (p-values of shuffles).

Shapes:  B = shuffles, N = texts of a prompt on both sides, L = positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
NUM_SHUFFLES = 9_999
_KERNELS = ("tokens by position", "adjacent tokens")
_ENDED = -1
_POWER, _CONFIDENCE = NormalDist().inv_cdf(0.99), NormalDist().inv_cdf(0.95)


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled text in units, tokens or words, and its values of further statistics by name."""

    units: tuple[str, ...]
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Pair:
    """Samples of one prompt without speculation (`plain`) and with it (`drafted`)."""

    plain: Sequence[Sample]
    drafted: Sequence[Sample]

    @property
    def all(self) -> list[Sample]:
        return [*self.plain, *self.drafted]


@dataclass(frozen=True, slots=True)
class Permutation:
    """One statistic's test. `effect` is the difference of means, drafted minus plain, and `finds`
    the absolute difference that the test finds with probability 0.99; None for positions."""

    statistic: str
    p_value: float
    effect: float | None = None
    finds: float | None = None


def permutation_tests(pairs: Sequence[Pair], *, level: float, seed: int) -> Iterator[Permutation]:
    """Yield the test of each statistic, to be compared with `level`."""
    rng = np.random.default_rng(seed)
    labels = [_shuffled_labels(pair, rng) for pair in pairs]
    kernels = [_kernels(pair) for pair in pairs]
    for name, several in zip(_KERNELS, zip(*kernels, strict=True), strict=True):
        both = zip(labels, several, strict=True)
        found_B = sum(((z_BN @ k_NN) * z_BN).sum(-1) for z_BN, k_NN in both)
        yield Permutation(name, _p_value(np.asarray(found_B)))
    for name in pairs[0].plain[0].values:
        shifts_B = sum(
            z_BN @ np.array([sample.values[name] for sample in pair.all])
            for z_BN, pair in zip(labels, pairs, strict=True)
        )
        shift_B = np.asarray(shifts_B) / len(pairs)
        finds = (NormalDist().inv_cdf(1 - level / 2) + _POWER) * float(shift_B[1:].std())
        yield Permutation(name, _p_value(np.abs(shift_B)), float(shift_B[0]), finds)


def distance(pairs: Sequence[Pair]) -> float:
    """Return a lower bound, at 95 %, of the total variation of the distributions at a position,
    averaged over positions and prompts; 0 if nothing is shown.

    One half of the texts chooses for each position the units that the drafted side writes more
    often; the other half counts how much more often it does. Any such difference of probabilities
    is at most the total variation, so a poor choice makes the bound lower, never too high.
    """
    means: list[float] = []
    variances: list[float] = []
    for pair in pairs:
        codes_NL = _codes(pair)
        plain_NL, drafted_NL = codes_NL[: len(pair.plain)], codes_NL[len(pair.plain) :]
        events = [
            [code for code in np.unique(column_N) if _share(code, column_N) > _share(code, other_N)]
            for column_N, other_N in zip(drafted_NL[::2].T, plain_NL[::2].T, strict=True)
        ]
        sides = [
            np.array([np.isin(half_NL[:, i], event) for i, event in enumerate(events)]).mean(0)
            for half_NL in (drafted_NL[1::2], plain_NL[1::2])
        ]
        means.append(float(sides[0].mean() - sides[1].mean()))
        variances.append(sum(float(side.var(ddof=1)) / len(side) for side in sides))
    error = math.sqrt(sum(variances)) / len(pairs)
    return max(0.0, sum(means) / len(pairs) - _CONFIDENCE * error)


def _share(code: np.int64, codes_N: NDArray[np.int64]) -> float:
    return float((codes_N == code).mean())


def _codes(pair: Pair) -> NDArray[np.int64]:
    """Return the units as numbers, of shape NL; -1 after the end of a text."""
    numbers: dict[str, int] = {}
    length = max((len(sample.units) for sample in pair.all), default=0)
    codes_NL = np.full((len(pair.all), max(length, 1)), _ENDED, np.int64)
    for row, sample in enumerate(pair.all):
        for column, unit in enumerate(sample.units):
            codes_NL[row, column] = numbers.setdefault(unit, len(numbers))
    return codes_NL


def _kernels(pair: Pair) -> tuple[Floats, Floats]:
    """Return the shares of positions at which two texts agree, and of pairs that both have."""
    codes_NL = _codes(pair)
    num, length = codes_NL.shape
    equal_NN = (codes_NL[:, None] == codes_NL[None]).sum(-1)
    pairs = (codes_NL[:, :-1] + 1) * (codes_NL.max() + 2) + codes_NL[:, 1:] + 1
    kinds = np.unique(pairs, return_inverse=True)[1].reshape(num, -1)
    counts_NK = np.stack([np.bincount(row, minlength=kinds.max(initial=0) + 1) for row in kinds])
    return equal_NN / length, counts_NK @ counts_NK.T / length


def _shuffled_labels(pair: Pair, rng: np.random.Generator) -> Floats:
    """Return weights of the texts, of shape BN, the observed ones first: their product with a
    column is the mean of the drafted side minus that of the plain side."""
    num_plain, num_drafted = len(pair.plain), len(pair.drafted)
    own_N = np.repeat([-1 / num_plain, 1 / num_drafted], [num_plain, num_drafted])
    shuffled_BN = rng.permuted(np.tile(own_N, (NUM_SHUFFLES, 1)), axis=1)
    return np.concatenate([own_N[None], shuffled_BN])


def _p_value(statistic_B: Floats) -> float:
    """Return the share of shuffles, the observed labels among them, that reach the first value."""
    slack = 1e-9 * max(1.0, abs(float(statistic_B[0])))
    return float((statistic_B >= statistic_B[0] - slack).mean())
