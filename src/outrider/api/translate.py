"""Token ids of one tokenizer to ids of another through text, a round at a time (the bridge).

A draft's ids are extended, never recomputed, so a round costs bounded work and a draft model keeps
its committed tokens. Special tokens that both vocabularies spell alike are translated; other
special tokens of the target are left out, and other special tokens of the draft end a draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from outrider.api.stream import REPLACEMENT
from outrider.api.tokenizer import Tokenizer

_CONTEXT = 8
# Bytes of a character at most, hence ids at most: each id has one byte or more.
_LONGEST_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Reads and writes text in ids below `size`, without the ids that are `foreign` to the other
    side. `lead` are the ids that the tokenizer puts before a text; `newline` is a neutral
    context."""

    tokenizer: Tokenizer
    size: int
    foreign: frozenset[int]
    lead: tuple[int, ...]
    newline: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, other: Tokenizer) -> _Vocabulary:
        shared = {other.vocabulary.get(i) for i in other.special_ids}
        foreign = {i for i in tokenizer.special_ids if tokenizer.vocabulary.get(i) not in shared}
        bare, full = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
        starts = (i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        newline = tokenizer.encode("\n", add_special=False)
        lead = full[: next(starts, 0)]
        return cls(tokenizer, size, frozenset(foreign), tuple(lead), tuple(newline))

    def translatable(self, token_id: int) -> bool:
        return token_id < self.size and token_id not in self.foreign

    def read(self, ids: Sequence[int], start: int, end: int) -> str:
        """The text of ids[start:end] in the context of the ids before.

        A context that began within a character would be read as broken bytes, and some decoders
        would then break the whole run.
        """
        starts = range(max(start - _CONTEXT, 0), start)
        first = next((index for index in starts if self.is_whole(ids, index)), start)
        return self._decode(ids[first:end])[len(self._decode(ids[first:start])) :]

    def is_whole(self, ids: Sequence[int], end: int) -> bool:
        """True if the ids before `end` finish their last character."""
        tails = (ids[max(end - size, 0) : end] for size in range(1, _LONGEST_CHARACTER + 1))
        return any(not self._decode(tail).endswith(REPLACEMENT) for tail in tails)

    def whole_end(self, ids: Sequence[int], start: int) -> int:
        """The last index from `start` on before which every character is complete.

        Bytes that begin no character do not wait for ever.
        """
        for end in range(len(ids), max(start, len(ids) - _LONGEST_CHARACTER), -1):
            if self.is_whole(ids, end):
                return end
        return len(ids) if len(ids) - start > _LONGEST_CHARACTER else start

    def write(self, before: Sequence[int], text: str) -> list[int]:
        """New ids that continue `before` with `text`."""
        if not text:
            return []
        for context in self._contexts(before):
            ids = self._encode(self._decode(context) + text)
            if tuple(ids[: len(context)]) == context:
                return ids[len(context) :]
        return self._encode(text)

    def begin(self, text: str) -> list[int]:
        """The ids of a whole text, with the tokenizer's own lead exactly once."""
        ids = self._encode(text)
        return ids if tuple(ids[: len(self.lead)]) == self.lead else [*self.lead, *ids]

    def _contexts(self, before: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for size in (_CONTEXT, 4, 2, 1):
            if size <= len(before):
                yield tuple(before[-size:])
        if self.newline:
            yield self.newline

    def _encode(self, text: str) -> list[int]:
        return [i for i in self.tokenizer.encode(text, add_special=False) if i < self.size]

    def _decode(self, ids: Sequence[int]) -> str:
        kept = [i for i in ids if self.translatable(i)]
        return self.tokenizer.decode(kept, skip_special=False)


class TextTranslator:
    """Translates between `target` and `draft`, whose models have `target_size` and `draft_size`
    ids: a tokenizer may know more, which are never written."""

    def __init__(
        self, target: Tokenizer, draft: Tokenizer, *, target_size: int, draft_size: int
    ) -> None:
        self._target = _Vocabulary.of(target, target_size, draft)
        self._draft = _Vocabulary.of(draft, draft_size, target)

    def open(self) -> TextTranslation:
        return TextTranslation(self._target, self._draft)


class TextTranslation:
    """Translation of one sequence; a `drafters.bridge.Translation`.

    `_ids` spell the text of the first `_num_read` target tokens; later tokens wait for the rest of
    a character.

    Of the earlier text, only the last id is spelled again together with the new text, because more
    text may merge into it. New ids are found by encoding the new text after the last few ids, and
    used if those ids come out unchanged; if no context survives, the text is encoded by itself.

    An incomplete character waits, in both directions. So does a replacement character at the end of
    a text, which looks like broken bytes.
    """

    def __init__(self, target: _Vocabulary, draft: _Vocabulary) -> None:
        self._target = target
        self._draft = draft
        self._ids: list[int] = []
        self._num_read = 0
        self._tail: tuple[int, ...] = ()
        self._waiting: tuple[int, ...] = ()

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        end = self._target.whole_end(tokens, self._num_read)
        text = self._target.read(tokens, self._num_read, end)
        if self._num_read == 0:
            self._ids = self._draft.begin(text)
        elif text:
            self._extend(text)
        self._num_read = end
        self._tail = tuple(tokens[max(end - _CONTEXT, 0) : end])
        self._waiting = tuple(tokens[end:])
        return self._ids

    def to_target(self, drafted: Sequence[int]) -> list[int]:
        # Twice the context: it may have to begin later, at a whole character.
        before = tuple(self._ids[-2 * _CONTEXT :])
        ids = (*before, *takewhile(self._draft.translatable, drafted))
        end = self._draft.whole_end(ids, len(before))
        spelled = self._target.write(self._tail, self._draft.read(ids, len(before), end))
        waiting = self._waiting
        return spelled[len(waiting) :] if tuple(spelled[: len(waiting)]) == waiting else []

    def _extend(self, text: str) -> None:
        """Spell `text` after the ids, and the last id again with it if it is plain text."""
        ids, kept = self._ids, len(self._ids)
        if ids and ids[-1] not in self._draft.tokenizer.special_ids:
            kept -= self._draft.is_whole(ids, kept - 1)
        again = self._draft.read(ids, kept, len(ids))
        written = self._draft.write(ids[max(kept - _CONTEXT, 0) : kept], again + text)
        if written:
            ids[kept:] = written
