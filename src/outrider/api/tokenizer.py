"""Text to token ids and back, exactly as the checkpoint's own files define it.

Wraps the `tokenizers` library. A file is checked before the library reads it (`tokenizer_guard`),
the growth of a text by its chain is bounded, and any error of the library, even a panic, becomes a
CheckpointError. tokenizer.json's post-processor decides whether a text begins with BOS. As in
transformers, the `add_bos_token` that older checkpoints have in tokenizer_config.json is ignored if
there is a tokenizer.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, Unpack, cast

from tokenizers import Tokenizer as Backend

from outrider.api.chat_messages import ChatOptions
from outrider.api.chat_template import ChatTemplates, Rendered
from outrider.api.stream import REPLACEMENT
from outrider.api.tokenizer_guard import NO_GROWTH, Growth, Spelling, check, spelling_of, try_out
from outrider.core.errors import CheckpointError, ConfigError, out_of_memory, reason_of
from outrider.core.fields import num_bytes
from outrider.core.files import FileKind, file_identity, parse_json, read_text
from outrider.core.process import is_interrupt
from outrider.models.checkpoint import CONFIG, GENERATION, Checkpoint, open_checkpoint
from outrider.models.gguf.vocabulary import TURN_ENDS, has_messages
from outrider.models.json_object import token_text

_WORDS, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_DOCUMENTS = (_WORDS, _SETTINGS, _TEMPLATE, GENERATION, CONFIG)
# Most bytes of a text after its chain: sixteen times its bytes, and for a short one this many.
MAX_GROWTH, MAX_GROWN_BYTES = 16, 16 << 20
_PIECE_CHARS = 1024
# Memory that the library needs to encode a text, at least and for each of its bytes.
_FREE_BYTES, _BYTES_PER_BYTE = 1 << 20, 64
# Errors of callers and of the system.
_PASSED_ON = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, OverflowError, TypeError)
_FILE_HINT = "the folder needs tokenizer.json; `outrider models inspect` shows what it holds"


@dataclass(frozen=True, slots=True)
class Difference:
    """One id that two vocabularies read differently; None if one lacks it."""

    token_id: int
    first: str | None
    second: str | None


class Tokenizer:
    """A checkpoint's tokenizer. Immutable once loaded, and thread-safe."""

    def __init__(
        self,
        backend: Backend,
        config: Mapping[str, Any],
        stop_ids: Sequence[int],
        growth: Growth = NO_GROWTH,
        *,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._backend = backend
        self._growth = growth
        self._config = config
        self.stop_ids = tuple(stop_ids)
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load the tokenizer of a folder or GGUF file; the same object again while its files are
        unchanged. Raises CheckpointError for a missing or damaged file."""
        # Links are followed no further: the parts of a GGUF model are found by their names.
        checkpoint = open_checkpoint(path.absolute())
        files = [checkpoint.file(name) or checkpoint.path for name in _DOCUMENTS]
        return _load(checkpoint, tuple(map(file_identity, files)))

    @property
    def path(self) -> Path | None:
        """The folder or GGUF file that it was loaded from."""
        return None if self.checkpoint is None else self.checkpoint.path

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on parts of the checkpoint's tokenizer that are left out."""
        return () if self.checkpoint is None else self.checkpoint.tokenizer_notes

    @property
    def begins_chats(self) -> bool:
        """True if a chat begins with BOS where a text does, as in llama.cpp; the template of a
        folder decides alone, as in transformers."""
        return self.checkpoint is not None and self.checkpoint.is_gguf

    def with_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another chat template. Ends of turns that the template writes end
        texts, if they are tokens of the vocabulary."""
        ends = [text for text in TURN_ENDS if text in source]
        if has_messages(self._backend.get_vocab()):
            ends = [text for text in ends if text != "<|end|>"]
        found = [self._backend.token_to_id(text) for text in ends]
        stop_ids = (*self.stop_ids, *(token_id for token_id in found if token_id is not None))
        config = {**self._config, "chat_template": source}
        return Tokenizer(self._backend, config, stop_ids, self._growth, checkpoint=self.checkpoint)

    def is_of_the_text_of(self, other: Tokenizer) -> bool:
        """True if both were read from one tokenizer.json, and so do not differ at all."""
        return self._backend is other._backend

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text. With `add_special` the checkpoint may put its BOS before the text; text of
        the chat template already has it. Raises ConfigError for text that is not Unicode,
        CheckpointError for text that the tokenizer cannot encode or grows too much."""
        self._check(text)
        with _calling("encode a text"):
            return self._backend.encode(text, add_special_tokens=add_special).ids

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """`encode` of every text, by several threads."""
        for text in texts:
            self._check(text)
        with _calling("encode a text"):
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids. Raises CheckpointError for ids that the tokenizer cannot decode."""
        own = self._spelling.own
        if own.keys().isdisjoint(ids):
            return self._decode(ids, skip_special)
        hidden = self.special_ids if skip_special else frozenset[int]()
        parts = [
            "".join(own[i] for i in run if i not in hidden)
            if is_own
            else self._decode(tuple(run), skip_special)
            for is_own, run in groupby(ids, own.__contains__)
        ]
        return "".join(parts)

    def _decode(self, ids: Sequence[int], skip_special: bool) -> str:
        with _calling("decode tokens"):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def to_json(self) -> str:
        """The contents of an equivalent tokenizer.json."""
        return self._backend.to_str()

    @property
    def whole_characters(self) -> bool:
        """True if an id without bytes of its own decodes to whole characters."""
        return self._spelling.whole

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of an id in any context, if they are known: for every id of byte-level
        vocabularies, and for the one-byte pieces of others. Empty for an unknown id."""
        spelling = self._spelling
        if token_id not in spelling.table:
            token = self._backend.id_to_token(token_id)
            spelling.table[token_id] = b"" if token is None else spelling.read(token)
        return spelling.table[token_id]

    @cached_property
    def _spelling(self) -> Spelling:
        return spelling_of(self._backend)

    @cached_property
    def vocabulary(self) -> dict[int, str]:
        """Every id with its token, added ones included."""
        return {i: token for token, i in self._backend.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def meanings(self) -> Mapping[int, str]:
        """Vocabulary without padding: converters call a row without a token [PAD<id>]."""
        return {
            token_id: token
            for token_id, token in self.vocabulary.items()
            if not token.startswith("[PAD") or token != f"[PAD{token_id}]"
        }

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.vocabulary, default=-1) + 1

    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly when every id means the same token."""
        text = json.dumps(sorted(self.vocabulary.items()), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        return self.templates.source is not None

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of tokenizer_config.json, with the source of the chat template."""
        return self._config

    @cached_property
    def bos_id(self) -> int | None:
        """The id that begins a text, if the checkpoint names one."""
        token = token_text(self._config.get("bos_token"))
        return self._backend.token_to_id(token) if token else None

    def chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> Rendered:
        """The prompt for the next reply. Raises CheckpointError."""
        return self.templates.pick(options.get("tools")).render(messages, **options)

    def _check(self, text: str) -> None:
        """Check the growth of a text. It is measured only if the worst case of the chain is too
        much. Raises MemoryError if too little memory is free."""
        size = num_bytes("the text", text)
        # Without memory, the library ends the process: its need is allocated here first.
        bytearray(_FREE_BYTES + _BYTES_PER_BYTE * size)
        allowed = max(MAX_GROWN_BYTES, MAX_GROWTH * size)
        grown = size * self._growth.normalizing * self._growth.splitting
        if grown <= allowed:
            return
        normalizer = self._backend.normalizer
        grown = 0.0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            with _calling("normalize a text"):
                piece = piece if normalizer is None else normalizer.normalize_str(piece)
            grown += len(piece.encode()) * self._growth.splitting
            if grown > allowed:
                raise CheckpointError(
                    f"the tokenizer makes more than {allowed} bytes of a text of {size}.",
                    hint="its normalizer multiplies texts, which no published one does so much",
                )

    @cached_property
    def templates(self) -> ChatTemplates:
        """The templates that turn messages into text, and describe how output is parsed."""
        return ChatTemplates.of(self._config)


def first_differences(first: Tokenizer, second: Tokenizer, limit: int = 5) -> list[Difference]:
    """The lowest ids that the two read differently; empty if a draft may use either. Padding, which
    no text contains, is no difference."""
    if first.is_of_the_text_of(second):
        return []
    left, right = first.meanings, second.meanings
    found: list[Difference] = []
    for token_id in sorted(left.keys() | right.keys()):
        if left.get(token_id) != right.get(token_id):
            found.append(Difference(token_id, left.get(token_id), right.get(token_id)))
        if len(found) == limit:
            break
    return found


def num_common_ids(tokenizer: Tokenizer, *sizes: int) -> int:
    """Number of first ids that the tokenizer and models of these `sizes` all have."""
    return min(max(tokenizer.meanings, default=-1) + 1, *sizes)


def spellings(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of `words`, at the start of a text and after a space.

    Raises ConfigError for an empty word, which every text contains.
    """
    if "" in words:
        raise ConfigError("bad_words: every text has an empty word.", hint="drop the empty one")
    texts = [text for word in words for text in (word, f" {word}")]
    found = (tuple(tokenizer.encode(text, add_special=False)) for text in texts)
    return tuple(dict.fromkeys(ids for ids in found if ids))


_MAX_LOADED = 8
# Keyed by the digest of the text: target and draft of a family have the same one, in two folders.
_loaded: dict[bytes, tuple[Backend, Growth]] = {}


@lru_cache(maxsize=_MAX_LOADED)
def _load(checkpoint: Checkpoint, identity: tuple[object, ...]) -> Tokenizer:
    """Load a tokenizer. `identity` is part of the key only: an edited file is read again."""
    del identity
    backend, growth = _load_backend(checkpoint)
    config = _read_json(checkpoint, _SETTINGS)
    if checkpoint.has(_TEMPLATE):
        template = _read_text(checkpoint.path / _TEMPLATE, FileKind.TEMPLATE)
        config = {**config, "chat_template": template}
    stop_ids = _stop_ids(checkpoint, backend, config)
    return Tokenizer(backend, config, stop_ids, growth, checkpoint=checkpoint)


def _load_backend(checkpoint: Checkpoint) -> tuple[Backend, Growth]:
    path, file = checkpoint.path / _WORDS, checkpoint.file(_WORDS)
    if not checkpoint.has(_WORDS):
        raise CheckpointError(f"{path}: no such file.", hint=_FILE_HINT)
    try:
        stored = checkpoint.document(_WORDS).values if file is None else None
        text = _read_text(path, FileKind.TOKENIZER) if stored is None else json.dumps(stored)
        digest = hashlib.sha256(text.encode()).digest()
        if (same := _loaded.get(digest)) is not None:
            return same
        growth = check(parse_json(text) if stored is None else stored, str(path))
    except ValueError as error:
        raise CheckpointError(f"{path}: not a tokenizer: {error}", hint=_FILE_HINT) from None
    reason = try_out(growth.patterns)
    if reason is not None:
        raise CheckpointError(f"{path}: not a tokenizer: {reason}.", hint=_FILE_HINT)
    try:
        with _calling("be loaded"):
            backend = Backend.from_str(text)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: not a tokenizer: {error}", hint=_FILE_HINT) from None
    backend.no_truncation()
    backend.no_padding()
    if len(_loaded) == _MAX_LOADED:
        _loaded.clear()
    _loaded[digest] = backend, growth
    return backend, growth


class _calling:  # noqa: N801 - a streamed text enters it for each token: no generator
    """A context in which any exception of the library, which may be Exception itself or a panic,
    becomes a CheckpointError; _PASSED_ON and interrupts do not."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is None or isinstance(error, _PASSED_ON) or is_interrupt(error):
            return
        reason = f"{error}".splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"the tokenizer cannot {self._what}: {reason[0]:.300}",
            hint="is tokenizer.json damaged?",
        ) from None


def _read_text(path: Path, kind: FileKind) -> str:
    try:
        return read_text(path, kind)
    except (OSError, UnicodeDecodeError) as error:
        raise out_of_memory(error, f"reading {path}") or CheckpointError(
            f"{path}: cannot be read: {reason_of(error)}.", hint=_FILE_HINT
        ) from None


def _read_json(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """The object in the document `name`; empty if there is none."""
    return dict(checkpoint.document(name).values) if checkpoint.has(name) else {}


def _stop_ids(
    checkpoint: Checkpoint, backend: Backend, config: Mapping[str, Any]
) -> tuple[int, ...]:
    """Ids that end texts: generation_config's, else config's, else tokenizer_config's."""
    for name in (GENERATION, CONFIG):
        entry: object = _read_json(checkpoint, name).get("eos_token_id")
        entries = cast("list[object]", entry) if isinstance(entry, list) else [entry]
        found = tuple(item for item in entries if isinstance(item, int) and item >= 0)
        if found:
            return found
    token = token_text(config.get("eos_token"))
    end = backend.token_to_id(token) if token else None
    return () if end is None else (end,)


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
    ids: a tokenizer may know more, which are never written.

    Ids go through text, a round at a time (drafter bridge). A draft's ids are extended, never
    recomputed, so a round costs bounded work and a draft model keeps its committed tokens. Special
    tokens that both vocabularies spell alike are translated; other special tokens of the target are
    left out, and other special tokens of the draft end a draft.
    """

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
