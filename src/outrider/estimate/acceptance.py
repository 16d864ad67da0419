"""Acceptance estimate: how likely each place of a request's next draft is accepted.

a_j is the probability that place j is accepted given that all before it were. Were the rate beta
equal at every place, a request's beta would be Beta(u, v) after its judgements, starting from all
requests, and a_j = (u + j - 1) / (u + v + j - 1) (estimate/theory.py). But place j is refused s_j
times as often over all requests, and a request's own judgements of a place make a Beta
distribution:

    p_j = 1 - s_j (1 - (u + j - 1) / (u + v + j - 1))
    a_j = (S p_j + accepted) / (S + judged)

Counts fade, by round drafted and more slowly by round that was not, so a hard request is tried
again.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.estimate.online import BySequence, FadingRate, add_to_first
from outrider.estimate.theory import beta_rates, prefix_products

# What is supposed before anything was judged, and for how many judgements that stands.
FIRST_RATE = 0.7
FIRST_WEIGHT = 4.0
# u + v of a request that was never judged: how much requests are alike.
LIKENESS = 8.0
# S, in judgements.
PLACE_WEIGHT = 16.0
# s_j is 1 until it was seen otherwise; in refusals.
SHAPE_WEIGHT = 8.0
# Shares of old counts that a new one leaves: of all requests, of one, and of one not drafted for.
SHARED_FADE = 1 - 1 / 256
FADE = 1 - 1 / 48
IDLE_FADE = 1 - 1 / 128


@dataclass(slots=True)
class _SequenceCounts:
    """How often a judged token was refused, at each place and in `all`; `num_idle` rounds drafted
    nothing since that was counted."""

    places: list[FadingRate]
    all: FadingRate
    num_idle: int = 0

    def settle(self) -> None:
        """Let the idle rounds fade what was counted before them."""
        kept = IDLE_FADE**self.num_idle
        for rate in (*self.places, self.all):
            rate.hits *= kept
            rate.trials *= kept
        self.num_idle = 0


@dataclass(slots=True)
class _SharedCounts:
    """What all requests show: how often the first place was accepted, and how often each place was
    refused for each refusal that was expected of it."""

    places: list[FadingRate]
    first: FadingRate
    _shape: list[float] | None = None

    @property
    def shape(self) -> list[float]:
        """s_1 to s_k."""
        if self._shape is None:
            # In place of so many calls of `posterior`, since this is worked out after every round.
            self._shape = [
                (SHAPE_WEIGHT + place.hits) / (SHAPE_WEIGHT + place.trials) for place in self.places
            ]
        return self._shape

    def add(self, num_judged: int, refused_at: int | None, expected: float) -> None:
        """`expected` is how often this request is refused, whatever the place."""
        add_to_first(self.places, num_judged, refused_at, expected)
        self.first.add(refused_at != 0)
        self._shape = None


class Acceptance:
    """Beliefs about drafts of up to `k` tokens."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._shared = _SharedCounts(self._rates(SHARED_FADE), FadingRate(SHARED_FADE))
        self._sequences: BySequence[_SequenceCounts] = BySequence()

    def observe(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        """A round. A place after the first refusal was not judged."""
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
        add_to_first(seq.places, num_judged, refused_at)
        seq.all.add(refused_at is not None, num_judged)

    def knows(self, seq_id: int) -> bool:
        """Whether a draft of it was judged, so far as is remembered."""
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
            (PLACE_WEIGHT * rate + place.trials - place.hits) / (PLACE_WEIGHT + place.trials)
            for rate, place in zip(prior, seq.places, strict=True)
        ]

    def prefixes(self, seq_id: int) -> list[float]:
        """For each place the probability that a draft is kept up to it."""
        return prefix_products(self.rates(seq_id))

    def _beta(self, seq: _SequenceCounts | None) -> tuple[float, float]:
        # Of the first place: later ones are judged of easy requests only.
        mean = self._shared.first.posterior(FIRST_RATE, FIRST_WEIGHT)
        u, v = LIKENESS * mean, LIKENESS * (1 - mean)
        return (u, v) if seq is None else (u + seq.all.trials - seq.all.hits, v + seq.all.hits)

    def _rates(self, fade: float) -> list[FadingRate]:
        return [FadingRate(fade) for _ in range(self._k)]
