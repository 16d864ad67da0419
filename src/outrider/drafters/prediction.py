"""Predicted outputs: drafts follow the caller's own prediction of the text while the two agree.

Where the text departs from the prediction, the longest tail of the text that the prediction also
contains says where to go on; among equal tails the nearest position after the last followed one
wins. So insertions, deletions, replacements and moved blocks are handled. Tails of 8, 4, 2 and 1
tokens are looked up by hash; a single token counts only if the prediction has it once nearby. A
token that leads nowhere is first taken for a replacement. Cost: four dictionary entries a token of
the prediction, built once, and four look-ups a token that departs from it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from outrider.core.draft import Draft
from outrider.core.plugins import DrafterKind
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters.common.context import BuildContext

_SIZES = (8, 4, 2, 1)
_NEAR = 32


class PredictionDrafter:
    """A drafter of deterministic chains from each row's own prediction, if it has one."""

    name = "prediction"
    needs = DraftNeeds()

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}
        self._followers: dict[int, _Follower] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._starts[seq_id] = len(prompt)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [
            Draft.chain(self._follower(row).continuation(row.tokens, row.budget.depth))
            for row in rows
        ]

    def close(self, seq_id: int) -> None:
        del self._starts[seq_id]
        self._followers.pop(seq_id, None)

    def _follower(self, row: DraftRow) -> _Follower:
        follower = self._followers.get(row.seq_id)
        if follower is None:
            follower = _Follower(row.prediction, start=self._starts[row.seq_id])
            self._followers[row.seq_id] = follower
        return follower


class _Follower:
    """The text's position in `guess`, after its first `start` tokens.

    `_at` is the position of the next expected token, None while the text is nowhere in the guess.
    `_sure` is the last such position that was confirmed by more than a single token.
    """

    def __init__(self, guess: tuple[int, ...], *, start: int) -> None:
        self._guess = guess
        self._positions = _index(guess)
        self._num_read = start
        self._at: int | None = 0
        self._sure = 0
        self._run = 1  # as good as a token: a guess starts where the text does
        self._replaced = False

    def continuation(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        for end in range(self._num_read + 1, len(tokens) + 1):
            self._follow(tokens, end)
        self._num_read = len(tokens)
        return () if self._at is None else self._guess[self._at : self._at + count]

    def _follow(self, tokens: Sequence[int], end: int) -> None:
        """Read the token before position `end` of the text."""
        at = self._at
        if at is not None and self._guess[at : at + 1] == (tokens[end - 1],):
            self._stand(at + 1, self._run + 1)
            return
        self._run = 0
        for size in _SIZES:
            tail = tuple(tokens[max(end - size, 0) : end])
            position = self._find(tail)
            if position is not None:
                self._stand(position, len(tail))
                return
        self._at = None if at is None or self._replaced else at + 1
        self._replaced = True

    def _stand(self, position: int, run: int) -> None:
        self._at, self._run, self._replaced = position, run, False
        if run > 1:
            self._sure = position

    def _find(self, tail: tuple[int, ...]) -> int | None:
        """Return the position after `tail` in the guess, the nearest after `_sure`."""
        positions = self._positions.get(tail, ())
        if len(tail) == 1:
            near = slice(
                bisect_left(positions, self._sure - _NEAR),
                bisect_right(positions, self._sure + _NEAR),
            )
            return positions[near.start] if near.stop - near.start == 1 else None
        if not positions:
            return None
        after = bisect_right(positions, self._sure)
        return positions[after] if after < len(positions) else positions[-1]


def _index(guess: tuple[int, ...]) -> dict[tuple[int, ...], list[int]]:
    """Return the positions after every run of each size, ascending."""
    positions: dict[tuple[int, ...], list[int]] = {}
    for end in range(1, len(guess) + 1):
        for size in _SIZES:
            if size <= end:
                positions.setdefault(guess[end - size : end], []).append(end)
    return positions


def build(context: BuildContext) -> PredictionDrafter:
    del context
    return PredictionDrafter()


KIND = DrafterKind(
    name="prediction",
    build=build,
    reads=("prediction",),
    must_have=("prediction",),
    keeps_apart=True,
    drafted=0.5,
)
