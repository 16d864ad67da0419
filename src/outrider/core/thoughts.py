"""Thinking budget: a constraint that ends a model's thoughts after so many tokens.

Tokens alone decide, so that each node of a draft has the mask of its own text: where the thoughts
have reached the limit, the mask allows the next token of `closing` and no other.

Shapes:  N = nodes, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from outrider.core.logits import TokenConstraint

# Deepest possible draft (`k` of core/settings.py is at most 64).
_DEEPEST = 128


class ThoughtTags(NamedTuple):
    """Delimiters of thoughts. `begin` opens an answer, after blanks at most, unless it may open
    thoughts `anywhere`; any of `ends` ends them."""

    begin: bytes
    ends: tuple[bytes, ...]
    anywhere: bool = False


class _Position(NamedTuple):
    """The state after some tokens: `num` of them are thoughts, and the last `begun` may be the
    beginning of an end. `closed` of the closing sequence are written (-1: a grammar did not allow
    it), `held` may be a part of a delimiter, and `cut` says that the limit ended thoughts."""

    phase: Literal["before", "within", "after"]
    num: int = 0
    begun: int = 0
    closed: int = 0
    held: bytes = b""
    cut: bool = False


class ThoughtBudget:
    """A TokenConstraint of one request: after `limit` tokens of thoughts come those of `closing`.
    `piece` gives a token's bytes, `begun` says that the prompt has opened the thoughts, and `inner`
    masks the rest of the text: a token that it refuses is not forced. Without a limit it only
    counts."""

    knows_forced = True

    def __init__(
        self,
        tags: ThoughtTags,
        piece: Callable[[int], bytes],
        *,
        begun: bool,
        limit: int | None = None,
        closing: Sequence[int] = (),
        inner: TokenConstraint | None = None,
    ) -> None:
        self._tags, self._piece, self._closing, self._inner = tags, piece, closing, inner
        self._limit = limit if closing else None
        self._longest = max(map(len, (tags.begin, *tags.ends)))
        self._start = _Position("within" if begun else "before")
        # The position after so many tokens, of which these are the last.
        self._at, self._num, self._last = self._start, 0, list[int]()

    def masks(
        self, text: Sequence[int], suffixes: Sequence[Sequence[int]], vocab_size: int
    ) -> Tensor | None:
        found = None if self._inner is None else self._inner.masks(text, suffixes, vocab_size)
        at = self._after(text)
        if not self._is_near(at, max(map(len, suffixes), default=0)):
            return found
        known: dict[tuple[int, ...], _Position] = {(): at}
        for node, suffix in enumerate(map(tuple, suffixes)):
            for size in range(1, len(suffix) + 1):
                if suffix[:size] not in known:
                    known[suffix[:size]] = self._next(known[suffix[: size - 1]], suffix[size - 1])
            if (token := self._due(known[suffix])) is None:
                continue
            if found is None:
                found = torch.ones((len(suffixes), vocab_size), dtype=torch.bool)
            if bool(found[node, token]):
                found[node] = False
                found[node, token] = True
        return found

    def forced(self, text: Sequence[int], most: int) -> Sequence[int]:
        at = self._after(text)
        if self._due(at) is not None:
            return self._closing[at.closed :][:most]
        inner = self._inner
        return inner.forced(text, most) if inner is not None and inner.knows_forced else ()

    def is_idle(self, text: Sequence[int]) -> bool:
        idle = self._inner is None or self._inner.is_idle(text)
        return idle and not self._is_near(self._after(text), _DEEPEST)

    def count(self, text: Sequence[int]) -> tuple[int, bool | None]:
        """Tokens of thoughts in `text`, and whether the limit ended any; None without a limit."""
        at = self._after(text)
        return at.num, None if self._limit is None else at.cut

    def _after(self, text: Sequence[int]) -> _Position:
        """The position after `text`, found from that of the call before if its text is the
        beginning of this one. Texts of a request differ only in a draft, so no more is compared."""
        num, last = self._num, self._last
        if list(text[num - len(last) : num]) != last:
            self._at, num = self._start, 0
        for token in text[num:]:
            self._at = self._next(self._at, token)
        self._num = len(text)
        self._last = list(text[-_DEEPEST:])
        return self._at

    def _is_near(self, at: _Position, depth: int) -> bool:
        """True if a token within `depth` tokens may be forced."""
        return (
            self._limit is not None
            and at.phase != "after"
            and at.num + at.begun + depth >= self._limit
        )

    def _due(self, at: _Position) -> int | None:
        """The token that must come next, if one must."""
        if self._limit is None or at.phase != "within" or at.num < self._limit or at.closed < 0:
            return None
        return self._closing[at.closed]

    def _next(self, at: _Position, token: int) -> _Position:
        if at.phase == "after":
            return at
        if (due := self._due(at)) == token:
            if at.closed + 1 < len(self._closing):
                return at._replace(closed=at.closed + 1)
            num = at.num + at.begun
            return self._before(at._replace(num=num, begun=0, cut=True), b"")
        held = at.held + (piece := self._piece(token))
        if at.phase == "before":
            return self._before(at, held)
        ends = [held.find(end) + len(end) for end in self._tags.ends if end in held]
        if ends:
            return self._before(at._replace(begun=0), held[min(ends) :])
        size = max(num_begun(held, end) for end in self._tags.ends)
        goes_on = size > len(piece) and at.begun < self._longest
        return at._replace(
            num=at.num if goes_on else at.num + at.begun + (size == 0),
            begun=at.begun + 1 if goes_on else int(size > 0),
            closed=at.closed if due is None else -1,
            held=held[-self._longest :],
        )

    def _before(self, at: _Position, held: bytes) -> _Position:
        """The position with `held` as the text after the last thoughts, or after the prompt."""
        tags = self._tags
        held = held if tags.anywhere else held.lstrip()
        start = held.find(tags.begin) if tags.anywhere else 0
        if start >= 0 and held.startswith(tags.begin, start):
            held = held[start + len(tags.begin) :]
            return at._replace(phase="within", closed=0, held=held)
        goes_on = tags.anywhere or tags.begin.startswith(held)
        held = held[-self._longest :]
        return at._replace(phase="before" if goes_on else "after", closed=0, held=held)


def num_begun(text: bytes, end: bytes) -> int:
    """Bytes of the longest end of `text` that `end` begins with."""
    sizes = range(min(len(text), len(end)), 0, -1)
    return next((size for size in sizes if text.endswith(end[:size])), 0)
