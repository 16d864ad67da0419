"""How often the text went on as the automaton says, learnt from the text itself.

What followed the present end of the text most often is a prediction, whether it is drafted or not,
and the next token says whether it was right. So every token of text is a trial, and none costs a
row of a pass. Trials are told apart by the length of the run that was found (1, 2 to 3, 4 to 7, 8
to 15, more tokens) and by what followed it: one token seen once, or a token with less than half, up
to four fifths, or more of the counts.

    rate = (W f shared + hits) / (W + trials)        hits and trials of the request, fading
    f    = (V + all hits) / (V + all expected)

`shared` is the same over all requests, and f says how much better or worse than foretold this
request did in all kinds together. Secondary estimation of this kind is from data compression
(Bloom 1996, "PPMZ"); SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) takes the shares of
counts as they are, and bounds the depth by a multiple of the length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_NUM_LENGTHS = 5
_NUM_SHARES = 4
# What is supposed of a run of each length before anything was seen, and for how many trials.
_FIRST_RATES = (0.2, 0.4, 0.6, 0.75, 0.85)
_FIRST_SHARES = (1.0, 0.4, 0.7, 1.0)
_FIRST_WEIGHT = 4.0
# W and V: how much requests are alike, in trials of one kind and in hits of all.
_LIKENESS = 6.0
_EVENNESS = 3.0
_HIGHEST = 0.98
# Share of the old counts that a new one leaves.
_FADE = 1 - 1 / 64
_SHARED_FADE = 1 - 1 / 512


def bucket(length: int, count: int, total: int) -> int:
    """Where trials of a run of `length` tokens count, whose likeliest next token has `count` of
    `total`."""
    size = min(length.bit_length(), _NUM_LENGTHS) - 1
    if total == 1:
        share = 0
    elif 2 * count < total:
        share = 1
    else:
        share = 2 if 5 * count < 4 * total else 3
    return size * _NUM_SHARES + share


def _first_hits() -> list[float]:
    return [_FIRST_WEIGHT * rate * share for rate in _FIRST_RATES for share in _FIRST_SHARES]


def _zeros() -> list[float]:
    return [0.0] * (_NUM_LENGTHS * _NUM_SHARES)


@dataclass(slots=True)
class SharedTrust:
    """Over all requests."""

    hits: list[float] = field(default_factory=_first_hits)
    trials: list[float] = field(
        default_factory=lambda: [_FIRST_WEIGHT] * (_NUM_LENGTHS * _NUM_SHARES)
    )

    def rate(self, place: int) -> float:
        return self.hits[place] / self.trials[place]


@dataclass(slots=True)
class Trust:
    """Of one request."""

    shared: SharedTrust
    hits: list[float] = field(default_factory=_zeros)
    trials: list[float] = field(default_factory=_zeros)
    all_hits: float = 0.0
    all_expected: float = 0.0

    def rate(self, place: int) -> float:
        """The probability that a prediction in bucket `place` is right."""
        factor = (_EVENNESS + self.all_hits) / (_EVENNESS + self.all_expected)
        foretold = min(factor * self.shared.rate(place), _HIGHEST)
        weight = _LIKENESS + self.trials[place]
        return (_LIKENESS * foretold + self.hits[place]) / weight

    def learn(self, place: int, *, right: bool) -> None:
        shared = self.shared
        self.all_hits = _FADE * self.all_hits + right
        self.all_expected = _FADE * self.all_expected + shared.rate(place)
        self.hits[place] = _FADE * self.hits[place] + right
        self.trials[place] = _FADE * self.trials[place] + 1
        shared.hits[place] = _SHARED_FADE * shared.hits[place] + right
        shared.trials[place] = _SHARED_FADE * shared.trials[place] + 1
