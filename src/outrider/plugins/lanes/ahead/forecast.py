"""Forecasts for drafting ahead: accepted lengths, ranks of the target's tokens, fallbacks.

`Forecast` counts past verdicts, separately after hits and after misses, since after a poor fallback
few tokens are accepted. Every position starts with a prior.

Shapes:  N = distributions, V = vocabulary, F = likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from outrider.core.clock import HOST_CLOCK, Clock, host_ints
from outrider.core.draft import Draft
from outrider.core.errors import ContractError
from outrider.core.protocols import Drafter, DraftRow
from outrider.estimate.acceptance import FadingRate, add_to_first
from outrider.plugins.lanes.ahead.fan_out import (
    PRIOR_CURVE,
    MissCurve,
    Misses,
    calibrate,
    chances,
    geometric,
    optimal,
    uniform,
    whole,
)

Policy = Literal["top", "optimal", "geometric", "uniform"]

PRIOR_ALPHA = 0.8
# The weight of the prior in tokens, at every position of a draft.
PRIOR_WEIGHT = 10.0
# Ranks are counted up to here; larger ones count as beyond.
NUM_RANKS = 64
# Verdicts after which a curve through the ranks is trusted more than the prior.
ENOUGH_RANKS = 200


@dataclass(slots=True)
class Ranks:
    """A histogram of real tokens' ranks, from 0, among the likeliest; the last is beyond."""

    counts: list[int] = field(default_factory=lambda: [0] * (NUM_RANKS + 1))
    default: MissCurve = PRIOR_CURVE

    def add(self, rank: int | None) -> None:
        self.counts[NUM_RANKS if rank is None else min(rank, NUM_RANKS)] += 1

    @property
    def curve(self) -> MissCurve:
        if sum(self.counts) < ENOUGH_RANKS:
            return self.default
        return calibrate(self.counts, self.default)


@dataclass(slots=True)
class _Refusals:
    """Refusal rates of the token at each position of a draft, if it was reached."""

    refusals: list[FadingRate] = field(default_factory=list[FadingRate])

    def add(self, depth: int, accepted: int) -> None:
        self._grow(depth)
        add_to_first(self.refusals, min(accepted + 1, depth), accepted)

    def chances(self, depth: int) -> tuple[float, ...]:
        self._grow(depth)
        found: list[float] = []
        alive = 1.0
        for rate in self.refusals[:depth]:
            alpha = (rate.trials - rate.hits) / rate.trials
            found.append(alive * (1 - alpha))
            alive *= alpha
        return (*found, alive)

    def _grow(self, depth: int) -> None:
        refused = PRIOR_WEIGHT - PRIOR_WEIGHT * PRIOR_ALPHA
        while len(self.refusals) < depth:
            self.refusals.append(FadingRate(1.0, refused, PRIOR_WEIGHT))


@dataclass(slots=True)
class Forecast:
    """A forecast of verdicts, by which branches are shared out; `policy` says how."""

    policy: Policy = "top"
    recovered: Ranks = field(default_factory=Ranks)
    bonus: Ranks = field(default_factory=Ranks)
    _after_hit: _Refusals = field(default_factory=_Refusals)
    _after_miss: _Refusals = field(default_factory=_Refusals)

    def observe(self, depth: int, accepted: int, *, hit: bool) -> None:
        """Learn how many of `depth` draft tokens were accepted, after a `hit` or not."""
        (self._after_hit if hit else self._after_miss).add(depth, accepted)

    def observe_rank(self, rank: int | None, *, bonus: bool) -> None:
        """Learn the rank of the target's own token in the draft model's list; None: beyond it."""
        (self.bonus if bonus else self.recovered).add(rank)

    def chances(self, depth: int, *, hit: bool) -> tuple[float, ...]:
        """Return P(n), n = 0..depth, for a draft that was predicted or not."""
        return (self._after_hit if hit else self._after_miss).chances(depth)

    @property
    def misses(self) -> Misses:
        return Misses(self.recovered.curve, self.bonus.curve)

    def counts(self, budget: int, depth: int, *, hit: bool) -> list[int]:
        """Return the number of branches for n = 0..depth accepted tokens; their sum is `budget`."""
        likely, misses = self.chances(depth, hit=hit), self.misses
        match self.policy:
            case "uniform":
                return uniform(budget, len(likely))
            case "geometric":
                return whole(geometric(budget, likely, misses.recovered.power))
            case _:
                return optimal(budget, likely, misses)


Kind = Literal["jit", "ngram", "none", "auto"]
Source = Literal["table", "jit", "ngram", "none"]

# Rounds of each source before its mean is used; and of so many misses, one tries the other source.
ENOUGH = 16
TRY_EVERY = 32
# The factor by which a new value reduces the weight of old ones.
_FADE = 0.98


def crossover(hit: float, tokens_jit: float, tokens_fast: float, seconds_jit: float) -> float:
    """Return b*: the batch below which drafting now pays; `seconds_jit` in verifications.

    Infinite if it pays in every batch, 0 if in none.
    """
    if hit >= 1 or seconds_jit <= 0:
        return math.inf
    left = 1 - (tokens_jit / tokens_fast - 1) / seconds_jit
    if left <= 0:
        return math.inf
    if left >= 1 or hit <= 0:
        return 0.0
    return math.log(left) / math.log(hit)


def _unseen() -> FadingRate:
    return FadingRate(_FADE)


def _sources() -> dict[Source, FadingRate]:
    return {"table": _unseen(), "jit": _unseen(), "ngram": _unseen(), "none": _unseen()}


