"""Exact laws: run an experiment once for every way its random choices can fall.

`EveryBranch` is a `Noise` that replays a script of choices and then takes first options. `law`
runs an experiment, looks at which choices it took and with what weights, and runs it again for each
option not yet taken. The weight of a run is the product of its choices' weights, so the result is
the experiment's law itself, without sampling.

Two races at one place share their numbers, so the second one's law is that given the first one's
winner (`proof/races.py`).

Shapes:  V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor

from outrider.core.rng import ROOT, Role
from outrider.proof.races import joint_winner

Tokens = tuple[int, ...]
Law = dict[Tokens, float]
_Key = tuple[int, int, Role]


class BadDrawError(AssertionError):
    """An experiment asked for randomness in a way that no exact one does."""


class EveryBranch:
    """Keys are those of production, and no key may be drawn twice: the two draws would be equal.

    A round says where it starts by `at`; the choices of all rounds form one script. What a round
    raced for at places that it did not come to is forgotten, since nothing has looked at it. Raises
    BadDrawError.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.taken: list[tuple[int, tuple[float, ...]]] = []
        self._script = tuple(script)
        self._start = 0
        self._keys: set[_Key] = set()
        self._races: dict[int, tuple[int, tuple[float, ...]]] = {}

    def at(self, start: int) -> EveryBranch:
        if start != self._start:
            self._races = {place: race for place, race in self._races.items() if place < start}
            self._keys = {key for key in self._keys if key[2] != Role.RACE or key[0] < start}
        self._start = start
        return self

    def coin(self, probability: float, node: int, role: Role) -> bool:
        if math.isnan(probability):
            raise BadDrawError(f"a coin of no probability at node {node}")
        heads = min(1.0, max(0.0, probability))
        return self._choose((1 - heads, heads), (self._start, node, role)) == 1

    def pick(self, weights_V: Tensor, node: int, role: Role) -> int:
        return self._choose(_shares(weights_V), (self._start, node, role))

    def pick_at(self, weights_V: Tensor, depth: int) -> int:
        key = (self._start + depth, ROOT, Role.POSITION)
        return self._choose(_shares(weights_V), key)

    def race_at(self, weights_V: Tensor, depth: int) -> int:
        """Drafter and rule may race once each at a place in a round."""
        place = self._start + depth
        weights = _shares(weights_V)
        if place not in self._races:
            winner = self._choose(weights, (place, 0, Role.RACE))
            self._races[place] = (winner, weights)
            return winner
        before, others = self._races[place]
        joint = [joint_winner(weights, others, i, before) for i in range(len(weights))]
        return self._choose(_normal(joint), (place, 1, Role.RACE))

    def branches(self) -> list[list[int]]:
        """Scripts that leave this run's path at a choice its own script did not fix."""
        found: list[list[int]] = []
        for step in range(len(self._script), len(self.taken)):
            choice, weights = self.taken[step]
            before = [taken for taken, _ in self.taken[:step]]
            found += [[*before, i] for i, w in enumerate(weights) if w > 0 and i != choice]
        return found

    @property
    def weight(self) -> float:
        return math.prod(weights[choice] for choice, weights in self.taken)

    def _choose(self, weights: tuple[float, ...], key: _Key) -> int:
        if key in self._keys:
            raise BadDrawError(f"the number of {key} is drawn twice")
        self._keys.add(key)
        step = len(self.taken)
        options = [index for index, weight in enumerate(weights) if weight > 0]
        choice = self._script[step] if step < len(self._script) else options[0]
        self.taken.append((choice, weights))
        return choice


def law(experiment: Callable[[EveryBranch], Tokens]) -> Law:
    """The exact distribution of what `experiment` returns."""
    found: Law = {}
    for value, weight in runs(experiment):
        found[value] = found.get(value, 0.0) + weight
    return found


def runs(experiment: Callable[[EveryBranch], Tokens]) -> Iterator[tuple[Tokens, float]]:
    """What `experiment` returns on each of its branches, and the branch's probability."""
    scripts: list[list[int]] = [[]]
    while scripts:
        noise = EveryBranch(scripts.pop())
        value = experiment(noise)
        yield value, noise.weight
        scripts += noise.branches()


def _shares(weights_V: Tensor) -> tuple[float, ...]:
    return _normal(cast("list[float]", cast("Any", weights_V.double()).tolist()))


def _normal(weights: Sequence[float]) -> tuple[float, ...]:
    total = math.fsum(weights)
    if not (total > 0 and min(weights) >= 0 and math.isfinite(total)):
        raise BadDrawError(f"weights that are no law: {weights}")
    return tuple(weight / total for weight in weights)
