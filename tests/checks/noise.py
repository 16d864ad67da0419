"""Random numbers: the published generator, keys that never meet, and draws that follow weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from outrider.core.philox import philox_uniform
from outrider.core.rng import KeyedRng, Role, inverse_cdf
from outrider.core.tree import ROOT

FULL = 0xFFFFFFFF
# Known answers of Random123 for Philox4x32-10: key, counter, first two words of the block.
VECTORS: tuple[tuple[tuple[int, int], tuple[int, int, int, int], tuple[int, int]], ...] = (
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D)),
    ((FULL, FULL), (FULL, FULL, FULL, FULL), (0x408F276D, 0x41C83B0E)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB),
    ),
)


def check_published_vectors() -> None:
    for (low, high), counter, (first, second) in VECTORS:
        wanted = ((first << 32 | second) >> 11) / 2**53
        assert philox_uniform(high << 32 | low, counter) == wanted


def number(coin: Callable[[float], bool]) -> float:
    """The number in [0, 1) behind a coin, to 40 bits: tossing it again gives the same answer."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if coin(middle) else (middle, high)
    return low


def _position(noise: KeyedRng, depth: int) -> float:
    return number(lambda p: noise.pick_at(torch.tensor([p, 1 - p]).double(), depth) == 0)


def check_keys_do_not_meet() -> None:
    """Every part of the key changes the number: seed, sample, start, node and role."""
    seen: dict[float, tuple[int, ...]] = {}
    for seed, sample, start in itertools.product((0, 1, 2**32, 2**62), (0, 1, 5), (0, 1, 2, 900)):
        noise = KeyedRng(seed, sample, start)
        for node, role in itertools.product((ROOT, 0, 1, 7), (Role.DRAFT, Role.ACCEPT, Role.NEXT)):
            key = (seed, sample, start, node, role)
            found = number(lambda p: noise.coin(p, node, role))  # noqa: B023
            assert seen.setdefault(found, key) == key
    positions = [_position(KeyedRng(seed, sample, 7), 4) for seed in (0, 1) for sample in (0, 1)]
    assert len({*positions, *seen}) == len(positions) + len(seen)


def check_picks_and_coins_share_numbers() -> None:
    """A pick is the inverse CDF of the very number that a coin of the same key would compare."""
    noise = KeyedRng(3, 1, 4)
    coin = number(lambda p: noise.coin(p, 2, Role.NEXT))
    pick = number(lambda p: noise.pick(torch.tensor([p, 1 - p]).double(), 2, Role.NEXT) == 0)
    assert abs(coin - pick) < 1e-9


def check_positions_are_absolute() -> None:
    """The number of a place is the same whichever round reaches it, and of no other place."""
    assert len({_position(KeyedRng(9, 2, start), 9 - start) for start in range(10)}) == 1
    assert len({_position(KeyedRng(9, 2, 30), depth) for depth in range(20)}) == 20


def check_inverse_cdf_edges() -> None:
    """No index of weight zero is ever returned, however close to 0 or 1 the number lies."""
    below_one = 1 - 2.0**-53
    for weights in (
        [0, 1, 0],
        [0, 0, 2, 0, 3, 0],
        [1e-300, 0],
        [0, 5e-324],
        [0, 1e-30, 1],
        [3, 0],
        [0, 7],
    ):
        weights_V = torch.tensor(weights, dtype=torch.float64)
        for uniform in (0.0, 5e-324, 2.0**-53, 0.3, 0.5, 1 - 2.0**-52, below_one):
            assert weights_V[inverse_cdf(weights_V, uniform)] > 0
    thirds_V = torch.full((3,), 1 / 3, dtype=torch.float64)
    assert inverse_cdf(thirds_V, below_one) == 2
    assert inverse_cdf(torch.tensor([1.0, 1.0]), 0.5) == 1
    assert inverse_cdf(torch.tensor([1.0, 1.0]), 0.5 - 2.0**-53) == 0
