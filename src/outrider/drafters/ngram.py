"""Prompt lookup (n-gram): drafts the continuation of the last place where the text looked alike.

The longest tail of the text, from `max_n` down to `min_n` tokens, that occurred before is found by
hashing; the most recent occurrence wins. A continuation that reaches the end of the text goes on
into the draft itself, as LZ77 copies do. Saxena 2023, "Prompt Lookup Decoding". How much of a
continuation is drafted follows from how often earlier look-ups were right (`CopyAcceptance`). Cost:
O(max_n - min_n + 1) dictionary operations a token; where nothing repeats, nothing is proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.budget import Budget
from outrider.core.errors import ConfigError
from outrider.drafters.proposals import Found, TextDrafter
from outrider.estimate.online import RequestRates
from outrider.estimate.worth import LEAST_BEGUN, LEAST_GONE_ON
from outrider.kernels.native.lookups import NativeLookups, NgramSettings

# What is supposed of a look-up that agrees in 1, 2, 3, 4 to 7, 8 to 15, more tokens.
_FIRST = (0.3, 0.4, 0.5, 0.75, 0.9, 0.97)
# W and V: trials for which that stands, and hits for which f = 1 does.
_WEIGHT = 8.0
_EVENNESS = 3.0
# Share of the old counts that a new one leaves.
_FADE = 1 - 1 / 32
_HIGHEST = 0.98
# Which of them a look-up is, by how many tokens agree; so many are more than all others.
_KINDS = (0, 0, 1, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4)
_MANY = len(_KINDS)


def _no_trials() -> RequestRates:
    return RequestRates(len(_FIRST), _FADE, _WEIGHT, _EVENNESS)


@dataclass(slots=True)
class CopyAcceptance:
    """Of one request.

    Every token of output says whether the look-up before it was right, drafted or not. So the gate
    shuts where look-ups are wrong and opens again where they come right, without a probe. Trials
    are told apart by how many tokens agree before the place that is copied from (1, 2, 3, 4 to 7, 8
    to 15, more):

        rate = (W f first + hits) / (W + trials)          f = (V + all hits) / (V + all expected)

    The rate is the mean of a Beta distribution whose prior, `first`, is scaled by f, how much
    better or worse than foretold the request did in all classes together. Counts fade. They are the
    request's own, so a draft depends on its text alone: neither on other requests nor on which
    rounds asked.

    A token of a chain agrees with one token more than the one before it, so P falls more slowly
    along long copies. Nothing is drafted where P of the first token is below 0.15, for it would
    cost its row and mostly bring nothing; what follows a likely token is drafted while P >= 0.03.
    """

    rates: RequestRates = field(default_factory=_no_trials)

    def learn(self, length: int, *, right: bool) -> None:
        """A look-up that agreed in `length` tokens named the next one rightly, or did not."""
        kind = _KINDS[length] if length < _MANY else -1
        self.rates.add(kind, right, _FIRST[kind])

    def rate(self, length: int) -> float:
        """The probability that a look-up that agrees in `length` tokens is right."""
        kind = _KINDS[length] if length < _MANY else -1
        rate = self.rates.rate(kind, _FIRST[kind])
        return rate if rate < _HIGHEST else _HIGHEST

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


_NOWHERE = -1


class NgramDrafter(TextDrafter):
    """Chains from the sequence's own prompt and output. Looks up natively, if it can."""

    def __init__(
        self, *, max_n: int = 3, min_n: int = 2, native: NativeLookups | None = None
    ) -> None:
        if not 1 <= min_n <= max_n:
            raise ConfigError(
                f"min_ngram must be between 1 and max_ngram, got {min_n} and {max_n}.",
                hint="lower --min-ngram or raise --max-ngram",
            )
        sizes = range(max_n, min_n - 1, -1)
        texts = NgramTexts(sizes) if native is None else native.ngram(_settings(sizes))
        super().__init__("ngram", texts)


def _settings(sizes: range) -> NgramSettings:
    """What native code is told."""
    return NgramSettings(
        _FIRST,
        _WEIGHT,
        _EVENNESS,
        _FADE,
        _HIGHEST,
        LEAST_BEGUN,
        LEAST_GONE_ON,
        _KINDS,
        sizes[0],
        sizes[-1],
    )


class NgramTexts:
    """Texts of requests, as drafters/proposals.py wants them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._indexes: dict[int, NgramIndex] = {}

    def open(self, seq_id: int, prompt_length: int) -> None:
        self._indexes[seq_id] = NgramIndex(self._sizes, prompt_length)

    def offer(self, seq_id: int, tokens: Sequence[int], budget: Budget) -> Found | None:
        index = self._indexes[seq_id]
        index.read(tokens)
        if not index.length:
            return None
        kept = index.gate.kept(index.length, budget.depth)
        if not kept:
            return None
        return tuple(index.continuation(tokens, len(kept))), kept, None

    def close(self, seq_id: int) -> None:
        del self._indexes[seq_id]


class NgramIndex:
    """For every n-gram of a text of `sizes`, the longest first: the place after its latest one.

    The text goes on as it did from a place whose last `length` tokens are the text's; 0 if there is
    no such place. After the first `prompt_length` tokens, `gate` hears whether the place was right.
    """

    def __init__(self, sizes: Sequence[int], prompt_length: int) -> None:
        self.gate = CopyAcceptance()
        self.length = 0
        self._place = _NOWHERE
        self._sizes = sizes
        self._prompt_length = prompt_length
        self._after: dict[tuple[int, ...], int] = {}
        self._num_read = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Catch up with the text, which may only have grown."""
        for end in range(self._num_read, len(tokens)):
            followed = False
            if self.length:
                followed = tokens[self._place] == tokens[end]
                if end >= self._prompt_length:
                    self.gate.learn(self.length, right=followed)
            self._find(tokens, end + 1, followed=followed)
        self._num_read = len(tokens)

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens, if the text that was read goes on as it did; none where it does
        not."""
        if not self.length:
            return []
        start = self._place
        drafted = list(tokens[start : start + count])
        while len(drafted) < count:
            drafted.append(drafted[start + len(drafted) - len(tokens)])
        return drafted

    def _find(self, tokens: Sequence[int], end: int, *, followed: bool) -> None:
        """Where `tokens[:end]` ended alike before; `followed` says that it went on as from there
        before."""
        after, found, length = self._after, _NOWHERE, 0
        for n in self._sizes:
            if n <= end:
                tail = tuple(tokens[end - n : end])
                if found == _NOWHERE:
                    found = after.get(tail, _NOWHERE)
                    length = n
                after[tail] = end
        if found == _NOWHERE:
            self.length = 0
        elif followed and found == self._place + 1:
            self.length = max(self.length + 1, length)
        else:
            self.length = length
        self._place = found
