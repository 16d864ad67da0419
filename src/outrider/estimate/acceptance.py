"""Acceptance estimate: the probability that each position of a request's next draft is accepted.

a_j is the probability that position j is accepted given that all before it were. If the rate beta
were equal at every position, a request's beta would be Beta(u, v) after its judgements, starting
from all requests, and a_j = (u + j - 1) / (u + v + j - 1) (estimate/theory.py). But position j is
refused s_j times as often over all requests, and a request's own judgements of a position make a
Beta distribution:

    p_j = 1 - s_j (1 - (u + j - 1) / (u + v + j - 1))
    a_j = (S p_j + accepted) / (S + judged)

Counts fade with each drafted round, and more slowly with each other round, so a hard request is
tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.estimate.online import BySequence, FadingRate, add_to_first
from outrider.estimate.theory import beta_rates, prefix_products

# The prior rate, and the number of judgements that it counts as.
FIRST_RATE = 0.7
FIRST_WEIGHT = 4.0
# u + v of a request that was never judged: the likeness of requests.
LIKENESS = 8.0
# S, in judgements.
POSITION_WEIGHT = 16.0
# Prior weight of s_j = 1, in rejections.
SHAPE_WEIGHT = 8.0
# Weights of the old counts after a new one: of all requests, of one, and of one without drafts.
SHARED_FADE = 1 - 1 / 256
FADE = 1 - 1 / 48
IDLE_FADE = 1 - 1 / 128


@dataclass(slots=True)
class _SequenceCounts:
    """Counts of rejections of judged tokens, at each position and in `all`; `num_idle` rounds
    without drafts came after these counts."""

    positions: list[FadingRate]
    all: FadingRate
    num_idle: int = 0

    def settle(self) -> None:
        """Fade the counts by the idle rounds after them."""
        kept = IDLE_FADE**self.num_idle
        for rate in (*self.positions, self.all):
            rate.hits *= kept
            rate.trials *= kept
        self.num_idle = 0


@dataclass(slots=True)
class _SharedCounts:
    """Counts over all requests: acceptance at the first position, and at each position the
    rejections for each expected one."""

    positions: list[FadingRate]
    first: FadingRate
    _shape: list[float] | None = None

    @property
    def shape(self) -> list[float]:
        """s_1 to s_k."""
        if self._shape is None:
            # Inlined instead of calls of `posterior`, since this is computed after every round.
            self._shape = [
                (SHAPE_WEIGHT + one.hits) / (SHAPE_WEIGHT + one.trials) for one in self.positions
            ]
        return self._shape

    def add(self, num_judged: int, refused_at: int | None, expected: float) -> None:
        """Count a round. `expected` is the request's rejection rate at any position."""
        add_to_first(self.positions, num_judged, refused_at, expected)
        self.first.add(refused_at != 0)
        self._shape = None


class Acceptance:
    """Acceptance estimates for drafts of up to `k` tokens."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._shared = _SharedCounts(self._rates(SHARED_FADE), FadingRate(SHARED_FADE))
        self._sequences: BySequence[_SequenceCounts] = BySequence()

    def observe(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        """Count a round. Positions after the first rejection were not judged."""
        seq = self._sequences.get(seq_id)
        num_judged = min(num_accepted + 1, num_drafted, self._k)
        if not num_judged:
            if seq is not None:
                seq.num_idle += 1
            return
        if seq is None:
            seq = _SequenceCounts(self._rates(FADE), FadingRate(FADE))
        self._sequences.note(seq_id, seq)
        if seq.num_idle:
            seq.settle()
        u, v = self._beta(seq)
        refused_at = num_accepted if num_accepted < num_judged else None
        self._shared.add(num_judged, refused_at, v / (u + v))
        add_to_first(seq.positions, num_judged, refused_at)
        seq.all.add(refused_at is not None, num_judged)

    def knows(self, seq_id: int) -> bool:
        """True if counts of a judged draft of the sequence are stored."""
        return seq_id in self._sequences

    def rates(self, seq_id: int) -> list[float]:
        """a_1 to a_k of one sequence."""
        seq = self._sequences.get(seq_id)
        if seq is not None and seq.num_idle:
            seq.settle()
        pairs = zip(beta_rates(*self._beta(seq), self._k), self._shared.shape, strict=True)
        prior = [1 - refused if (refused := s * (1 - a)) < 1 else 0.0 for a, s in pairs]
        if seq is None:
            return prior
        return [
            (POSITION_WEIGHT * rate + one.trials - one.hits) / (POSITION_WEIGHT + one.trials)
            for rate, one in zip(prior, seq.positions, strict=True)
        ]

    def prefixes(self, seq_id: int) -> list[float]:
        """Probability for each position that a draft is accepted up to it."""
        return prefix_products(self.rates(seq_id))

    def _beta(self, seq: _SequenceCounts | None) -> tuple[float, float]:
        # The mean is that of the first position: later ones are judged of easy requests only.
        mean = self._shared.first.posterior(FIRST_RATE, FIRST_WEIGHT)
        u, v = LIKENESS * mean, LIKENESS * (1 - mean)
        return (u, v) if seq is None else (u + seq.all.trials - seq.all.hits, v + seq.all.hits)

    def _rates(self, fade: float) -> list[FadingRate]:
        return [FadingRate(fade) for _ in range(self._k)]
