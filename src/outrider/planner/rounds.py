"""Round forecast: speed-up of a round from a calibration's seconds and an acceptance distribution.

With T(b, S) seconds of a plain round of b sequences that hold S tokens each, and E tokens a round,

    S = E T_plain(b, S) / T_round(b, S, K),    T_round = draft + target pass + host

A target pass has b (K + 1) rows, or b (N + 1) for trees of N nodes: nothing is padded. If only a
share of rounds drafts anything, the number of sequences that do is binomial, and T_round its mean.
T_SD names two numbers: the time of drafting over that of a plain pass, as in E / (1 + T_SD), and
over that of the verifying pass; they differ as soon as verifying is not free.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.core.errors import ContractError
from outrider.estimate.calibration import Calibration, DrafterCosts, PlaceCount
from outrider.estimate.theory import PLAIN, RoundStats, expected_tokens, measured_speed_up, speed_up
from outrider.planner.posteriors import MIN_REQUESTS

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
