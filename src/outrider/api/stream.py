"""Streaming detokenizer and stop strings: token ids become text as they arrive.

`Detokenizer` never shows half a character; `StopMatcher` never shows text of a stop string. Text
and verdict do not depend on how ids are grouped into pushes.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from functools import partial
from typing import Protocol, TypeAlias

from outrider.core.errors import ConfigError, ContractError

REPLACEMENT = "\ufffd"
_MAX_WAITING = 6


class TokenDecoder(Protocol):
    """What a tokenizer must offer to be streamed."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def whole_characters(self) -> bool:
        """Whether an id without bytes of its own stands for whole characters."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """What an id stands for wherever it is, if that can be told."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


# The state of a detokenizer: its context, how long that is, what waits, and a character's bytes.
_Mark: TypeAlias = tuple[list[int], int | None, list[int], bytes]


class Detokenizer:
    """Amortised constant work per id. Special tokens have no text; with `hidden` these alone
    have none.

    The tokenizer says which bytes an id stands for where it can: every id of byte-level
    vocabularies, and the pieces `<0x00>` to `<0xFF>` of vocabularies that fall back to bytes. Bytes
    that may still become a character wait, and nothing else waits: a U+FFFD that was written is
    shown like any other character.

    Other ids are decoded in a short window: the ids of the last text as context, then the new id.
    Context matters because sentencepiece decoders drop the space of a first word. Where a decoder
    mixes bytes into more than single ids, a replacement character at the end of a window means that
    bytes may be missing, so the text waits. A character has at most four bytes and a token at least
    one, so text that waits longer is broken and is let go.
    """

    def __init__(self, decoder: TokenDecoder, hidden: frozenset[int] | None = None) -> None:
        self._decoder = decoder
        self._hidden = decoder.special_ids if hidden is None else hidden
        everything = partial(decoder.decode, skip_special=False)
        self._decode = decoder.decode if hidden is None else everything
        self._context: list[int] = []
        # Characters that the context decodes to; None: not yet asked.
        self._context_length: int | None = 0
        self._waiting: list[int] = []
        # Bytes that begin a character.
        self._partial = b""

    def push(self, token_id: int) -> str:
        """The text that this id completes; often its own, empty in the middle of a character."""
        if token_id in self._hidden:
            return ""
        data = self._decoder.token_bytes(token_id)
        if data is None:
            return self._broken() + self._push_text(token_id)
        text, num_read = utf_8_decode(self._partial + data, "replace", False)
        self._partial = (self._partial + data)[num_read:]
        # What waited before bytes is a first word's space, which has no text.
        self._context, self._context_length, self._waiting = [token_id], None, []
        return text

    def mark(self) -> _Mark:
        """Where it is now, for `rewind`; its lists are never changed."""
        return self._context, self._context_length, self._waiting, self._partial

    def rewind(self, mark: _Mark) -> None:
        """Be again where it was at `mark`."""
        self._context, self._context_length, self._waiting, self._partial = mark

    def flush(self) -> str:
        """What still waits, as it is: broken bytes become replacement characters."""
        text = self._broken()
        if not self._waiting:
            return text
        window = self._decode([*self._context, *self._waiting])
        return text + self._release(len(self._waiting), window[self._length() :])

    def _broken(self) -> str:
        """Bytes that no character will come of any more."""
        partial, self._partial = self._partial, b""
        return partial.decode("utf-8", "replace")

    def _push_text(self, token_id: int) -> str:
        self._waiting = [*self._waiting, token_id]
        window = self._decode([*self._context, *self._waiting])
        text = window[self._length() :]
        if self._decoder.whole_characters or not text.endswith(REPLACEMENT):
            return self._release(len(self._waiting), text) if text else ""
        return self._release_broken() if len(self._waiting) > _MAX_WAITING else ""

    def _length(self) -> int:
        if self._context_length is None:
            self._context_length = len(self._decode(self._context))
        return self._context_length

    def _release(self, num_ids: int, text: str) -> str:
        self._context, self._waiting = self._waiting[:num_ids], self._waiting[num_ids:]
        self._context_length = None
        return text

    def _release_broken(self) -> str:
        """Let go of the longest head that no later id can change: one that ends a character."""
        decode = self._decode
        whole = decode([*self._context, *self._waiting])
        for num_ids in range(len(self._waiting) - 1, 0, -1):
            head = decode([*self._context, *self._waiting[:num_ids]])
            tail = decode(self._waiting[num_ids:])
            if tail and head + tail == whole:
                return self._release(num_ids, head[self._length() :])
        return ""


