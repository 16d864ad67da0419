"""Races of the shipped noise: their numbers, their keys, and very many of them at once."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from outrider.core.philox import minus_log, philox_exponentials, philox_uniform, philox_uniforms
from outrider.core.rng import KeyedRng, Role

# Of ids 0 to 3 at position 7 of sample 1 under seed 5: to the last bit, on any machine.
EXPONENTIALS = (0.7075243712960407, 1.6859455679421274, 0.06816489257713525, 1.1269920959189805)


def race_counts(p_V: Tensor, q_V: Tensor, *, seed: int, num_races: int) -> Tensor:
    """How often i won under p and j under q, of races at positions 0, 1, 2..."""
    positions = np.arange(num_races, dtype=np.uint64)[:, None]
    ids = np.arange(len(p_V), dtype=np.uint64)
    times = torch.as_tensor(philox_exponentials(seed, (ids, positions, 0, int(Role.RACE))))
    winners = [(times / law_V.double()).argmin(-1) for law_V in (p_V, q_V)]
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
        noise = KeyedRng(9, 0, position)
        one_by_one_VV[noise.race_at(p_V, 0), noise.race_at(q_V, 0)] += 1
    assert torch.equal(race_counts(p_V, q_V, seed=9, num_races=300), one_by_one_VV)
    counts_VV = race_counts(p_V, q_V, seed=9, num_races=4000)
    for counts_V, law_V in ((counts_VV.sum(1), p_V), (counts_VV.sum(0), q_V)):
        assert float((counts_V - 4000 * law_V).abs().max()) < 5 * math.sqrt(1000)
