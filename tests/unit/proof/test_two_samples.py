"""Permutation tests of two samples of texts: their level, what they find, their lower bound."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import pytest

from outrider_lab.proof.two_samples import (
    NUM_SHUFFLES,
    Pair,
    Sample,
    distance,
    permutation_tests,
)

LENGTH = 8


def texts(number: int, weights: Sequence[float], seed: int) -> list[Sample]:
    """Texts of independent letters."""
    rng = random.Random(seed)
    found: list[Sample] = []
    for _ in range(number):
        units = tuple(rng.choices("abcd", weights, k=LENGTH))
        found.append(Sample(units, {"share of a": units.count("a") / LENGTH}))
    return found


def p_values(pairs: Sequence[Pair], seed: int = 0) -> dict[str, float]:
    return {
        test.statistic: test.p_value for test in permutation_tests(pairs, level=0.001, seed=seed)
    }


def test_equal_distributions_have_p_values_above_their_level() -> None:
    alike = (4, 3, 2, 1)
    small = [
        min(p_values([Pair(texts(12, alike, 2 * i), texts(12, alike, 2 * i + 1))]).values())
        for i in range(60)
    ]
    # Three tests each: at most 9 of 60 are expected below 0.05, and 20 are one in 5,000.
    assert sum(p < 0.05 for p in small) <= 20
    assert min(small) >= 1 / (NUM_SHUFFLES + 1)


def test_other_distributions_are_found_by_every_statistic() -> None:
    pairs = [Pair(texts(24, (4, 3, 2, 1), i), texts(24, (9, 1, 1, 1), 50 + i)) for i in range(2)]
    found = {test.statistic: test for test in permutation_tests(pairs, level=0.001, seed=0)}
    assert [test.p_value for test in found.values()] == [1 / (NUM_SHUFFLES + 1)] * 3
    share = found["share of a"]
    # 9/12 and 4/10.
    assert share.effect == pytest.approx(0.35, abs=0.08)
    assert share.finds is not None
    assert 0.05 < share.finds < 0.35


def test_the_bound_of_the_total_variation_is_below_it_and_near_it() -> None:
    pairs = [Pair(texts(200, (4, 3, 2, 1), i), texts(200, (9, 1, 1, 1), 50 + i)) for i in range(2)]
    assert 0.3 < distance(pairs) < 0.35
    alike = [Pair(texts(40, (1, 1, 1, 1), i), texts(40, (1, 1, 1, 1), 50 + i)) for i in range(2)]
    assert distance(alike) < 0.05


def test_texts_of_several_lengths_and_empty_ones_are_compared() -> None:
    short = [Sample(("a",), {}) for _ in range(8)]
    pairs = [Pair([Sample((), {}) for _ in range(8)], short)]
    assert p_values(pairs)["tokens by position"] < 0.001
    assert p_values([Pair(short, short)])["tokens by position"] == 1.0


def test_tensors_are_not_needed() -> None:
    module = sys.modules["outrider_lab.proof.two_samples"]
    assert not hasattr(module, "torch")