@dataclass(slots=True)
class Estimates:
    """Recent means: the share of hits, tokens of a round by the source of its draft, and the
    seconds of drafting now and of a verification."""

    hits: FadingRate = field(default_factory=_unseen)
    tokens: dict[Source, FadingRate] = field(default_factory=_sources)
    jit_seconds: FadingRate = field(default_factory=_unseen)
    verify_seconds: FadingRate = field(default_factory=_unseen)

    @property
    def crossover(self) -> float | None:
        """The batch b* by what was measured; None while there is too little of it."""
        slow, fast = self.tokens["jit"], self.tokens["ngram"]
        if min(slow.trials, fast.trials) < ENOUGH / 2 or not self.verify_seconds.mean:
            return None
        p, on_hit = self.hits.mean, self.tokens["table"].mean
        tokens_jit = p * on_hit + (1 - p) * slow.mean
        tokens_fast = p * on_hit + (1 - p) * fast.mean
        seconds = self.jit_seconds.mean / self.verify_seconds.mean
        return crossover(p, tokens_jit, tokens_fast, seconds)


class Fallback:
    """Drafts for rows that missed. `fast` is used where `kind` allows; both know all sequences.

    `jit` drafts with the model now, for the sequences that missed and no others: the round waits
    for it. `ngram` copies from the text, which is free and accepted less often. `none` drafts
    nothing. `auto` chooses between the first two. Let p be the share of predicted verdicts, G_x the
    tokens of a round with fallback x, T the seconds of drafting now over those of a verification.
    In a batch of b all verdicts are hits with probability p^b, so a round takes 1 + (1 - p^b) T
    with jit and 1 with ngram; jit pays while b < b* = ln(1 - (G_jit / G_ngram - 1) / T) / ln p.
    """

    def __init__(
        self, jit: Drafter, fast: Drafter, kind: Kind = "jit", clock: Clock = HOST_CLOCK
    ) -> None:
        self.estimates = Estimates()
        self._jit = jit
        self._fast = fast
        self._kind: Kind = kind
        self._clock = clock
        self._num_choices = 0

    def propose(
        self, rows: Sequence[DraftRow], batch: int, *, now: bool = False
    ) -> tuple[list[Draft], Source]:
        """Return drafts of `rows`, of a batch of so many, and their source. `now` uses the model
        whatever the kind."""
        if not rows:
            return [], "none"
        source = "jit" if now else self._source(batch)
        if source == "none":
            return [Draft.empty() for _ in rows], source
        if source == "ngram":
            return self._fast.propose(rows), source
        began = self._clock()
        drafts = self._jit.propose(rows)
        self.estimates.jit_seconds.add(self._clock() - began)
        return drafts, source

    def _source(self, batch: int) -> Source:
        if self._kind == "auto":
            return self._cheaper(batch)
        return self._kind

    def _cheaper(self, batch: int) -> Source:
        self._num_choices += 1
        limit = self.estimates.crossover
        if limit is None:
            return "jit" if self._num_choices % 2 else "ngram"
        jit = batch < limit
        if self._num_choices % TRY_EVERY == 0:
            jit = not jit
        return "jit" if jit else "ngram"


class Saguaro:
    """A change of the distributions of draft node `node`, in place. `fan_out[node]` is its F; a
    node behind them has the last one's.

    The distribution q that a draft token is drawn from gives its F likeliest tokens only the share
    C of their mass: q'(t) ~ C q(t) among them, q'(t) ~ q(t) elsewhere. After a refusal the target
    draws from max(p - q', 0), which then has its mass on exactly those F tokens; and F is how many
    the drafter predicts there. More verdicts are predicted, fewer drafts are accepted. With C = 1
    nothing changes, with C = 0 no likely token is ever drafted. q' is the distribution that is
    reported, so the output keeps its distribution whatever C. (Kumar, Dao, May, "Speculative
    speculative decoding", Definition 14.)
    """

    def __init__(self, weight: float, fan_out: Sequence[int]) -> None:
        if not 0 <= weight < 1:
            raise ContractError("a weight lies between 0 and 1")
        if not fan_out:
            raise ContractError("there is no fan-out")
        self._weight = weight
        self._fan_out = tuple(fan_out)

    @classmethod
    def planned(cls, weight: float, *, budget: int, depth: int) -> Saguaro:
        """Return the change with the counts that are best before anything is known. They stay
        constant, so that a token's distribution does not depend on earlier predictions."""
        likely = chances(PRIOR_ALPHA, depth)
        return cls(weight, optimal(budget, likely, Misses())[:depth])

    def __call__(self, probs_NV: Tensor, node: int) -> None:
        """Change the distributions, except where that would leave no mass."""
        count = self._fan_out[min(node, len(self._fan_out) - 1)]
        if not count:
            return
        with torch.inference_mode():
            for probs_V in probs_NV:
                self._soften(probs_V, count)

    def _soften(self, probs_V: Tensor, count: int) -> None:
        changed_V = probs_V.clone()
        changed_V[likeliest(probs_V, count)] *= self._weight
        # A running sum adds in one order, whatever the number of threads.
        total = changed_V.cumsum(0, dtype=torch.float64)[-1]
        if float(total) > 0:
            probs_V.copy_(changed_V / total)


def likeliest(scores_V: Tensor, count: int) -> list[int]:
    """Return exactly `count` ids of the largest scores, the largest and first ones first."""
    count = min(count, scores_V.shape[0])
    edge = torch.topk(scores_V, count).values[-1]
    ids = (scores_V >= edge).nonzero()[:, 0]
    order = torch.sort(scores_V[ids], descending=True, stable=True).indices
    return host_ints(ids[order[:count]])
