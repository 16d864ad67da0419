"""Token ids to text while they arrive: no half characters, and no text of a stop string.

`Detokenizer` decodes a short window: the ids of the last complete text as context, then what came
since. Context matters because decoders of the sentencepiece kind drop the space of a first word.
A replacement character at the end means that bytes are missing, so text waits for them; a token
has at least one byte and a character at most four, hence whatever waits longer is broken and is
let go.

`StopMatcher` holds back the longest tail that could still become a stop string. Text and verdict
do not depend on how ids are grouped into pushes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.core.errors import ConfigError

REPLACEMENT = "\ufffd"
_MAX_WAITING = 6


class Decoder(Protocol):
    """What a tokenizer must offer to be streamed."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class _Mark:
    """The state of a detokenizer."""

    context: tuple[int, ...]
    context_length: int
    waiting: tuple[int, ...]


class Detokenizer:
    """Amortised constant work per id. Special tokens have no text."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._context: list[int] = []
        self._context_length = 0
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this id completes; often its own, empty in the middle of a character."""
        if token_id in self._decoder.special_ids:
            return ""
        self._waiting.append(token_id)
        window = self._decoder.decode([*self._context, *self._waiting])
        text = window[self._context_length :]
        if not text.endswith(REPLACEMENT):
            return self._release(len(self._waiting), text) if text else ""
        return self._release_broken() if len(self._waiting) > _MAX_WAITING else ""

    def mark(self) -> _Mark:
        """Where it is now, for `rewind`."""
        return _Mark(tuple(self._context), self._context_length, tuple(self._waiting))

    def rewind(self, mark: _Mark) -> None:
        """Be again where it was at `mark`."""
        self._context, self._waiting = list(mark.context), list(mark.waiting)
        self._context_length = mark.context_length

    def flush(self) -> str:
        """What still waits, as it is: broken bytes become replacement characters."""
        window = self._decoder.decode([*self._context, *self._waiting])
        return self._release(len(self._waiting), window[self._context_length :])

    def _release(self, num_ids: int, text: str) -> str:
        if num_ids:
            self._context, self._waiting = self._waiting[:num_ids], self._waiting[num_ids:]
            self._context_length = len(self._decoder.decode(self._context))
        return text

    def _release_broken(self) -> str:
        """Let go of the longest head that no later id can change: one that ends a character."""
        decode = self._decoder.decode
        whole = decode([*self._context, *self._waiting])
        for num_ids in range(len(self._waiting) - 1, 0, -1):
            head = decode([*self._context, *self._waiting[:num_ids]])
            tail = decode(self._waiting[num_ids:])
            if tail and head + tail == whole:
                return self._release(num_ids, head[self._context_length :])
        return ""


@dataclass(frozen=True, slots=True)
class _Reading:
    """The state of a stop matcher that has not stopped."""

    detokenizer: _Mark
    held: str
    num_read: int


class StopMatcher:
    """The text of one sequence, ended before the first stop string that completes in token number
    `min_tokens` or later.

    Raises ConfigError for an empty stop string, which would end every text.
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        if "" in stops:
            raise ConfigError("stop: an empty string would end every text.")
        self._detokenizer = Detokenizer(decoder)
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._held: str = ""
        self._pieces: list[str] = []
        self._stopped = False
        self._num_read = 0
        self._before = self._mark()

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def num_read(self) -> int:
        """Ids kept since the beginning."""
        return self._num_read

    def push(self, ids: Sequence[int]) -> int | None:
        """How many of `ids` to keep if a stop string completes inside them, else None.

        The id that completes it is kept; nothing may be pushed after that.
        """
        assert not self._stopped
        self._before = self._mark()
        for index, token_id in enumerate(ids):
            self._num_read += 1
            self._pieces.append(self._admit(self._detokenizer.push(token_id)))
            if self._stopped:
                return index + 1
        return None

    def rewind(self) -> None:
        """Forget the last push, whose pieces nobody may have taken."""
        num_new = self._num_read - self._before.num_read
        assert num_new <= len(self._pieces)
        self._detokenizer.rewind(self._before.detokenizer)
        self._held = self._before.held
        self._stopped = False
        del self._pieces[len(self._pieces) - num_new :]
        self._num_read = self._before.num_read

    def take(self) -> tuple[str, ...]:
        """One piece for each id kept since the last call."""
        pieces, self._pieces = tuple(self._pieces), []
        return pieces

    def finish(self) -> str:
        """Text that was held back; empty after a stop string. Call it once, at the end."""
        if self._stopped:
            return ""
        text = self._admit(self._detokenizer.flush()) + self._held
        self._held = ""
        return text

    def _mark(self) -> _Reading:
        return _Reading(self._detokenizer.mark(), self._held, self._num_read)

    def _admit(self, text: str) -> str:
        """The part of held and new text that is safe to show; notices a stop string."""
        if not text or not self._stops:
            return text
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if found and self._num_read >= self._min_tokens:
            end, negative_length = min(found)
            self._stopped, self._held = True, ""
            return text[: end + negative_length]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _num_held(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
