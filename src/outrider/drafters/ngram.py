"""Prompt lookup: continue the text as it went on after the last place that looked like this.

The longest tail of the text, from `max_n` down to `min_n` tokens, that occurred before is found by
hashing, and the most recent occurrence wins. A continuation that reaches the end of the text goes
on into the draft itself, as LZ77 copies do, so a text that repeats with a short period is drafted
to the full depth. Saxena 2023, "Prompt Lookup Decoding".

Cost: O(max_n - min_n + 1) dictionary operations a token, whatever the length of the text. It loses
where nothing repeats: then it proposes nothing, and a round costs what plain decoding costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.draft import Draft
from outrider.core.errors import ConfigError
from outrider.core.protocols import DraftNeeds, DraftRow


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
        self._indexes: dict[int, _Index] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        del prompt
        self._indexes[seq_id] = _Index(self._sizes)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [
            Draft.chain(self._indexes[row.seq_id].continuation(row.tokens, row.budget.depth))
            for row in rows
        ]

    def close(self, seq_id: int) -> None:
        del self._indexes[seq_id]


class _Index:
    """For every n-gram seen that has a successor: where the latest one's successor stands."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._successor: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        self._catch_up(tokens)
        for n in self._sizes:
            start = self._successor.get(tuple(tokens[-n:])) if len(tokens) > n else None
            if start is not None:
                return _copy(tokens, start, count)
        return []

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Index every n-gram that ends before a known successor; the tail itself has none."""
        for end in range(max(self._indexed, 1), len(tokens)):
            for n in self._sizes:
                if n <= end:
                    self._successor[tuple(tokens[end - n : end])] = end
        self._indexed = len(tokens)


def _copy(tokens: Sequence[int], start: int, count: int) -> list[int]:
    drafted = list(tokens[start : start + count])
    while len(drafted) < count:
        drafted.append(drafted[start + len(drafted) - len(tokens)])
    return drafted
