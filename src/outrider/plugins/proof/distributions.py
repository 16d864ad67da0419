"""The distribution of a token, written slowly in Python floats: what every exact rule has to emit.

It shares no code with what it checks (`core/logits.py`, `core/sampling.py`): bias, penalties and
bans first, then temperature, top-k, top-p and min-p, one after the other.

Experiments have exact distributions by `EveryBranch`: a run for every combination of choices.

Shapes:  V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from torch import Tensor

from outrider.core.config import EXACT_SAMPLERS
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule
from outrider.core.rng import DrawNode, Role, draw_for
from outrider.core.tree import ROOT
from outrider.verify.rules import rule_for


def plain_distribution(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    text: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> list[float]:
    """Return the next token's probabilities; greedy is the first of the largest."""
    shaped = [_penalised(i, value, params, prompt, text) for i, value in enumerate(logits)]
    banned = {word[-1] for word in bad_words if _follows(text, word[:-1])}
    if any(value > -math.inf for i, value in enumerate(shaped) if i not in banned):
        shaped = [-math.inf if i in banned else value for i, value in enumerate(shaped)]
    if params.greedy:
        best = shaped.index(max(shaped))
        return [float(i == best) for i in range(len(shaped))]
    return filtered(shaped, params)


def _penalised(
    token: int, logit: float, params: SamplingParams, prompt: Sequence[int], text: Sequence[int]
) -> float:
    logit += (params.logit_bias or {}).get(token, 0.0)
    if token in prompt or token in text:
        factor = params.repetition_penalty
        logit = logit / factor if logit > 0 else logit * factor
    times = list(text).count(token)
    return logit - params.frequency_penalty * times - params.presence_penalty * (times > 0)


def _follows(text: Sequence[int], head: Sequence[int]) -> bool:
    start = len(text) - len(head)
    return start >= 0 and tuple(text[start:]) == tuple(head)


