"""Closed forms of speculative decoding: expected tokens and speed-up.

beta is the probability that a drafted token is accepted given that all before it were, the same at
every position; K tokens are drafted a round. Then

    E = 1 + beta + ... + beta^K = (1 - beta^(K+1)) / (1 - beta)      tokens a round
    S = E / (1 + T)                                                  verification as long as a pass
    S = E T_plain / (T_draft + T_verify)                             from measured times

with T the time of drafting K tokens as a share of a target pass over one token. Accepted / drafted,
the rate that a run counts, is (E - 1) / K and lower than beta. E is equation 1 of Leviathan,
Kalman, Matias 2023 (arXiv 2211.17192). `docs/theory.md` has examples.
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
    """Probability for each position that its token and all before it are accepted; `rates` are
    those of the single positions, each given that all before were accepted."""
    return list(accumulate(rates, mul))


def beta_rates(u: float, v: float, k: int) -> list[float]:
    """The rates a_1 to a_k of a request whose beta is drawn from Beta(u, v); `u`, `v` > 0.

    If beta is drawn once a request from Beta(u, v), then a_j = (u + j - 1) / (u + v + j - 1): a
    draft with a long accepted prefix is likely to belong to an easy request. With a rate a_j at
    each position, E = 1 + a_1 + a_1 a_2 + ... E is convex in beta, so the mean beta alone would
    give too little.
    """
    if not u > 0:
        raise ContractError("u is above 0")
    if not v > 0:
        raise ContractError("v is above 0")
    return [(u + index) / (u + v + index) for index in range(k)]


def measured_speed_up(tokens: float, *, plain: float, draft: float, verify: float) -> float:
    """S from the times of a plain pass, of a round's draft passes and of its verifying pass, in
    any one unit; the value to compare results with."""
    return tokens * plain / (draft + verify)
