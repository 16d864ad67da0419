"""Fan-out of drafting ahead: how often a prediction misses, and how to share branches out best."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MissCurve:
    """The probability that a token is not among the `count` likeliest: scale * count ** -power."""

    scale: float = 0.4
    power: float = 1.0

    def __call__(self, count: int) -> float:
        return min(1.0, self.scale * count**-self.power) if count else 1.0


# Used before any counts.
PRIOR_CURVE = MissCurve()


@dataclass(frozen=True, slots=True)
class Misses:
    """Curves of a recovered token, which cannot be the refused one, and of the bonus token."""

    recovered: MissCurve = PRIOR_CURVE
    bonus: MissCurve = PRIOR_CURVE

    def at(self, accepted: int, depth: int) -> MissCurve:
        return self.bonus if accepted == depth else self.recovered


def chances(alpha: float, depth: int) -> tuple[float, ...]:
    """P(n) for n = 0..depth, each token being accepted with probability `alpha` after the last."""
    return (*(alpha**n * (1 - alpha) for n in range(depth)), alpha**depth)


def uniform(budget: int, num_outcomes: int) -> list[int]:
    """Equal counts; the remainder goes to the first."""
    share, rest = divmod(budget, num_outcomes)
    return [share + (n < rest) for n in range(num_outcomes)]


def geometric(budget: int, likely: Sequence[float], power: float) -> list[float]:
    """The best counts if they need not be whole (Theorem 12, for any P)."""
    weights = [p ** (1 / (1 + power)) for p in likely]
    return [budget * weight / math.fsum(weights) for weight in weights]


def whole(counts: Sequence[float]) -> list[int]:
    """Integers near `counts` of the same sum, which must be whole: largest remainders go up."""
    down = [math.floor(count) for count in counts]
    missing = round(math.fsum(counts)) - sum(down)
    by_remainder = sorted(range(len(counts)), key=lambda n: down[n] - counts[n])
    for n in by_remainder[:missing]:
        down[n] += 1
    return down


def optimal(budget: int, likely: Sequence[float], misses: Misses) -> list[int]:
    """The whole counts with the largest `expected_hit_rate`, if the gains of every curve only fall:
    if its scale is 1 / (2 - 2 ** -power) at most. If a second branch gains more than the first, the
    first counts as much as the second.

    A round with a draft of d tokens ends with n = 0..d of them accepted, with probability P(n), and
    one token of the target's own. A prediction of its F likeliest values misses it with probability
    m(F) = min(1, c F^-r). With B branches in all, the sum of P(n) (1 - m(F_n)) is to be as large as
    possible. Over real numbers F_n is proportional to P(n)^(1 / (1 + r)); with P(n) = a^n (1 - a)
    and P(d) = a^d that is F_n = F_0 a^(n / (1 + r)), F_d = F_0 a^(d / (1 + r)) (1 - a)^(-1 / (1 +
    r)) (Kumar, Dao, May, "Speculative speculative decoding", Theorem 12, which has c = 1). Over
    integers the gains of one more branch only fall, so giving the next branch to the largest is
    optimal.
    """
    depth = len(likely) - 1
    counts = [0] * len(likely)

    def gain(n: int) -> float:
        curve, count = misses.at(n, depth), counts[n]
        one_more = curve(count) - curve(count + 1)
        return likely[n] * (one_more if count else max(one_more, curve(1) - curve(2)))

    heap = [(-gain(n), n) for n in range(len(likely))]
    heapq.heapify(heap)
    for _ in range(budget):
        n = heap[0][1]
        counts[n] += 1
        heapq.heapreplace(heap, (-gain(n), n))
    return counts


def expected_hit_rate(counts: Sequence[int], likely: Sequence[float], misses: Misses) -> float:
    """The probability that the outcome is predicted."""
    depth = len(likely) - 1
    return math.fsum(
        p * (1 - misses.at(n, depth)(count))
        for n, (p, count) in enumerate(zip(likely, counts, strict=True))
    )


def calibrate(ranks: Sequence[int], default: MissCurve) -> MissCurve:
    """The curve through a histogram of ranks: `ranks[i]` tokens were the i-th likeliest, counted
    from 0, and `ranks[-1]` were less likely than all counted ranks.

    Least squares of log m(F) on log F, over those F at which some token was missed and one more
    branch helped; `default` if there are not two of them. The scale is at most 1, and the power is
    not negative.
    """
    total = sum(ranks)
    points: list[tuple[float, float]] = []
    missed = total
    for count, caught in enumerate(ranks[:-1], start=1):
        missed -= caught
        if missed and caught:
            points.append((math.log(count), math.log(missed / total)))
    if len(points) < 2:
        return default
    mean_x = math.fsum(x for x, _ in points) / len(points)
    mean_y = math.fsum(y for _, y in points) / len(points)
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    slope = min(slope, 0.0)
    return MissCurve(scale=min(1.0, math.exp(mean_y - slope * mean_x)), power=-slope)