def filtered(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Apply temperature, top-k, top-p and min-p, in this order."""
    scaled = [value / params.temperature for value in logits]
    if params.top_k:
        edge = sorted(scaled, reverse=True)[: params.top_k][-1]
        scaled = [value if value >= edge else -math.inf for value in scaled]
    highest = max(scaled)
    probs = _shares([math.exp(value - highest) for value in scaled])
    if params.top_p < 1:
        kept = _nucleus(probs, params.top_p)
        probs = _shares([prob if token in kept else 0.0 for token, prob in enumerate(probs)])
    if params.min_p:
        floor = params.min_p * max(probs)
        probs = _shares([prob if prob >= floor else 0.0 for prob in probs])
    return probs


def _nucleus(probs: Sequence[float], top_p: float) -> set[int]:
    """Return the likeliest tokens, lower ids first among equals, of mass `top_p`."""
    kept: list[int] = []
    for token in sorted(range(len(probs)), key=lambda token: (-probs[token], token)):
        if kept and math.fsum(probs[k] for k in kept) >= top_p:
            break
        kept.append(token)
    return set(kept)


def _shares(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def joint_winner(p: Sequence[float], q: Sequence[float], i: int, j: int) -> float:
    """Return the probability that in two races over the same numbers `i` wins under `p` and `j`
    under `q`, which sum to anything above 0.

    Each token k has a number E_k, exponential with mean 1. The winner under weights p is the k with
    the least E_k / p_k. With r = E_j / E_i,

        P(i, i) = 1 / sum over k of max(p_k / p_i, q_k / q_i)
        P(i, j) = integral of dr / S(r)^2 over p_j / p_i <= r <= q_j / q_i
        S(r)    = sum over k of max(p_k / p_i, r q_k / q_j)

    and S is a straight line between its kinks, so the integral is a short sum. The first line is
    that of Daliri, Musco, Suresh 2024 (arXiv 2408.07978).
    """
    if p[i] <= 0 or q[j] <= 0:
        return 0.0
    if i == j:
        return 1 / math.fsum(max(a / p[i], b / q[i]) for a, b in zip(p, q, strict=True))
    low = p[j] / p[i]
    high = q[j] / q[i] if q[i] > 0 else math.inf
    if high <= low:
        return 0.0
    lines = [(a / p[i], b / q[j]) for a, b in zip(p, q, strict=True)]
    kinks = sorted({flat / slope for flat, slope in lines if slope > 0})
    ends = [low, *(kink for kink in kinks if low < kink < high), high]
    return math.fsum(_piece(lines, start, end) for start, end in pairwise(ends))


def _piece(lines: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Return the integral of 1 / S^2 between two neighbouring kinks."""
    inside = start + 1 if end == math.inf else (start + end) / 2
    flat = math.fsum(a for a, b in lines if a > inside * b)
    slope = math.fsum(b for a, b in lines if a <= inside * b)
    last = 0.0 if end == math.inf else 1 / (flat + slope * end)
    return max(0.0, 1 / (flat + slope * start) - last) / slope


Tokens = tuple[int, ...]
Distribution = dict[Tokens, float]
_Key = tuple[int, int, Role]


class BadDrawError(AssertionError):
    """An experiment requested randomness in a way that no exact rule does."""


class EveryBranch:
    """A `Rng` that replays a script of choices and then takes first options. Keys are those of
    production, and no key may be drawn twice: the two draws would be equal.

    A round gives its start by `at`; the choices of all rounds form one script. Races at positions
    that a round did not reach are forgotten, since nothing has looked at them. Raises BadDrawError.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.taken: list[tuple[int, tuple[float, ...]]] = []
        self._script = tuple(script)
        self._start = 0
        self._keys: set[_Key] = set()
        self._races: dict[int, tuple[int, tuple[float, ...]]] = {}

    def at(self, start: int) -> EveryBranch:
        if start != self._start:
            self._races = {at: race for at, race in self._races.items() if at < start}
            self._keys = {key for key in self._keys if key[2] != Role.RACE or key[0] < start}
        self._start = start
        return self

    def coin(self, probability: float, node: int, role: Role) -> bool:
        if math.isnan(probability):
            raise BadDrawError(f"a coin of no probability at node {node}")
        heads = min(1.0, max(0.0, probability))
        return self._choose((1 - heads, heads), (self._start, node, role)) == 1

    def pick(self, weights_V: Tensor, node: int, role: Role) -> int:
        return self._choose(_branch_shares(weights_V), (self._start, node, role))

    def pick_at(self, weights_V: Tensor, depth: int) -> int:
        key = (self._start + depth, ROOT, Role.POSITION)
        return self._choose(_branch_shares(weights_V), key)

    def race_at(self, weights_V: Tensor, depth: int) -> int:
        """Return a race's winner. Drafter and rule may race once each at a position a round."""
        position = self._start + depth
        weights = _branch_shares(weights_V)
        if position not in self._races:
            winner = self._choose(weights, (position, 0, Role.RACE))
            self._races[position] = (winner, weights)
            return winner
        before, others = self._races[position]
        joint = [joint_winner(weights, others, i, before) for i in range(len(weights))]
        return self._choose(_normal(joint), (position, 1, Role.RACE))

    def branches(self) -> list[list[int]]:
        """Return scripts that leave this run's path at a choice its own script did not fix."""
        found: list[list[int]] = []
        for step in range(len(self._script), len(self.taken)):
            choice, weights = self.taken[step]
            before = [taken for taken, _ in self.taken[:step]]
            found += [[*before, i] for i, w in enumerate(weights) if w > 0 and i != choice]
        return found

    @property
    def roles(self) -> frozenset[Role]:
        """The roles of its numbers."""
        return frozenset(role for _, _, role in self._keys)

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


def distribution(experiment: Callable[[EveryBranch], Tokens]) -> Distribution:
    """Return the exact distribution of what `experiment` returns."""
    found: Distribution = {}
    for value, weight in runs(experiment):
        found[value] = found.get(value, 0.0) + weight
    return found


def runs(experiment: Callable[[EveryBranch], Tokens]) -> Iterator[tuple[Tokens, float]]:
    """Yield what `experiment` returns on each of its branches, and the branch's probability: the
    product of the weights of its choices. It runs again for each option not yet taken."""
    scripts: list[list[int]] = [[]]
    while scripts:
        rng = EveryBranch(scripts.pop())
        value = experiment(rng)
        yield value, rng.weight
        scripts += rng.branches()


def _branch_shares(weights_V: Tensor) -> tuple[float, ...]:
    return _normal(cast("list[float]", cast("Any", weights_V.double()).tolist()))


def _normal(weights: Sequence[float]) -> tuple[float, ...]:
    total = math.fsum(weights)
    if not (total > 0 and min(weights) >= 0 and math.isfinite(total)):
        raise BadDrawError(f"weights that are no distribution: {weights}")
    return tuple(weight / total for weight in weights)


@dataclass(frozen=True, slots=True)
class Sampler:
    """A rule by its name in `--sampler`; `draw` draws the nodes of a chain for it."""

    name: str
    rule: AcceptanceRule
    draw: DrawNode


def exact_samplers(own: str = EXACT_SAMPLERS[0]) -> list[Sampler]:
    """Return each of EngineConfig's exact samplers, and `own`, which may be another package's,
    wired as engine/build.py wires it."""
    names = dict.fromkeys((*EXACT_SAMPLERS, own))
    return [Sampler(name, rule_for(name), draw_for(name)) for name in names]
