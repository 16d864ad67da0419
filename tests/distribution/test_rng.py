"""The counter-based generator: published answers, independence of keys, and statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checks.rng import (
    check_inverse_cdf_edges,
    check_keys_do_not_meet,
    check_picks_and_coins_share_numbers,
    check_positions_are_absolute,
    check_published_vectors,
)
from outrider.core.philox import philox_uniform
from outrider.core.rng import KeyedRng, Role, inverse_cdf
from outrider.core.tree import ROOT

# Fixed seeds make these exact repetitions; the bound is 5 sigma of a chi-square variable.
NUM_DRAWS = 4000


def too_far(observed: list[int], expected: list[float]) -> bool:
    chi_square = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(observed) - 1
    return chi_square > freedom + 5 * math.sqrt(2 * freedom)


def test_published_vectors() -> None:
    check_published_vectors()


def test_keys_do_not_meet() -> None:
    check_keys_do_not_meet()


def test_picks_and_coins_share_numbers() -> None:
    check_picks_and_coins_share_numbers()


def test_positions_are_absolute() -> None:
    check_positions_are_absolute()


def test_inverse_cdf_edges() -> None:
    check_inverse_cdf_edges()


@given(
    weights=st.lists(st.floats(0, 1e30), min_size=1, max_size=20).filter(any),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_inverse_cdf_returns_only_what_has_weight(weights: list[float], uniform: float) -> None:
    weights_V = torch.tensor(weights, dtype=torch.float64)
    assert weights_V[inverse_cdf(weights_V, uniform)] > 0


@given(weights=st.lists(st.integers(0, 9), min_size=2, max_size=9).filter(any))
def test_inverse_cdf_gives_each_index_its_share(weights: list[int]) -> None:
    """Exactly: of the midpoints of `sum(weights)` equal cells, each index gets its weight."""
    total = sum(weights)
    weights_V = torch.tensor(weights)
    drawn = [inverse_cdf(weights_V, (cell + 0.5) / total) for cell in range(total)]
    assert [drawn.count(index) for index in range(len(weights))] == weights


@given(
    seed=st.integers(0, 2**63 - 1),
    counter=st.tuples(*[st.integers(0, 2**32 - 1)] * 4),
)
def test_uniforms_lie_in_the_half_open_unit_interval(
    seed: int, counter: tuple[int, int, int, int]
) -> None:
    uniform = philox_uniform(seed, counter)
    assert 0 <= uniform < 1
    assert uniform * 2**53 == int(uniform * 2**53)


@pytest.mark.parametrize("role", list(Role))
def test_uniforms_are_uniform_along_every_part_of_the_key(role: Role) -> None:
    for place in range(4):
        cells = [0] * 16
        for index in range(NUM_DRAWS):
            counter = [3, 17, 1, int(role)]
            counter[place] = index + 4
            c0, c1, c2, c3 = counter
            cells[int(philox_uniform(11, (c0, c1, c2, c3)) * 16)] += 1
        assert not too_far(cells, [NUM_DRAWS / 16] * 16)


def test_numbers_of_neighbouring_keys_are_independent() -> None:
    """Pairs (draft, accept), (node, next node), (round, next round) fill the square evenly."""
    first = [KeyedRng(5, 0, start) for start in range(NUM_DRAWS + 1)]
    flat_V = torch.ones(4)
    draws = {
        (node, role): [rng.pick(flat_V, node, role) for rng in first]
        for node in (ROOT, 0)
        for role in (Role.DRAFT, Role.ACCEPT)
    }
    left = draws[0, Role.DRAFT]
    for right in (draws[0, Role.ACCEPT], draws[ROOT, Role.DRAFT], left[1:]):
        cells = [0] * 16
        for a, b in zip(left[:NUM_DRAWS], right, strict=False):
            cells[4 * a + b] += 1
        assert not too_far(cells, [NUM_DRAWS / 16] * 16)


def test_coins_and_picks_follow_their_weights() -> None:
    weights_V = torch.tensor([0.5, 0.0, 0.3, 0.2])
    picks = [KeyedRng(1, 3, start).pick(weights_V, 0, Role.NEXT) for start in range(NUM_DRAWS)]
    counts = [picks.count(token) for token in (0, 2, 3)]
    assert sum(counts) == NUM_DRAWS
    assert not too_far(counts, [NUM_DRAWS * share for share in (0.5, 0.3, 0.2)])
    heads = sum(KeyedRng(1, 3, s).coin(0.3, 2, Role.ACCEPT) for s in range(NUM_DRAWS))
    assert not too_far([heads, NUM_DRAWS - heads], [NUM_DRAWS * 0.3, NUM_DRAWS * 0.7])


def test_certain_coins_need_no_luck() -> None:
    rngs = [KeyedRng(0, 0, start) for start in range(200)]
    assert all(rng.coin(1.0, 0, Role.ACCEPT) for rng in rngs)
    assert all(rng.coin(7.5, 0, Role.ACCEPT) for rng in rngs)
    assert not any(rng.coin(0.0, 0, Role.ACCEPT) for rng in rngs)
