"""Prompt lookup (n-gram): drafts the continuation of the last occurrence of the text's end.

The longest tail of the text, from `max_n` down to `min_n` tokens, that occurred before is found by
hashing; the most recent occurrence wins. A continuation that reaches the end of the text goes on
into the draft itself, as LZ77 copies do. Saxena 2023, "Prompt Lookup Decoding". How much of a
continuation is drafted follows from how often earlier look-ups were right (`CopyAcceptance`). Cost:
O(max_n - min_n + 1) dictionary operations a token; if nothing repeats, nothing is proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.core.draft import Budget
from outrider.core.errors import ConfigError
from outrider.core.plugins import DrafterKind
from outrider.drafters.common.context import BuildContext, Found, TextDrafter
from outrider.estimate.acceptance import RequestRates
from outrider.estimate.cost import LEAST_BEGUN, LEAST_GONE_ON

if TYPE_CHECKING:
    from outrider.kernels.native.rounds import NativeLookups, NgramSettings

# Prior rates of a look-up that agrees in 1, 2, 3, 4 to 7, 8 to 15, more tokens.
_FIRST = (0.3, 0.4, 0.5, 0.75, 0.9, 0.97)
# W and V: the weight of that prior in trials, and of f = 1 in hits.
_WEIGHT = 8.0
_EVENNESS = 3.0
# The factor by which a new trial reduces old counts.
_FADE = 1 - 1 / 32
_HIGHEST = 0.98
# The class of a look-up by how many tokens agree; so many or more tokens are in the last class.
_KINDS = (0, 0, 1, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4)
_MANY = len(_KINDS)


def _no_trials() -> RequestRates:
    return RequestRates(len(_FIRST), _FADE, _WEIGHT, _EVENNESS)


@dataclass(slots=True)
class CopyAcceptance:
    """Acceptance of one request's look-ups.

    Every token of output shows whether the look-up before it was right, drafted or not. So drafting
    stops where look-ups are wrong and starts again when they are right, without a probe. Trials are
    classed by how many tokens agree before the copied ones (1, 2, 3, 4 to 7, 8 to 15, more):

        rate = (W f first + hits) / (W + trials)          f = (V + all hits) / (V + all expected)

    The rate is the mean of a Beta distribution whose prior, `first`, is scaled by f, which is how
    much better or worse than expected the request did in all classes together. Counts fade. They
    are the request's own, so a draft depends on its text alone: neither on other requests nor on
    which rounds wanted drafts.

    A token of a chain agrees with one token more than the one before it, so P falls more slowly
    along long copies. Nothing is drafted if P of the first token is below 0.15, for it would cost
    its row and mostly be refused; later tokens are drafted while P >= 0.03.
    """

    rates: RequestRates = field(default_factory=_no_trials)

    def learn(self, length: int, *, right: bool) -> None:
        """Learn whether a look-up that agreed in `length` tokens gave the right next token."""
        kind = _KINDS[length] if length < _MANY else -1
        self.rates.add(kind, right, _FIRST[kind])

    def rate(self, length: int) -> float:
        """Return the probability that a look-up that agrees in `length` tokens is right."""
        kind = _KINDS[length] if length < _MANY else -1
        rate = self.rates.rate(kind, _FIRST[kind])
        return rate if rate < _HIGHEST else _HIGHEST

    def kept(self, length: int, depth: int) -> tuple[float, ...]:
        """Return, for each token that is worth a row, at most `depth`, P that it and those before
        it are right; the first agrees in `length` tokens."""
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
    """A drafter of chains from a sequence's own prompt and output, natively if possible."""

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
    """Return the settings of the native code."""
    from outrider.kernels.native.rounds import NgramSettings

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
    """Texts of requests, with the interface of drafters/common/context.py."""

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
    """The position after the latest occurrence of every n-gram of a text, of these `sizes`.

    The text continues like an earlier position whose last `length` tokens are the text's, if not 0.
    After the first `prompt_length` tokens, `gate` learns whether that was right.
    """

    def __init__(self, sizes: Sequence[int], prompt_length: int) -> None:
        self.gate = CopyAcceptance()
        self.length = 0
        self._source = _NOWHERE
        self._sizes = sizes
        self._prompt_length = prompt_length
        self._after: dict[tuple[int, ...], int] = {}
        self._num_read = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Catch up with the text, which may only have grown."""
        for end in range(self._num_read, len(tokens)):
            followed = False
            if self.length:
                followed = tokens[self._source] == tokens[end]
                if end >= self._prompt_length:
                    self.gate.learn(self.length, right=followed)
            self._find(tokens, end + 1, followed=followed)
        self._num_read = len(tokens)

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the next `count` tokens, if the text continues as it did before; none if there is
        no earlier occurrence."""
        if not self.length:
            return []
        start = self._source
        drafted = list(tokens[start : start + count])
        while len(drafted) < count:
            drafted.append(drafted[start + len(drafted) - len(tokens)])
        return drafted

    def _find(self, tokens: Sequence[int], end: int, *, followed: bool) -> None:
        """Find an earlier occurrence of the end of `tokens[:end]`; `followed` says that the last
        token continued the previous occurrence."""
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
        elif followed and found == self._source + 1:
            self.length = max(self.length + 1, length)
        else:
            self.length = length
        self._source = found


def build(context: BuildContext) -> NgramDrafter:
    config = context.config
    return NgramDrafter(
        max_n=config.max_ngram, min_n=config.min_ngram, native=context.models.lookups
    )


KIND = DrafterKind(
    name="ngram",
    build=build,
    scores=True,
    keeps_apart=True,
    drafted=0.3,
    advice="copies from the text so far: for texts that repeat themselves",
)
