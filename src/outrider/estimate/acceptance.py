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

from collections import OrderedDict
from dataclasses import dataclass

from outrider.estimate.theory import beta_rates, prefix_products

# As many as may ever run at once, so only sequences that ended are forgotten.
MOST_SEQUENCES = 1024
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
class _Sequence:
    """Faded judgements and refusals, in all and of each place; `num_idle` rounds drafted nothing
    since they were counted."""

    judged_at: list[float]
    refused_at: list[float]
    judged: float = 0.0
    refused: float = 0.0
    num_idle: int = 0

    def settle(self) -> None:
        """Let the idle rounds fade what was counted before them."""
        if self.num_idle:
            kept = IDLE_FADE**self.num_idle
            self.judged_at = [kept * count for count in self.judged_at]
            self.refused_at = [kept * count for count in self.refused_at]
            self.judged *= kept
            self.refused *= kept
            self.num_idle = 0

    def add(self, num_judged: int, refused_at: int | None) -> None:
        for place in range(num_judged):
            self.judged_at[place] = FADE * self.judged_at[place] + 1
            self.refused_at[place] *= FADE
        self.judged = FADE * self.judged + num_judged
        self.refused *= FADE
        if refused_at is not None:
            self.refused_at[refused_at] += 1
            self.refused += 1


@dataclass(slots=True)
class _Shared:
    """What all requests show: the rate of the first place, and how often each place was refused
    beside how often that was foretold."""

    refused: list[float]
    foretold: list[float]
    first_judged: float = 0.0
    first_accepted: float = 0.0
    _shape: list[float] | None = None

    @property
    def mean(self) -> float:
        """The mean beta of requests. Later places are judged of easy ones only."""
        accepted = FIRST_WEIGHT * FIRST_RATE + self.first_accepted
        return accepted / (FIRST_WEIGHT + self.first_judged)

    @property
    def shape(self) -> list[float]:
        """s_1 to s_k."""
        if self._shape is None:
            pairs = zip(self.refused, self.foretold, strict=True)
            self._shape = [(SHAPE_WEIGHT + r) / (SHAPE_WEIGHT + f) for r, f in pairs]
        return self._shape

    def add(self, num_judged: int, refused_at: int | None, expected: float) -> None:
        """`expected` is how often this request is refused, whatever the place."""
        for place in range(num_judged):
            self.foretold[place] = SHARED_FADE * self.foretold[place] + expected
            self.refused[place] = SHARED_FADE * self.refused[place] + (place == refused_at)
        self.first_judged = SHARED_FADE * self.first_judged + 1
        self.first_accepted = SHARED_FADE * self.first_accepted + (refused_at != 0)
        self._shape = None


class Acceptance:
    """Beliefs about drafts of up to `k` tokens. Of more than 1024 sequences the one whose last
    draft is longest ago is forgotten."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._shared = _Shared([0.0] * k, [0.0] * k)
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()

    def observe(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        """A round. A place after the first refusal was not judged."""
        seq = self._sequences.get(seq_id)
        num_judged = min(num_accepted + 1, num_drafted, self._k)
        if not num_judged:
            if seq is not None:
                seq.num_idle += 1
            return
        if seq is None:
            seq = self._sequences[seq_id] = _Sequence([0.0] * self._k, [0.0] * self._k)
            if len(self._sequences) > MOST_SEQUENCES:
                self._sequences.popitem(last=False)
        self._sequences.move_to_end(seq_id)
        seq.settle()
        u, v = self._beta(seq)
        refused_at = num_accepted if num_accepted < num_judged else None
        self._shared.add(num_judged, refused_at, v / (u + v))
        seq.add(num_judged, refused_at)

    def knows(self, seq_id: int) -> bool:
        """Whether a draft of it was judged, so far as is remembered."""
        return seq_id in self._sequences

    def rates(self, seq_id: int) -> list[float]:
        """a_1 to a_k of one sequence."""
        seq = self._sequences.get(seq_id)
        if seq is not None:
            seq.settle()
        pairs = zip(beta_rates(*self._beta(seq), self._k), self._shared.shape, strict=True)
        prior = [1 - min(1.0, shape * (1 - rate)) for rate, shape in pairs]
        if seq is None:
            return prior
        return [
            (PLACE_WEIGHT * rate + judged - refused) / (PLACE_WEIGHT + judged)
            for rate, judged, refused in zip(prior, seq.judged_at, seq.refused_at, strict=True)
        ]

    def prefixes(self, seq_id: int) -> list[float]:
        """For each place the probability that a draft is kept up to it."""
        return prefix_products(self.rates(seq_id))

    def _beta(self, seq: _Sequence | None) -> tuple[float, float]:
        mean = self._shared.mean
        u, v = LIKENESS * mean, LIKENESS * (1 - mean)
        return (u, v) if seq is None else (u + seq.judged - seq.refused, v + seq.refused)
