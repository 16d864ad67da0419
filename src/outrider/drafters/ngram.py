"""Prompt lookup: continue the text as it went on after the last place that looked like this.

The longest tail of the text, from `max_n` down to `min_n` tokens, that occurred before is found by
hashing, and the most recent occurrence wins. A continuation that reaches the end of the text goes
on into the draft itself, as LZ77 copies do, so a text that repeats with a short period is drafted
to the full depth. Saxena 2023, "Prompt Lookup Decoding".

How much of a continuation is drafted follows from how often those before it were right (gate.py).

Cost: O(max_n - min_n + 1) dictionary operations a token, whatever the length of the text. It loses
where nothing repeats: then it proposes nothing, and a round costs what plain decoding costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.draft import Draft
from outrider.core.errors import ConfigError
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters.gate import Gate
from outrider.drafters.offers import NO_OFFER, Offer

_NOWHERE = -1


class NgramDrafter:
    """Deterministic chains from the sequence's own prompt and output; holds no model."""

    name = "ngram"
    needs = DraftNeeds()

    def __init__(self, *, max_n: int = 3, min_n: int = 2) -> None:
        if not 1 <= min_n <= max_n:
            raise ConfigError(
                f"min_ngram must be between 1 and max_ngram, got {min_n} and {max_n}.",
                hint="lower --min-ngram or raise --max-ngram",
            )
        self._sizes = range(max_n, min_n - 1, -1)
        self._indexes: dict[int, NgramIndex] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._indexes[seq_id] = NgramIndex(self._sizes, len(prompt))

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [self._offer(row).draft for row in rows]

    def offers(self, rows: Sequence[DraftRow]) -> list[Offer]:
        """Drafts, and how likely each of their tokens is to be kept."""
        return [self._offer(row) for row in rows]

    def close(self, seq_id: int) -> None:
        del self._indexes[seq_id]

    def _offer(self, row: DraftRow) -> Offer:
        index = self._indexes[row.seq_id]
        index.read(row.tokens)
        if not index.length:
            return NO_OFFER
        kept = index.gate.kept(index.length, row.budget.depth)
        if not kept:
            return NO_OFFER
        return Offer(Draft.chain(index.continuation(row.tokens, len(kept))), kept)


class NgramIndex:
    """For every n-gram of a text of `sizes`, the longest first: the place after its latest one.

    The text goes on as it did from a place whose last `length` tokens are the text's; 0 if there is
    no such place. After the first `prompt_length` tokens, `gate` hears whether the place was right.
    """

    def __init__(self, sizes: Sequence[int], prompt_length: int) -> None:
        self.gate = Gate()
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
