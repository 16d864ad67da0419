"""Streaming detokenizer and stop strings: token ids become text as they arrive.

`Detokenizer` never shows an incomplete character; `StopMatcher` never shows text of a stop string.
Text and verdict do not depend on the grouping of ids into pushes.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from itertools import groupby
from operator import itemgetter
from typing import Protocol, TypeAlias

from outrider.core.draft import Origin
from outrider.core.errors import ConfigError, ContractError

REPLACEMENT = "\ufffd"
_MAX_WAITING = 6


class TokenDecoder(Protocol):
    """Methods of a tokenizer that streaming needs."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def whole_characters(self) -> bool:
        """True if an id without bytes of its own stands for whole characters."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of an id in any context, if they are known."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


# State of a detokenizer: its context, the context's length, waiting ids, and a character's bytes.
_Mark: TypeAlias = tuple[list[int], int | None, list[int], bytes]


class Detokenizer:
    """Streaming detokenizer with amortised constant work per id. Special tokens have no text; with
    `hidden` only these have none.

    The tokenizer reports the bytes of an id if it can: for every id of byte-level vocabularies, and
    for the pieces `<0x00>` to `<0xFF>` of vocabularies that fall back to bytes. Only bytes that may
    still become a character wait: a U+FFFD that was written is shown like any other character.

    Other ids are decoded in a short window: the ids of the last text as context, then the new id.
    Context matters because sentencepiece decoders drop the space of a first word. If a decoder
    mixes bytes into more than single ids, a replacement character at the end of a window means that
    bytes may be missing, so the text waits. A character has at most four bytes and a token at least
    one, so text that waits longer is broken and is released.
    """

    def __init__(self, decoder: TokenDecoder, hidden: frozenset[int] | None = None) -> None:
        self._decoder = decoder
        self._hidden = decoder.special_ids if hidden is None else hidden
        everything = partial(decoder.decode, skip_special=False)
        self._decode = decoder.decode if hidden is None else everything
        self._context: list[int] = []
        # Characters that the context decodes to; None if not yet computed.
        self._context_length: int | None = 0
        self._waiting: list[int] = []
        # Bytes of an incomplete character.
        self._partial = b""

    def push(self, token_id: int) -> str:
        """The text that this id completes; often its own, empty within a character."""
        if token_id in self._hidden:
            return ""
        data = self._decoder.token_bytes(token_id)
        if data is None:
            return self._broken() + self._push_text(token_id)
        text, num_read = utf_8_decode(self._partial + data, "replace", False)
        self._partial = (self._partial + data)[num_read:]
        # Text that waited before bytes is a first word's space, which has no text.
        self._context, self._context_length, self._waiting = [token_id], None, []
        return text

    def mark(self) -> _Mark:
        """The present state, for `rewind`; its lists are never changed."""
        return self._context, self._context_length, self._waiting, self._partial

    def rewind(self, mark: _Mark) -> None:
        """Return to the state `mark`."""
        self._context, self._context_length, self._waiting, self._partial = mark

    def flush(self) -> str:
        """Waiting text as it is: broken bytes become replacement characters."""
        text = self._broken()
        if not self._waiting:
            return text
        window = self._decode([*self._context, *self._waiting])
        return text + self._release(len(self._waiting), window[self._length() :])

    def _broken(self) -> str:
        """Text of bytes that can no longer become a character."""
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
        """Release the longest head that no later id can change: one that ends a character."""
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
        """Number of accepted ids since the beginning."""
        return self._num_read

    def push(self, ids: Sequence[int]) -> int | None:
        """Read ids. Returns how many of them to keep if a stop string completes within them, else
        None.

        The id that completes it is kept; no ids may be pushed after that.
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
        """Undo the last push, whose pieces must not have been taken."""
        mark, held, num_read = self._before
        num_new = self._num_read - num_read
        if num_new > len(self._pieces):
            raise ContractError("pieces of the last push were taken already")
        self._detokenizer.rewind(mark)
        self._held, self._num_read, self.matched = held, num_read, None
        del self._pieces[len(self._pieces) - num_new :]

    @property
    def is_taken(self) -> bool:
        """True if no piece waits to be taken."""
        return not self._pieces

    def take(self, num: int | None = None) -> tuple[str, ...]:
        """One piece for each of the next `num` kept ids; for all of them without `num`."""
        pieces = tuple(self._pieces[:num])
        del self._pieces[: len(pieces)]
        return pieces

    def finish(self) -> str:
        """Withheld text; empty after a stop string. Call it once, at the end."""
        if self.stopped:
            return ""
        text = self._admit(self._detokenizer.flush()) + self._held
        self._held = ""
        return text

    def _mark(self) -> tuple[_Mark, str, int]:
        return self._detokenizer.mark(), self._held, self._num_read

    def _admit(self, text: str) -> str:
        """The part of withheld and new text that is safe to show; finds a stop string. A stop
        string that was complete in withheld text came before `min_tokens`, so it does not count."""
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
        # The characters at the end with which a stop string may begin.
        num_held = max((_num_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _num_begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with. Only occurrences of its first
    character are tested: most texts have few."""
    start = text.find(stop[0], max(0, len(text) + 1 - len(stop)))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return 0 if start < 0 else len(text) - start


def _first_end(text: str, stop: str, num_old: int) -> int:
    """End of the first `stop` that ends after `num_old` characters; past the text if none does."""
    start = text.find(stop, max(0, num_old + 1 - len(stop)))
    return len(text) + 1 if start < 0 else start + len(stop)


def pieces_of(decoder: TokenDecoder, ids: Sequence[int]) -> list[str]:
    """The text that each id adds to those before it."""
    text = Detokenizer(decoder)
    pieces = [text.push(token_id) for token_id in ids]
    if pieces:
        pieces[-1] += text.flush()
    return pieces


Run: TypeAlias = tuple[Origin, str]
# Colours of runs in a notebook, light or dark: those of rounds.css, the background translucent.
TINTS: Mapping[Origin, str] = {"accepted": "#2da44e", "recovered": "#e16f24", "bonus": "#8957e5"}


def runs_of(pieces: Sequence[str], origins: Sequence[Origin]) -> tuple[Run, ...]:
    """Pieces of tokens of one origin, joined. Text after the last token belongs to that token."""
    last = origins[-1] if origins else "plain"
    whole = [*origins[: len(pieces)], *(last for _ in pieces[len(origins) :])]
    pairs = (pair for pair in zip(whole, pieces, strict=True) if pair[1])
    grouped = groupby(pairs, key=itemgetter(0))
    return tuple((origin, "".join(piece for _, piece in run)) for origin, run in grouped)


def html_of(run: Run) -> str:
    """A run in HTML, with the colour of its origin."""
    origin, text = run
    if origin not in TINTS:
        return escape(text)
    style = f"background: {TINTS[origin]}2e; border-bottom: 2px solid {TINTS[origin]}"
    return f'<span title="{origin}" style="{style}">{escape(text)}</span>'
