"""Expected acceptance by place: Beta posteriors from counts of how far drafts were accepted.

Place j is accepted, given that all before it were, with rate a_j. With `judged` tokens at a place,
of which `accepted` were kept, a_j has the posterior Beta(prior + accepted, prior + refused): half a
judgement each way at the first place (Jeffreys), and one judgement at the rate of the place before
at later ones. From the first place with fewer than ENOUGH counts on, the rest are pooled into one
rate, which also stands for all places beyond the last: a constant hazard. Rounds at K that were
replayed from deeper ones (`DrafterCosts.laws`) go first, and rates then only say how sure they are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.core.errors import ConfigError
from outrider.estimate.calibration import DrafterCosts, PlaceCount
from outrider.estimate.theory import PLAIN, RoundStats

# Judgements at a place that make a rate of its own.
ENOUGH = 20
# Texts below which weighing them anew says nothing.
MIN_REQUESTS = 5
NUM_DRAWS = 200
# Rounds of a run that is longer than this share of all runs are left out.
_RARE = 1e-6

# A rate from (prior accepted, prior refused, accepted, refused).
_Estimate = Callable[[float, float, float, float], float]


@dataclass(frozen=True, slots=True)
class Rates:
    """`accepted` has a_1, a_2, ..., `offered` how likely a draft that was kept so far goes on to
    each place; the last of each stands for all places behind it."""

    accepted: tuple[float, ...]
    offered: tuple[float, ...] = (1.0,)
    carry: float = 0.0

    def kept_at(self, place: int, behind: int = 0) -> float:
        """That a round keeps `place`, from 1, having kept all before it, in a run that began
        `behind` places before the round."""
        return self._at(self.accepted, place, behind) * self._at(self.offered, place, behind)

    def offered_at(self, place: int, behind: int = 0) -> float:
        return self._at(self.offered, place, behind)

    @property
    def depth(self) -> int:
        """Places from which on all are alike."""
        return max(len(self.accepted), len(self.offered))

    def _at(self, rates: Sequence[float], place: int, behind: int) -> float:
        anew = rates[min(place, len(rates)) - 1]
        if not self.carry:
            return anew
        onward = rates[min(place + behind, len(rates)) - 1]
        return (1 - self.carry) * anew + self.carry * onward


@dataclass(frozen=True, slots=True)
class Belief:
    """The posterior of a drafter's rates: their mean, and draws.

    Rates are drawn from the posterior with a seeded generator, or, where the counts of enough texts
    are known apart, texts are weighed anew instead (Rubin 1981, The Bayesian bootstrap): places of
    one text are alike, so counts alone promise too much.
    """

    mean: Rates
    draws: tuple[Rates, ...]


def round_stats(rates: Rates, k: int) -> RoundStats:
    """Of rounds that draft up to `k` tokens, on the mean of a long text.

    If a draft of K was kept whole, where does the next one stand? A model that agrees with its
    target or not by position in the text goes on in the same run: its first place is place K + 2 of
    that run, the bonus token being place K + 1. With F(j) = a_1 ... a_j and W = K + 1 a round that
    begins m rounds into a run, of which there are F(m W) for every run, emits

        e_m = sum over i of 0..K of F(m W + i) / F(m W),      E(K) = sum F(m W) e_m / sum F(m W)

    which is E = 1 + a_1 + a_1 a_2 + ... if all rates are equal, and more than that for short drafts
    if rates rise, as those of lookups do. Heads whose later places are worse begin anew each round.
    `carry` is 1 for the first kind, 0 for the second, or between. For the first kind places should
    be counted over rounds that begin where a token was refused.
    """
    if k == 0:
        return PLAIN
    blocks: list[tuple[float, list[float], list[float]]] = []
    share, behind = 1.0, 0
    while True:
        kept = _products(rates.kept_at, k + 1, behind)
        blocks.append((share, kept[:k], _products(rates.offered_at, k, behind)))
        if not rates.carry or behind >= rates.depth or share < _RARE:
            break
        share *= kept[k]
        behind += k + 1
    # All later rounds of a run are like its last: a geometric number of them.
    going_on = kept[k] if rates.carry else 0.0
    if going_on >= 1:
        blocks = blocks[-1:]
    else:
        blocks[-1] = (share / (1 - going_on), *blocks[-1][1:])
    total = math.fsum(weight for weight, *_ in blocks)
    means = [math.fsum(w * kept[j] for w, kept, _ in blocks) / total for j in range(k)]
    drafted = [math.fsum(w * made[j] for w, _, made in blocks) / total for j in range(k)]
    drafting = drafted[0]
    return RoundStats(tuple(means), drafting, math.fsum(drafted) / drafting if drafting else 0.0)


def believe(drafter: DrafterCosts, *, seed: int = 0, num_draws: int = NUM_DRAWS) -> Belief:
    """What the counts of `drafter` say. Raises ConfigError if it has none."""
    if not drafter.places:
        raise ConfigError(
            f"nobody counted what is accepted of the drafts of {drafter.name}.",
            hint="measure it: outrider plan --fresh",
        )
    offers = _offers(drafter)
    chance = random.Random(seed)

    def drawn(up: float, down: float, accepted: float, refused: float) -> float:
        return chance.betavariate(up + accepted, down + refused)

    def one() -> Rates:
        if len(drafter.requests) >= MIN_REQUESTS:
            accepted = _rates(_weighed(drafter.requests, chance), _mean)
        else:
            accepted = _rates(_pairs(drafter.places), drawn)
        return Rates(accepted, _rates(offers, drawn) if offers else (1.0,), drafter.carry)

    accepted = _rates(_pairs(drafter.places), _mean)
    mean = Rates(accepted, _rates(offers, _mean) if offers else (1.0,), drafter.carry)
    return Belief(mean, tuple(one() for _ in range(num_draws)))


def fitted_carry(drafter: DrafterCosts, k: int, tokens: float) -> float:
    """The carry at which rounds of `k` emit `tokens` on the mean, as another probe counted; the
    nearer end where none does."""
    accepted = _rates(_pairs(drafter.places), _mean)
    offers = _offers(drafter)
    offered = _rates(offers, _mean) if offers else (1.0,)

    def found(carry: float) -> float:
        return round_stats(Rates(accepted, offered, carry), k).tokens

    low, high = 0.0, 1.0
    rises = found(high) > found(low)
    for _ in range(30):
        middle = (low + high) / 2
        if (found(middle) < tokens) == rises:
            low = middle
        else:
            high = middle
    return round((low + high) / 2, 6)


def _products(rate: Callable[[int, int], float], places: int, behind: int) -> list[float]:
    products: list[float] = []
    product = 1.0
    for place in range(1, places + 1):
        product *= rate(place, behind)
        products.append(product)
    return products


def _pairs(places: Sequence[PlaceCount]) -> list[tuple[float, float]]:
    return [(place.accepted, place.drafted) for place in places]


def _offers(drafter: DrafterCosts) -> list[tuple[float, float]]:
    """(drafted, could have been) by place; nothing where all drafts are as long as asked."""
    if not drafter.num_rounds:
        return []
    could = [drafter.num_rounds, *(place.accepted for place in drafter.places)]
    drafted = [place.drafted for place in drafter.places]
    return [(min(a, b), b) for a, b in zip(drafted, could, strict=False)]


def _weighed(
    requests: Sequence[Sequence[PlaceCount]], chance: random.Random
) -> list[tuple[float, float]]:
    weights = [chance.expovariate(1.0) for _ in requests]
    scale = len(weights) / math.fsum(weights)
    counts = [[0.0, 0.0] for _ in range(max(map(len, requests)))]
    for weight, places in zip(weights, requests, strict=True):
        for count, place in zip(counts, places, strict=False):
            count[0] += scale * weight * place.accepted
            count[1] += scale * weight * place.drafted
    return [(accepted, drafted) for accepted, drafted in counts]


def _rates(counts: Sequence[tuple[float, float]], estimate: _Estimate) -> tuple[float, ...]:
    """One a place, the last for the pooled rest."""
    rates: list[float] = []
    up = down = 0.5
    for index, (_, judged) in enumerate(counts):
        is_last = judged < ENOUGH or index + 1 == len(counts)
        pooled = counts[index:] if is_last else counts[index : index + 1]
        accepted = math.fsum(count for count, _ in pooled)
        refused = math.fsum(count for _, count in pooled) - accepted
        rates.append(estimate(up, down, accepted, max(refused, 0.0)))
        if is_last:
            break
        up, down = _prior(rates[-1])
    return tuple(rates)


def _prior(rate: float) -> tuple[float, float]:
    """One judgement; never quite sure, or later places could not differ."""
    near = min(max(rate, 0.01), 0.99)
    return near, 1 - near


def _mean(up: float, down: float, accepted: float, refused: float) -> float:
    return (up + accepted) / (up + down + accepted + refused)
