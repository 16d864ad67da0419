"""Exact laws: run an experiment once for every way its random choices can fall.

`EveryBranch` is a `Noise` that replays a script of choices and then takes first options. `law`
runs an experiment, looks at which choices it took and with what weights, and runs it again for each
option not yet taken. The weight of a run is the product of its choices' weights, so the result is
the experiment's law itself, without sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from outrider.core.noise import ROOT, Role

Tokens = tuple[int, ...]
Law = dict[Tokens, float]
_Key = tuple[int, int, Role]


class EveryBranch:
    """Keys are those of production, and no key may be drawn twice: the two draws would be equal.

    A round says where it starts by `at`; the choices of all rounds form one script.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.taken: list[tuple[int, tuple[float, ...]]] = []
        self._script = tuple(script)
        self._start = 0
        self._keys: set[_Key] = set()

    def at(self, start: int) -> EveryBranch:
        self._start = start
        return self

    def coin(self, probability: float, node: int, role: Role) -> bool:
        assert not math.isnan(probability)
        heads = min(1.0, max(0.0, probability))
        return self._choose((1 - heads, heads), (self._start, node, role)) == 1

    def pick(self, weights_V: Tensor, node: int, role: Role) -> int:
        return self._choose(_shares(weights_V), (self._start, node, role))

    def pick_at(self, weights_V: Tensor, depth: int) -> int:
        key = (self._start + depth, ROOT, Role.POSITION)
        return self._choose(_shares(weights_V), key)

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
        assert key not in self._keys, f"the number of {key} is drawn twice"
        self._keys.add(key)
        step = len(self.taken)
        options = [index for index, weight in enumerate(weights) if weight > 0]
        choice = self._script[step] if step < len(self._script) else options[0]
        self.taken.append((choice, weights))
        return choice


def law(experiment: Callable[[EveryBranch], Tokens]) -> Law:
    """The exact distribution of what `experiment` returns."""
    found: Law = {}
    scripts: list[list[int]] = [[]]
    while scripts:
        noise = EveryBranch(scripts.pop())
        value = experiment(noise)
        found[value] = found.get(value, 0.0) + noise.weight
        scripts += noise.branches()
    return found


def _shares(weights_V: Tensor) -> tuple[float, ...]:
    weights = [float(weight) for weight in weights_V.double()]
    total = math.fsum(weights)
    assert total > 0
    assert min(weights) >= 0
    return tuple(weight / total for weight in weights)