class StopMatcher:
    """The text of one sequence, ended before the first stop string that completes in token number
    `min_tokens` or later. `hidden` is the detokenizer's.

    Raises ConfigError for an empty stop string, which would end every text.

    The longest tail that could still become a stop string is held back.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        hidden: frozenset[int] | None = None,
    ) -> None:
        if "" in stops:
            raise ConfigError("stop: an empty string would end every text.")
        self._detokenizer = Detokenizer(decoder, hidden)
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._held: str = ""
        self._pieces: list[str] = []
        self.matched: str | None = None
        """The stop string that ended the text."""
        self._num_read = 0
        self._before = self._mark()

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    @property
    def num_read(self) -> int:
        """Ids kept since the beginning."""
        return self._num_read

    def push(self, ids: Sequence[int]) -> int | None:
        """How many of `ids` to keep if a stop string completes inside them, else None.

        The id that completes it is kept; nothing may be pushed after that.
        """
        if self.stopped:
            raise ContractError("the text has ended at a stop string")
        self._before = self._mark()
        for index, token_id in enumerate(ids):
            self._num_read += 1
            self._pieces.append(self._admit(self._detokenizer.push(token_id)))
            if self.stopped:
                return index + 1
        return None

    def rewind(self) -> None:
        """Forget the last push, whose pieces nobody may have taken."""
        mark, held, num_read = self._before
        num_new = self._num_read - num_read
        if num_new > len(self._pieces):
            raise ContractError("pieces of the last push were taken already")
        self._detokenizer.rewind(mark)
        self._held, self._num_read, self.matched = held, num_read, None
        del self._pieces[len(self._pieces) - num_new :]

    @property
    def is_taken(self) -> bool:
        """Whether nobody has yet to take a piece."""
        return not self._pieces

    def take(self, num: int | None = None) -> tuple[str, ...]:
        """One piece for each of the next `num` ids of those kept; of all without."""
        pieces = tuple(self._pieces[:num])
        del self._pieces[: len(pieces)]
        return pieces

    def finish(self) -> str:
        """Text that was held back; empty after a stop string. Call it once, at the end."""
        if self.stopped:
            return ""
        text = self._admit(self._detokenizer.flush()) + self._held
        self._held = ""
        return text

    def _mark(self) -> tuple[_Mark, str, int]:
        return self._detokenizer.mark(), self._held, self._num_read

    def _admit(self, text: str) -> str:
        """The part of held and new text that is safe to show; notices a stop string. One that was
        whole in what is held already ended before `min_tokens`, so it is over."""
        if not text or not self._stops:
            return text
        num_old = len(self._held)
        text = self._held + text
        if self._num_read >= self._min_tokens:
            ends = ((_first_end(text, stop, num_old), -len(stop), stop) for stop in self._stops)
            end, negative_length, stop = min(ends)
            if end <= len(text):
                self.matched, self._held = stop, ""
                return text[: end + negative_length]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _num_held(self, text: str) -> int:
        """Characters at the end of `text` with which a stop string may begin."""
        return max((_num_begun(text, stop) for stop in self._stops), default=0)


def _num_begun(text: str, stop: str) -> int:
    """Of the longest end of `text` that `stop` begins with. Only where its first character stands
    is looked at: most texts have few such places."""
    start = text.find(stop[0], max(0, len(text) + 1 - len(stop)))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return 0 if start < 0 else len(text) - start


def _first_end(text: str, stop: str, num_old: int) -> int:
    """Where `stop` first ends beyond the first `num_old` characters; past the text if nowhere."""
    start = text.find(stop, max(0, num_old + 1 - len(stop)))
    return len(text) + 1 if start < 0 else start + len(stop)


def pieces_of(decoder: TokenDecoder, ids: Sequence[int]) -> list[str]:
    """The text that each id adds to those before it."""
    text = Detokenizer(decoder)
    pieces = [text.push(token_id) for token_id in ids]
    if pieces:
        pieces[-1] += text.flush()
    return pieces
