"""How long a batch of texts takes from the first round to the last: ends count.

Two things make short texts gain less than S = E T_plain / T_round.

*The last rounds of a text* draft no more than it has room for, and emit less than E. With r tokens
to go a round drafts c = min(K, r - 1), so the expected seconds are

    V(r) = T(b, c) + sum over n of P(n kept of c) V(r - n - 1),    V(0) = 0

*The end of a batch.* Plain decoding gives every text one token a round, so all end together. With
drafts some are done earlier, and rounds go on with those that are left, which is less efficient.
The number of rounds R that a text of n tokens takes is nearly normal: of mean
(n + E[X^2] / 2E[X] - 1/2) / E[X] and variance n Var[X] / E[X]^3, X being the tokens of a round
(renewal theory; Feller 1971, XI.6 and XI.5), the more so where texts differ in how much is kept of
them. In round r a number of texts that is binomial (b, P(R >= r)) is live, and the batch takes the
sum of the mean T over all r. What that is above the same rounds in full batches is how much a job
takes longer than V(n) of a batch in step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from outrider.estimate.theory import RoundLaw
from outrider.planner.rounds import binomial

# The end of a text for which rounds are reckoned one by one, in tokens and in full rounds.
_COUNTED_TOKENS = 64
_COUNTED_ROUNDS = 6
# The normal law is looked at up to so many deviations, at so many places.
_FAR = 5
_MOST_LOOKS = 64
# Numbers of live texts up to here are counted out; of more, those at these places of a normal law
# stand for a seventh each.
_COUNTED_BATCH = 48
_NODES = (-1.4652, -0.7916, -0.3661, 0.0, 0.3661, 0.7916, 1.4652)
_SURE = 1e-9


def seconds_in_step(num_tokens: int, law: RoundLaw, seconds: Callable[[int], float]) -> float:
    """Expected seconds until a text of `num_tokens` is done; `seconds` of a round by how deep it
    drafts. A batch whose texts are always equally far takes as long."""
    most = len(law.kept)
    ahead = [1.0, *law.kept, 0.0]
    counted = min(num_tokens, max(_COUNTED_TOKENS, _COUNTED_ROUNDS * (most + 1)))
    taken = [seconds(depth) for depth in range(min(most, counted - 1) + 1)]
    times = [0.0]
    for left in range(1, counted + 1):
        depth = min(most, left - 1)
        after = math.fsum(
            (ahead[kept] - ahead[kept + 1]) * times[left - kept - 1] for kept in range(depth)
        )
        times.append(taken[depth] + after + ahead[depth] * times[left - depth - 1])
    return times[-1] + (num_tokens - counted) / law.tokens * taken[-1]


def desync(
    num_tokens: int,
    batch: int,
    law: RoundLaw,
    seconds: Callable[[int], float],
    *,
    texts_differ: float = 0.0,
) -> float:
    """How much longer a batch takes than one whose texts are always equally far, as a factor from 1
    up; `seconds` of a round by the number of live texts. `texts_differ` is the relative deviation
    of tokens a round between texts."""
    variance, mean = law.variance, law.tokens
    spread = num_tokens * variance / mean**3 + (texts_differ * num_tokens / mean) ** 2
    if batch == 1 or spread <= 0:
        return 1.0
    expected = (num_tokens + (variance + mean**2) / (2 * mean) - 0.5) / mean
    deviation = math.sqrt(spread)
    cost = cache(seconds)
    first = max(0, math.floor(expected - _FAR * deviation))
    last = math.ceil(expected + _FAR * deviation)
    step = max(1.0, (last - first) / _MOST_LOOKS)
    total = equal = first * cost(batch)
    at = first + step / 2
    while at < last:
        alive = 0.5 * math.erfc((at - expected) / (deviation * math.sqrt(2)))
        total += step * math.fsum(p * cost(live) for live, p in _live(batch, alive))
        equal += step * alive * cost(batch)
        at += step
    return max(1.0, total / equal) if equal else 1.0


def _live(batch: int, alive: float) -> list[tuple[int, float]]:
    """How many of a batch are live, with what chance; none left out, as it takes no time."""
    if batch <= _COUNTED_BATCH:
        chances = enumerate(binomial(batch, alive))
        return [(live, chance) for live, chance in chances if live and chance > _SURE]
    deviation = math.sqrt(batch * alive * (1 - alive))
    near = (round(batch * alive + z * deviation) for z in _NODES)
    return [(min(live, batch), 1 / len(_NODES)) for live in near if live > 0]
