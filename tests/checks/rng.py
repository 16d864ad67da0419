"""Random numbers: the published generator, keys that never meet, races, and draws by weight."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from checks.state import VOCAB
from doubles.drafters import random_trees
from doubles.rig import Request, Rig, model_drafter
from doubles.toy_hybrid import ToyHybrid
from outrider.core.params import SamplingParams
from outrider.core.philox import (
    Counter,
    Floats,
    Word,
    minus_log,
    philox_exponentials,
    philox_uniform,
    philox_uniforms,
)
from outrider.core.protocols import AcceptanceRule, Drafter
from outrider.core.rng import KeyedRng, Role, inverse_cdf, race_node
from outrider.core.tree import ROOT
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule

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


def _position(rng: KeyedRng, depth: int) -> float:
    return number(lambda p: rng.pick_at(torch.tensor([p, 1 - p]).double(), depth) == 0)


def check_keys_do_not_meet() -> None:
    """Every part of the key changes the number: seed, sample, start, node and role."""
    seen: dict[float, tuple[int, ...]] = {}
    for seed, sample, start in itertools.product((0, 1, 2**32, 2**62), (0, 1, 5), (0, 1, 2, 900)):
        rng = KeyedRng(seed, sample, start)
        for node, role in itertools.product((ROOT, 0, 1, 7), (Role.DRAFT, Role.ACCEPT, Role.NEXT)):
            key = (seed, sample, start, node, role)
            found = number(lambda p: rng.coin(p, node, role))  # noqa: B023
            assert seen.setdefault(found, key) == key
    positions = [_position(KeyedRng(seed, sample, 7), 4) for seed in (0, 1) for sample in (0, 1)]
    assert len({*positions, *seen}) == len(positions) + len(seen)


def check_picks_and_coins_share_numbers() -> None:
    """A pick is the inverse CDF of the very number that a coin of the same key would compare."""
    rng = KeyedRng(3, 1, 4)
    coin = number(lambda p: rng.coin(p, 2, Role.NEXT))
    pick = number(lambda p: rng.pick(torch.tensor([p, 1 - p]).double(), 2, Role.NEXT) == 0)
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


PROMPT = (1, 2, 0)
NUM_TOKENS = 25
ASKED = [Request(PROMPT, SamplingParams(temperature=1.2, max_tokens=NUM_TOKENS))]
Used = list[tuple[int, ...]]


def check_no_number_is_used_twice() -> None:
    """Every counter that reaches the generator, over all rounds of a request, is new."""
    for rule in (TokenRule(), BlockRule(), MatchRule(), CoupledRule()):
        for drafter in (model_drafter(ToyHybrid(vocab_size=VOCAB, seed=5)), random_trees(VOCAB)):
            used = counters_of(drafter, rule)
            assert len(used) > NUM_TOKENS
            assert len(set(used)) == len(used)


def counters_of(drafter: Drafter, rule: AcceptanceRule) -> Used:
    """All counters that a generation draws with; a race has one for every id."""
    with recording() as used:
        Rig(ToyHybrid(vocab_size=VOCAB), drafter, rule, k=3).run(ASKED)
    return used


@contextmanager
def recording() -> Generator[Used]:
    used: Used = []

    def one(seed: int, counter: tuple[int, int, int, int]) -> float:
        used.append(counter)
        return philox_uniform(seed, counter)

    def many(seed: Word, counter: Counter) -> Floats:
        rows = np.stack(np.broadcast_arrays(*counter), -1).reshape(-1, 4)
        used.extend(tuple(int(word) for word in row) for row in rows)
        return philox_exponentials(seed, counter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.core.rng.philox_uniform", one)
        patch.setattr("outrider.core.rng.philox_exponentials", many)
        yield used


def check_each_emitted_token_has_its_own_race() -> None:
    """The coupled rule races once at the place of each token that it emits, and nowhere else.

    A drafter that draws with numbers of its own does not change that, and one that races along
    does not change the text.
    """
    plain = Rig(ToyHybrid(vocab_size=VOCAB), rule=CoupledRule(), k=0).run(ASKED)
    for k in (1, 3):
        with raced_places() as places:
            drafted = Rig(ToyHybrid(vocab_size=VOCAB), random_trees(VOCAB), CoupledRule(), k=k)
            assert drafted.run(ASKED) == plain
        assert places == list(range(len(PROMPT), len(PROMPT) + NUM_TOKENS))
        along = model_drafter(ToyHybrid(vocab_size=VOCAB, seed=5), draw=race_node)
        assert Rig(ToyHybrid(vocab_size=VOCAB), along, CoupledRule(), k=k).run(ASKED) == plain


@contextmanager
def raced_places() -> Generator[list[int]]:
    """The absolute places of all races, in order."""
    places: list[int] = []
    race_at = KeyedRng.race_at

    def recorded(rng: KeyedRng, weights_V: Tensor, depth: int) -> int:
        places.append(rng.start + depth)
        return race_at(rng, weights_V, depth)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyedRng, "race_at", recorded)
        yield places


# Of ids 0 to 3 at position 7 of sample 1 under seed 5: to the last bit, on any machine.
EXPONENTIALS = (0.7075243712960407, 1.6859455679421274, 0.06816489257713525, 1.1269920959189805)


def race_counts(p_V: Tensor, q_V: Tensor, *, seed: int, num_races: int) -> Tensor:
    """How often i won under p and j under q, of races at positions 0, 1, 2..."""
    positions = np.arange(num_races, dtype=np.uint64)[:, None]
    ids = np.arange(len(p_V), dtype=np.uint64)
    times = torch.as_tensor(philox_exponentials(seed, (ids, positions, 0, int(Role.RACE))))
    winners = [(times / probs_V.double()).argmin(-1) for probs_V in (p_V, q_V)]
    cells = winners[0] * len(p_V) + winners[1]
    return torch.bincount(cells, minlength=len(p_V) ** 2).reshape(len(p_V), -1)


def check_race_numbers() -> None:
    """Arrays and ints go through one generator; logarithms are right and repeatable."""
    ids = np.arange(64, dtype=np.uint64)
    many = philox_uniforms(2**40 + 3, (ids, 7, 1, 4))
    assert [float(x) for x in many] == [philox_uniform(2**40 + 3, (i, 7, 1, 4)) for i in range(64)]
    times = philox_exponentials(5, (ids[:4], 7, 1, int(Role.RACE)))
    assert [float(time) for time in times] == list(EXPONENTIALS)
    numbers = np.concatenate([many, 2.0 ** -np.arange(1.0, 53), 1 - 2.0 ** -np.arange(2.0, 53)])
    for number, log in zip(numbers, minus_log(numbers), strict=True):
        assert log > 0
        assert abs(log + math.log(number)) <= 4 * math.ulp(log)


def check_races() -> None:
    """A place's numbers are its own: other ids, places, samples, seeds and roles have others.

    Whoever races at a place has the same ones, whatever round it is in; no weight, no win.
    """
    flat_V = torch.ones(64)
    seen = [KeyedRng(s, m, 3).race_at(flat_V, d) for s in (0, 1) for m in (0, 1) for d in range(9)]
    assert len(set(seen)) > 15
    for depth in range(9):
        assert KeyedRng(1, 1, 3).race_at(flat_V, depth) == seen[27 + depth]
        assert KeyedRng(1, 1, 3 + depth).race_at(flat_V, 0) == seen[27 + depth]
    some_V = flat_V.clone()
    some_V[seen[0]] = 0
    assert KeyedRng(0, 0, 3).race_at(some_V, 0) != seen[0]
    assert KeyedRng(0, 0, 3).race_at(torch.eye(64)[5], 0) == 5


def check_race_frequencies() -> None:
    """Races one by one are those that are counted at once, and their winners follow the weights."""
    p_V, q_V = torch.tensor([0.5, 0.0, 0.3, 0.2]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    one_by_one_VV = torch.zeros(4, 4, dtype=torch.int64)
    for position in range(300):
        rng = KeyedRng(9, 0, position)
        one_by_one_VV[rng.race_at(p_V, 0), rng.race_at(q_V, 0)] += 1
    assert torch.equal(race_counts(p_V, q_V, seed=9, num_races=300), one_by_one_VV)
    counts_VV = race_counts(p_V, q_V, seed=9, num_races=4000)
    for counts_V, probs_V in ((counts_VV.sum(1), p_V), (counts_VV.sum(0), q_V)):
        assert float((counts_V - 4000 * probs_V).abs().max()) < 5 * math.sqrt(1000)
