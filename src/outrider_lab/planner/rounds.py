"""Expected acceptance by position: Beta posteriors from counts of how far drafts were accepted.

Position j is accepted, given that all before it were, with rate a_j. With `judged` tokens at a
position, of which `accepted` were accepted, a_j has the posterior Beta(prior + accepted, prior +
refused): half a judgement each way at the first position (Jeffreys), and one judgement at the rate
of the previous position at later ones. From the first position with fewer than ENOUGH counts on,
the rest are pooled into one rate, which also stands for all positions beyond the last: a constant
hazard. Replayed rounds (`DrafterCosts.laws`) take precedence; rates then only give their certainty.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.core.errors import ConfigError, ContractError
from outrider.estimate.acceptance import expected_tokens, measured_speed_up, prefix_products
from outrider_lab.planner.calibration import (
    PLAIN,
    Calibration,
    DrafterCosts,
    PlaceCount,
    RoundStats,
)

# Judgements at a position that suffice for a rate of its own.
ENOUGH = 20
# The fewest texts for which weighing them anew is meaningful.
MIN_REQUESTS = 5
NUM_DRAWS = 200
# Rounds of a run that is longer than this share of all runs are left out.
_RARE = 1e-6

# A rate from (prior accepted, prior refused, accepted, refused).
_Estimate = Callable[[float, float, float, float], float]


@dataclass(frozen=True, slots=True)
class Rates:
    """Acceptance rates by position. `accepted` has a_1, a_2, ...; `offered` the probability that a
    draft accepted so far continues to each; the last entries stand for all later ones."""

    accepted: tuple[float, ...]
    offered: tuple[float, ...] = (1.0,)
    carry: float = 0.0

    def kept_at(self, position: int, behind: int = 0) -> float:
        """Return the probability that a round accepts this position (1-based) after all earlier
        ones, in a run that began `behind` positions before the round."""
        return self._at(self.accepted, position, behind) * self._at(self.offered, position, behind)

    def offered_at(self, position: int, behind: int = 0) -> float:
        return self._at(self.offered, position, behind)

    @property
    def depth(self) -> int:
        """The position from which on all rates are equal."""
        return max(len(self.accepted), len(self.offered))

    def _at(self, rates: Sequence[float], position: int, behind: int) -> float:
        anew = rates[min(position, len(rates)) - 1]
        if not self.carry:
            return anew
        onward = rates[min(position + behind, len(rates)) - 1]
        return (1 - self.carry) * anew + self.carry * onward


@dataclass(frozen=True, slots=True)
class Belief:
    """The posterior of a drafter's rates: their mean, and draws.

    Rates are drawn from the posterior with a seeded generator. If the counts of enough single texts
    are known, texts are weighed anew instead (Rubin 1981, The Bayesian bootstrap): positions of one
    text are alike, so counts alone promise too much.
    """

    mean: Rates
    draws: tuple[Rates, ...]


def round_stats(rates: Rates, k: int) -> RoundStats:
    """Return the statistics of rounds that draft up to `k` tokens, as the mean of a long text.

    If a draft of K was accepted whole, the next one continues from it. A model that agrees with its
    target or not by position in the text goes on in the same run: its first position is position K
    + 2 of that run, the bonus token being position K + 1. With F(j) = a_1 ... a_j and W = K + 1 a
    round that begins m rounds into a run, of which there are F(m W) for every run, emits

        e_m = sum over i of 0..K of F(m W + i) / F(m W),      E(K) = sum F(m W) e_m / sum F(m W)

    which is E = 1 + a_1 + a_1 a_2 + ... if all rates are equal, and more than that for short drafts
    if rates rise, as those of lookups do. Heads whose later positions are worse begin anew each
    round. `carry` is 1 for the first kind, 0 for the second, or between. For the first kind
    positions should be counted over rounds that begin where a token was refused.
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
    # Later rounds of a run are like its last: a geometric number of them.
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
    """Return the posterior from the counts of `drafter`. Raises ConfigError if it has none."""
    if not drafter.places:
        raise ConfigError(
            f"the acceptance of the drafts of {drafter.name} was never counted.",
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
    """Return the carry at which rounds of `k` emit `tokens` on the mean, as another probe counted;
    the nearer end if none does."""
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


def _products(rate: Callable[[int, int], float], num_positions: int, behind: int) -> list[float]:
    products: list[float] = []
    product = 1.0
    for position in range(1, num_positions + 1):
        product *= rate(position, behind)
        products.append(product)
    return products


def _pairs(counts: Sequence[PlaceCount]) -> list[tuple[float, float]]:
    return [(position.accepted, position.drafted) for position in counts]


def _offers(drafter: DrafterCosts) -> list[tuple[float, float]]:
    """Return (drafted, possible) counts by position; empty if all drafts are full."""
    if not drafter.num_rounds:
        return []
    possible = [drafter.num_rounds, *(position.accepted for position in drafter.places)]
    drafted = [position.drafted for position in drafter.places]
    return [(min(a, b), b) for a, b in zip(drafted, possible, strict=False)]


def _weighed(
    requests: Sequence[Sequence[PlaceCount]], chance: random.Random
) -> list[tuple[float, float]]:
    weights = [chance.expovariate(1.0) for _ in requests]
    scale = len(weights) / math.fsum(weights)
    counts = [[0.0, 0.0] for _ in range(max(map(len, requests)))]
    for weight, positions in zip(weights, requests, strict=True):
        for count, position in zip(counts, positions, strict=False):
            count[0] += scale * weight * position.accepted
            count[1] += scale * weight * position.drafted
    return [(accepted, drafted) for accepted, drafted in counts]


def _rates(counts: Sequence[tuple[float, float]], estimate: _Estimate) -> tuple[float, ...]:
    """Return a rate for each position, the last for the pooled rest."""
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
    """Return one judgement at this rate; never certain, so that later positions may differ."""
    near = min(max(rate, 0.01), 0.99)
    return near, 1 - near


def _mean(up: float, down: float, accepted: float, refused: float) -> float:
    return (up + accepted) / (up + down + accepted + refused)


# Batches up to this size are computed by how many of them draft, larger ones by the mean number.
_COUNTED_BATCH = 64
_LEAST_SHARE = 1e-9


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A load of `batch` sequences that decode together; each holds a mean of `context` tokens."""

    batch: int = 1
    context: float = 0.0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ContractError("a batch has one sequence or more")
        if not self.context >= 0:
            raise ContractError("a context has no negative length")


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of a round's parts. `host` is all that is neither a draft nor the target's pass."""

    draft: float
    verify: float
    host: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.host


@dataclass(frozen=True, slots=True)
class RoundForecast:
    """A forecast: the distribution of an option's rounds, their times and a plain round's."""

    stats: RoundStats
    times: RoundTimes
    plain: RoundTimes

    @property
    def speed_up(self) -> float:
        """The speed-up of long texts."""
        rest = self.times.host + self.times.verify
        return measured_speed_up(
            self.stats.tokens, plain=self.plain.total, draft=self.times.draft, verify=rest
        )

    @property
    def draft_over_plain(self) -> float:
        """T_SD, in passes over one token a sequence."""
        return self.times.draft / self.plain.verify

    @property
    def draft_over_verify(self) -> float:
        """T_SD, in verifying passes."""
        return self.times.draft / self.times.verify

    @property
    def speed_up_if_free(self) -> float:
        """The speed-up if verifying cost no more than a plain pass: E / (1 + T_SD)."""
        return speed_up(self.stats.tokens, self.draft_over_plain)


def plain_times(calibration: Calibration, load: DecodeLoad) -> RoundTimes:
    """Return the times of a round that drafts nothing."""
    return _times(calibration, None, load, PLAIN)


def round_times(
    calibration: Calibration,
    drafter: DrafterCosts,
    load: DecodeLoad,
    stats: RoundStats,
    *,
    depth: int,
) -> RoundTimes:
    """Return the mean times of a round whose drafts are up to `depth` deep."""
    if not depth:
        return plain_times(calibration, load)

    def of(num_drafting: float) -> RoundTimes:
        return _times(calibration, drafter, load, stats, num_drafting=num_drafting, depth=depth)

    return _mean_of(of, load.batch, stats.drafting)


def forecast(
    calibration: Calibration,
    drafter: DrafterCosts,
    load: DecodeLoad,
    stats: RoundStats,
    *,
    depth: int,
) -> RoundForecast:
    times = round_times(calibration, drafter, load, stats, depth=depth)
    return RoundForecast(stats, times, plain_times(calibration, load))


def break_even(gain: Callable[[int], float], *, least: int, most: int) -> int | None:
    """Return the smallest number from `least` to `most` at which `gain` is 1 or less; None if there
    is none. Numbers grow by a quarter at most; the last step is bisected."""
    good, at = None, least
    while True:
        if gain(at) <= 1:
            break
        if at == most:
            return None
        good, at = at, min(most, at + max(1, at // 4))
    while good is not None and at - good > 1:
        middle = (good + at) // 2
        good, at = (middle, at) if gain(middle) > 1 else (good, middle)
    return at


def _times(
    calibration: Calibration,
    drafter: DrafterCosts | None,
    load: DecodeLoad,
    stats: RoundStats,
    *,
    num_drafting: float = 0.0,
    depth: int = 0,
) -> RoundTimes:
    rows = load.batch + num_drafting * stats.num_drafted
    context = load.batch * load.context
    verify = calibration.target.seconds(rows, context, rows * load.context)
    host = calibration.overhead + calibration.host * load.batch + calibration.rule * rows
    kept = (stats.tokens - 1) / stats.drafting if stats.drafting else 0.0
    host += calibration.token * (load.batch + num_drafting * kept)
    if drafter is None:
        return RoundTimes(0.0, verify, host)
    # A lookup may find less than requested, and then takes less time.
    depth_found = min(float(depth), stats.num_drafted)
    context, emitted = num_drafting * load.context, num_drafting * stats.tokens
    draft = drafter.seconds(depth_found, num_drafting, context, emitted)
    draft += drafter.miss * (load.batch - num_drafting)
    return RoundTimes(draft, verify, host)


def _mean_of(of: Callable[[float], RoundTimes], batch: int, share: float) -> RoundTimes:
    if share >= 1 or batch > _COUNTED_BATCH:
        return of(batch * share)
    mean = RoundTimes(0.0, 0.0, 0.0)
    for count, chance in enumerate(binomial(batch, share)):
        if chance > _LEAST_SHARE:
            times = of(count)
            mean = replace(
                mean,
                draft=mean.draft + chance * times.draft,
                verify=mean.verify + chance * times.verify,
                host=mean.host + chance * times.host,
            )
    return mean


def binomial(num: int, share: float) -> list[float]:
    """Return the probability of each count from 0 to `num`."""
    return [
        math.comb(num, count) * share**count * (1 - share) ** (num - count)
        for count in range(num + 1)
    ]


def expected_by_place(rates: Sequence[float]) -> float:
    """E of a draft as long as `rates`, the target's own token included."""
    return 1 + math.fsum(prefix_products(rates))


def acceptance_rate(beta: float, k: int) -> float:
    """Accepted / drafted of rounds of `k` > 0."""
    return (expected_tokens(beta, k) - 1) / k


def estimated_beta(num_accepted: int, num_refused: int) -> float | None:
    """beta from counts: `num_refused` rounds refused a token, others accepted all. None without
    any.

    The share of accepted tokens among the judged ones, which is its maximum likelihood estimate.
    """
    num_judged = num_accepted + num_refused
    return num_accepted / num_judged if num_judged else None


def speed_up(tokens: float, draft_time: float) -> float:
    """S over plain decoding, if verifying takes as long as a plain pass.

    `draft_time` is the time of all draft passes of a round in plain passes of the target.
    """
    return tokens / (1 + draft_time)


# Texts that are drawn to see how much they differ.
_NUM_TEXTS = 64


def likeness(requests: Sequence[Sequence[PlaceCount]]) -> tuple[float, float] | None:
    """Return Beta(u, v), from which each text's own rate seems to be drawn, by moments weighed by
    judgements. None for fewer than MIN_REQUESTS texts, or if they differ no more than chance makes
    them (Kleinman 1973, Proportions with extraneous variance)."""
    counts = [(sum(p.accepted for p in one), sum(p.drafted for p in one)) for one in requests]
    judged = [(accepted, drafted) for accepted, drafted in counts if drafted]
    total = sum(drafted for _, drafted in judged)
    if len(judged) < MIN_REQUESTS:
        return None
    mean = sum(accepted for accepted, _ in judged) / total
    if not 0 < mean < 1:
        return None
    spread = math.fsum(n * (x / n - mean) ** 2 for x, n in judged)
    free = mean * (1 - mean) * (len(judged) - 1)
    most = total - math.fsum(n * n for _, n in judged) / total - len(judged) + 1
    most *= mean * (1 - mean)
    alike = (spread - free) / most if most > 0 else 0.0
    if not 0 < alike < 1:
        return None
    weight = 1 / alike - 1
    return mean * weight, (1 - mean) * weight


def texts_differ(requests: Sequence[Sequence[PlaceCount]], k: int) -> float:
    """Return the relative deviation between texts of the tokens a round of `k` emits for them; 0 if
    their counts show none.

    Each text has a rate of its own, drawn from Beta(u, v). Easy texts end early and leave smaller
    batches to the hard ones, so the spread affects the time of a job (candidates.py).
    """
    found = likeness(requests)
    if found is None:
        return 0.0
    chance = random.Random(0)
    drawn = [expected_tokens(chance.betavariate(*found), k) for _ in range(_NUM_TEXTS)]
    return statistics.pstdev(drawn) / statistics.fmean(drawn)
