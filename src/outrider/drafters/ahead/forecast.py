"""What past verdicts say about the next one: how many tokens are kept, and how far down the draft
model's list the target's own token stands.

Both are counted apart for drafts that were foreseen and drafts that were not: after a poor fallback
few tokens are kept. Every place starts with a prior, so that the first rounds are not taken for
the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from outrider.estimate.theory import (
    PRIOR_CURVE,
    MissCurve,
    Misses,
    calibrate,
    geometric,
    optimal,
    uniform,
    whole,
)

Policy = Literal["top", "optimal", "geometric", "uniform"]

PRIOR_ALPHA = 0.8
# Tokens that the prior counts for, at every place of a draft.
PRIOR_WEIGHT = 10.0
# Ranks are counted up to here; what stands further down counts as beyond.
NUM_RANKS = 64
# Verdicts after which a curve through the ranks is trusted more than the prior.
ENOUGH_RANKS = 200


@dataclass(slots=True)
class Ranks:
    """A histogram of the places, from 0, of real tokens among the likeliest; the last is beyond."""

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
class _Kept:
    """How often each place of a draft was reached, and how often its token was kept."""

    reached: list[float] = field(default_factory=list[float])
    kept: list[float] = field(default_factory=list[float])

    def add(self, depth: int, accepted: int) -> None:
        self._grow(depth)
        for place in range(min(accepted + 1, depth)):
            self.reached[place] += 1
            self.kept[place] += place < accepted

    def chances(self, depth: int) -> tuple[float, ...]:
        self._grow(depth)
        found: list[float] = []
        alive = 1.0
        for place in range(depth):
            alpha = self.kept[place] / self.reached[place]
            found.append(alive * (1 - alpha))
            alive *= alpha
        return (*found, alive)

    def _grow(self, depth: int) -> None:
        missing = depth - len(self.reached)
        self.reached += [PRIOR_WEIGHT] * missing
        self.kept += [PRIOR_WEIGHT * PRIOR_ALPHA] * missing


@dataclass(slots=True)
class Forecast:
    """How branches are best shared out, by `policy`."""

    policy: Policy = "top"
    recovered: Ranks = field(default_factory=Ranks)
    bonus: Ranks = field(default_factory=Ranks)
    _after_hit: _Kept = field(default_factory=_Kept)
    _after_miss: _Kept = field(default_factory=_Kept)

    def observe(self, depth: int, accepted: int, *, hit: bool) -> None:
        """A draft of `depth` tokens, which was foreseen or not, had so many accepted."""
        (self._after_hit if hit else self._after_miss).add(depth, accepted)

    def observe_rank(self, rank: int | None, *, bonus: bool) -> None:
        """The target's own token stood at `rank` of the draft model's list; None: beyond it."""
        (self.bonus if bonus else self.recovered).add(rank)

    def chances(self, depth: int, *, hit: bool) -> tuple[float, ...]:
        """P(n), n = 0..depth, for a draft that was foreseen or not."""
        return (self._after_hit if hit else self._after_miss).chances(depth)

    @property
    def misses(self) -> Misses:
        return Misses(self.recovered.curve, self.bonus.curve)

    def counts(self, budget: int, depth: int, *, hit: bool) -> list[int]:
        """Branches for n = 0..depth accepted tokens; their sum is `budget`, hit or not."""
        likely, misses = self.chances(depth, hit=hit), self.misses
        match self.policy:
            case "uniform":
                return uniform(budget, len(likely))
            case "geometric":
                return whole(geometric(budget, likely, misses.recovered.power))
            case _:
                return optimal(budget, likely, misses)
