"""Whether what was looked up is worth a row: how often this request's look-ups were right so far.

Every token of output says whether the look-up before it was right, drafted or not. So nothing has
to be drafted to be judged: where look-ups are wrong the gate shuts by itself, and where they come
right again it opens again, without a probe. Trials are told apart by how many tokens agree before
the place that is copied from (1, 2, 3, 4 to 7, 8 to 15, more):

    rate = (W f first + hits) / (W + trials)          f = (V + all hits) / (V + all expected)

That is the mean of a Beta distribution whose prior, `first`, is scaled by f, how much better or
worse than foretold the request did in all classes together. Counts fade. They are the request's
own, so a draft depends on its text alone: neither on other requests nor on which rounds asked.

A token of a chain agrees with one token more than the one before it, so P falls more slowly along
long copies. Nothing is drafted where P of the first token is below 0.15, for it would cost its row
and mostly bring nothing; what follows a likely token is drafted while P >= 0.03.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# What is supposed of a look-up that agrees in 1, 2, 3, 4 to 7, 8 to 15, more tokens.
_FIRST = (0.3, 0.4, 0.5, 0.75, 0.9, 0.97)
# W and V: trials for which that stands, and hits for which f = 1 does.
_WEIGHT = 8.0
_EVENNESS = 3.0
# Share of the old counts that a new one leaves.
_FADE = 1 - 1 / 32
_HIGHEST = 0.98
# P below which no first token, and no later one, is drafted.
LEAST_BEGUN = 0.15
LEAST_GONE_ON = 0.03


def _zeros() -> list[float]:
    return [0.0] * len(_FIRST)


@dataclass(slots=True)
class Gate:
    """Of one request."""

    hits: list[float] = field(default_factory=_zeros)
    trials: list[float] = field(default_factory=_zeros)
    all_hits: float = 0.0
    all_expected: float = 0.0

    def learn(self, length: int, *, right: bool) -> None:
        """A look-up that agreed in `length` tokens named the next one rightly, or did not."""
        place = _class(length)
        self.all_hits = _FADE * self.all_hits + right
        self.all_expected = _FADE * self.all_expected + _FIRST[place]
        self.hits[place] = _FADE * self.hits[place] + right
        self.trials[place] = _FADE * self.trials[place] + 1

    def rate(self, length: int) -> float:
        """The probability that a look-up that agrees in `length` tokens is right."""
        place = _class(length)
        factor = (_EVENNESS + self.all_hits) / (_EVENNESS + self.all_expected)
        foretold = _WEIGHT * factor * _FIRST[place]
        return min((foretold + self.hits[place]) / (_WEIGHT + self.trials[place]), _HIGHEST)

    def kept(self, length: int, depth: int) -> tuple[float, ...]:
        """For each token that is worth a row, `depth` at most, P that it and those before it are
        right; the first agrees in `length` tokens."""
        probability = self.rate(length)
        if probability < LEAST_BEGUN:
            return ()
        kept: list[float] = []
        while probability >= LEAST_GONE_ON and len(kept) < depth:
            kept.append(probability)
            probability *= self.rate(length + len(kept))
        return tuple(kept)


def _class(length: int) -> int:
    return length - 1 if length < 4 else min(length.bit_length(), len(_FIRST) - 1)
