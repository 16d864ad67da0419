"""What a round is expected to emit and how much faster that makes decoding, in closed form.

beta is the probability that a drafted token is accepted given that all before it were, the same at
every place; K tokens are drafted a round. Then

    E = 1 + beta + ... + beta^K = (1 - beta^(K+1)) / (1 - beta)      tokens a round
    S = E / (1 + T)                                                  verification as long as a pass
    S = E T_plain / (T_draft + T_verify)                             from measured times

with T the time of drafting K tokens as a share of a pass of the target over one token. Accepted /
drafted, which a run counts, is (E - 1) / K and lower than beta.

E is equation 1 of Leviathan, Kalman, Matias 2023 (arXiv 2211.17192). `docs/theory.md` has examples.

With a rate a_j of each place j, E = 1 + a_1 + a_1 a_2 + ... And if all that is known of beta is
that it is drawn once a request from Beta(u, v), then a_j = (u + j - 1) / (u + v + j - 1): a draft
that came far is likely to be of an easy request. E is convex in beta, so the mean beta alone would
give too little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from outrider.core.errors import ContractError


def expected_tokens(beta: float, k: int) -> float:
    """E, the target's own token included; between 1 and `k` + 1."""
    if not 0 <= beta <= 1:
        raise ContractError("beta lies between 0 and 1")
    if k < 0:
        raise ContractError("k is at least 0")
    # The quotient loses digits near beta = 1, the sum none.
    return math.fsum(beta**i for i in range(k + 1))


def prefix_products(rates: Sequence[float]) -> list[float]:
    """For each place the probability that its token and all before it are accepted; `rates` are
    those of the single places, each given that all before were accepted."""
    return list(accumulate(rates, mul))


def expected_by_place(rates: Sequence[float]) -> float:
    """E of a draft as long as `rates`, the target's own token included."""
    return 1 + math.fsum(prefix_products(rates))


def beta_rates(u: float, v: float, k: int) -> list[float]:
    """The rates a_1 to a_k of a request whose beta is drawn from Beta(u, v); `u`, `v` > 0."""
    if not u > 0:
        raise ContractError("u is above 0")
    if not v > 0:
        raise ContractError("v is above 0")
    return [(u + place) / (u + v + place) for place in range(k)]


def acceptance_rate(beta: float, k: int) -> float:
    """Accepted / drafted of rounds of `k` > 0."""
    return (expected_tokens(beta, k) - 1) / k


def estimated_beta(num_accepted: int, num_refused: int) -> float | None:
    """beta from counts: `num_refused` rounds refused a token, others kept all. None without any.

    The share of accepted tokens among those that were judged at all, its maximum likelihood.
    """
    num_judged = num_accepted + num_refused
    return num_accepted / num_judged if num_judged else None


def speed_up(tokens: float, draft_time: float) -> float:
    """S over plain decoding, where verifying takes as long as a plain pass.

    `draft_time` is the time of all draft passes of a round in plain passes of the target.
    """
    return tokens / (1 + draft_time)


def measured_speed_up(tokens: float, *, plain: float, draft: float, verify: float) -> float:
    """S from the times of a plain pass, of a round's draft passes and of its verifying pass, in
    any one unit; what results should be compared with."""
    return tokens * plain / (draft + verify)
