"""Grammars over a model's vocabulary, by llguidance: the allowed tokens at every draft node.

Each request has a parser at the end of its text. For a draft it goes down the tree node by node and
back up again, so a node costs one token read and one mask, for a text of any length.

Shapes:  N = nodes, V = vocabulary, B = bytes of a mask of V bits.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import import_module
from itertools import takewhile
from threading import Lock
from time import thread_time
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from outrider.api.chat_template import Helper, HelperLostError
from outrider.api.output import ProcessGauge
from outrider.api.structure import StructureOptions, chosen, grammar_text
from outrider.api.tokenizer import Tokenizer
from outrider.core.draft import common_prefix
from outrider.core.errors import (
    CheckpointError,
    ConfigError,
    MachineError,
    out_of_memory,
    require_spare,
    words_of,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
# Limits of a parser: on reading a grammar about 20 ms, on one token about 15 ms, and on states
# some 40 MB.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
# The library counts no steps of some kinds of reading: processor time is bounded as well, and wall
# time where the processor has much else to do.
_READING_SECONDS = 0.25
# Most bytes of stored grammars; the least memory that a byte of a grammar is assumed to take (freed
# memory is used again, so growth reports too little); and the number of remembered refusals.
_KEPT_BYTES, _BYTES_PER_BYTE, _NUM_REFUSED = 64 << 20, 300, 256
# Address space that the library takes while it reads a vocabulary.
_VOCABULARY_BYTES, _TOKEN_BYTES = 64 << 20, 1 << 10
_JSON = ("schema", "json")
_HINTS = {
    "schema": "docs/structured.md lists what a schema may use",
    "oneOf": "use anyOf, or give each object a required property that is a const of its own",
    "json": "docs/structured.md",
    "regex": "regexes have no look-around and no back-references; [0-9]{3} is three digits",
    "choices": "give texts of ordinary characters",
    "grammar": 'Lark begins with a rule `start: "yes" | "no"`, GBNF with `root ::= "yes" | "no"`',
}

# The library's messages in our words: callers cannot set its options, and do not know its parts.
_WORDS = {
    "oneOf": "alternatives of oneOf may overlap",
    "circular references": "a schema refers to itself within oneOf, or next to other keywords",
    "NoExtension": "no text fits it, or a rule of it leads back to itself at once",
}


class Grammars:
    """Grammars of one vocabulary, thread-safe. The library is imported, and the vocabulary read, at
    first use; the newest grammars are stored, up to a limit of memory."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, stop_ids
        self._lock = Lock()
        # For JSON and for the rest: the sets of tokens that are masked together differ.
        self._vocabularies: dict[bool, LLTokenizer] = {}
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._kept_bytes = 0
        self._helper = Helper("grammars")
        self._refused: OrderedDict[bytes, tuple[str, str | None]] = OrderedDict()

    def of(self, options: StructureOptions, *, tried: bool = False) -> Grammar | None:
        """The grammar that `options` request; None if they request none. With `tried` it is first
        read in a process that can be ended, since other requests wait for it. Raises ConfigError
        for an invalid grammar, or one that is too large."""
        name = chosen(options)
        if name is None:
            return None
        try:
            import_module("llguidance")
        except ImportError as error:
            if (ended := out_of_memory(error, "loading llguidance")) is not None:
                raise ended from error
            raise MachineError(
                f"structured output needs the package llguidance: {words_of(error)}.",
                hint="pip install llguidance",
            ) from None
        try:
            return self._made(name, options, tried=tried)
        except ConfigError as error:
            raise self._of_a_part(error, options, tried=tried) from None

    def _made(self, name: str, options: StructureOptions, *, tried: bool) -> Grammar:
        text, notes = grammar_text(name, options)
        with self._lock:
            found = self._kept.pop(text, None)
            if found is None:
                found = self._read(name, text, tried=tried)
                self._kept_bytes += found.held_bytes
            self._kept[text] = found
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].held_bytes
        # The library's notes do not say which part they belong to.
        called = _source_of(options) or name
        notes += tuple(f"{called}: {note}" for note in found.notes)
        return replace(found, notes=notes) if notes else found

    def _of_a_part(
        self, error: ConfigError, options: StructureOptions, *, tried: bool
    ) -> ConfigError:
        """The error under the name of the part at fault, for a grammar that the caller did not
        write; under the parameter that has all parts, if no single part is at fault."""
        parts = options.get("parts", {})
        for strict in (False, True):
            for name, schema in parts.items():
                try:
                    self._made("schema", {"schema": schema, "strict": strict}, tried=tried)
                except ConfigError as found:
                    return _renamed(found, name)
        return _renamed(error, _source_of(options)) if parts else error

    def _read(self, name: str, text: str, *, tried: bool) -> Grammar:
        """Compile a grammar. A refused one is remembered."""
        digest = sha256(text.encode("utf-8", "surrogatepass")).digest()
        if digest in self._refused:
            message, hint = self._refused[digest]
            raise ConfigError(message, hint=hint)
        try:
            if tried:
                self._try(name, text)
            return self._compiled(name, text)
        except ConfigError as error:
            self._refused[digest] = str(error), error.hint
            if len(self._refused) > _NUM_REFUSED:
                self._refused.popitem(last=False)
            raise

    def _try(self, name: str, text: str) -> None:
        """Raises ConfigError if reading it takes too much."""
        request = {"grammar": text, "limits": _LIMITS, "seconds": _READING_SECONDS}
        try:
            reply = self._helper.ask(request, max_bytes=0)
        except HelperLostError:
            raise _too_slow(name) from None
        if "ends" in reply:
            self._helper.close()
            raise _too_slow(name)

    def _compiled(self, name: str, text: str) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        if not self._stop_ids:
            raise ConfigError(
                f"{name}: this model has no token that ends a text, so a structure has no end.",
                hint="use a checkpoint whose generation_config.json names an eos_token_id",
            )
        limits = LLParserLimits(**_LIMITS)
        vocabulary, gauge = self._vocabulary(name in _JSON), ProcessGauge()
        before, started = gauge.now(), thread_time()
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
        # The first mask shows whether the grammar's first token already takes too much.
        num_bytes = 0 if matcher.is_error() else len(matcher.compute_bitmask())
        if matcher.is_error():
            reason = _in_our_words(matcher.get_error())
            hint = _HINTS["oneOf" if "oneOf" in reason else name]
            raise ConfigError(f"{name}: it cannot be followed: {reason}.", hint=hint)
        if thread_time() - started > _READING_SECONDS:
            raise _too_slow(name)
        held = max(gauge.now() - before, _BYTES_PER_BYTE * len(text))
        notes = tuple(map(_in_our_words, matcher.get_grammar_warnings()))
        return Grammar(name, matcher, self._vocab_size, num_bytes, held, notes)

    def _vocabulary(self, is_json: bool) -> LLTokenizer:
        """The vocabulary, padded to the model's: ids without a token are never allowed."""
        from llguidance import LLTokenizer

        slices = LLTokenizer.json_slices() if is_json else LLTokenizer.general_slices()
        if is_json in self._vocabularies:
            return self._vocabularies[is_json]
        require_spare(_VOCABULARY_BYTES + _TOKEN_BYTES * self._vocab_size)
        try:
            made = LLTokenizer(
                self._tokenizer.to_json(),
                n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                eos_token=sorted(self._stop_ids),
                slices=slices,
            )
        except ValueError as error:
            raise CheckpointError(
                f"structured output cannot use this tokenizer: {_in_short(words_of(error))}.",
                hint="give `allowed=`, a function that masks the vocabulary, instead",
            ) from None
        self._vocabularies[is_json] = made
        return made


def _source_of(options: StructureOptions) -> str:
    """The parameter that contains the parts of a grammar; empty if there is none."""
    return re.split(r"[\[:]", next(iter(options.get("parts", ())), ""))[0]


def _renamed(error: ConfigError, name: str) -> ConfigError:
    """The error with `name` instead of the option that the message begins with."""
    _, _, reason = str(error).partition(": ")
    return ConfigError(f"{name}: {reason}", hint=_HINTS["schema"])


def _too_slow(name: str) -> ConfigError:
    return ConfigError(
        f"{name}: reading it takes more than {_READING_SECONDS:g} s of processor time.",
        hint="a simpler one: fewer alternatives, and smaller counts of repetition",
    )


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar; `matcher` stands at its beginning and is only ever copied. `held_bytes`
    is the growth of the process, and `notes` list requested parts that the grammar leaves out."""

    name: str
    matcher: LLMatcher
    vocab_size: int
    num_bytes: int
    held_bytes: int
    notes: tuple[str, ...] = ()

    def start(self) -> GrammarConstraint:
        """A constraint for one request."""
        return GrammarConstraint(self)


class GrammarConstraint:
    """A TokenConstraint. The parser stands after `_path`, of which it has read `_num_read` tokens:
    all of them, or those before the first one that the grammar refuses.

    `_path` is the committed text, up to `_start`, and then the path to the last visited draft node.
    Masks of nodes are stored until the text grows, so that a node is visited once for its draft and
    for its verification.
    """

    knows_forced = True

    def __init__(self, grammar: Grammar) -> None:
        self._name, self._vocab_size = grammar.name, grammar.vocab_size
        self._matcher = grammar.matcher.deep_copy()
        self._path: list[int] = []
        self._start = self._num_read = 0
        self._ended_B: Bits = np.zeros(grammar.num_bytes, dtype=np.uint8)
        self._known: dict[tuple[int, ...], Bits] = {}

    def masks(
        self, text: Sequence[int], suffixes: Sequence[Sequence[int]], vocab_size: int
    ) -> Tensor:
        """Raises ConfigError if the grammar takes too much to follow."""
        self._commit(text)
        asked = [tuple(suffix) for suffix in suffixes]
        # In this order each path shares the longest beginning with the one before.
        for suffix in sorted(set(asked) - self._known.keys()):
            self._known[suffix] = self._mask(suffix)
        bits_NB = np.stack([self._known[suffix] for suffix in asked])
        bits_NV = np.unpackbits(bits_NB, axis=1, count=vocab_size, bitorder="little")
        masks_NV: Tensor = torch.from_numpy(bits_NV)  # pyright: ignore[reportUnknownMemberType]
        return masks_NV.view(torch.bool)

    def forced(self, text: Sequence[int], most: int) -> Sequence[int]:
        """The following characters while the grammar leaves no choice, in the tokens that the
        tokenizer would choose for them."""
        self._commit(text)
        if not self._goes_to(()):
            return ()
        found = self._matcher.compute_ff_tokens()[:most]
        self._check()
        # A tokenizer may know more ids than its model.
        return list(takewhile(lambda token: token < self._vocab_size, found))

    def is_idle(self, text: Sequence[int]) -> bool:
        del text
        return False

    def _commit(self, text: Sequence[int]) -> None:
        start = self._start
        if list(text[:start]) != self._path[:start]:
            start = 0
        if start == len(text) == self._start:
            return
        self._known.clear()
        self._start = start
        self._goes_to(text[start:])
        self._start = len(text)

    def _mask(self, suffix: tuple[int, ...]) -> Bits:
        if not self._goes_to(suffix):
            return self._ended_B
        found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return found

    def _goes_to(self, suffix: Sequence[int]) -> bool:
        """Put the parser after this path below the text. True if the grammar has such a text."""
        shared = self._start + common_prefix(self._path[self._start :], suffix)
        if self._num_read > shared:
            self._matcher.rollback(self._num_read - shared)
            self._num_read = shared
        more = list(suffix[shared - self._start :])
        if more and self._num_read == shared:
            self._num_read += self._matcher.try_consume_tokens(more)
            self._check()
        self._path[shared:] = more
        return self._num_read == len(self._path)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _in_short(self._matcher.get_error())
            raise ConfigError(
                f"{self._name}: it has become too much to follow: {reason}.",
                hint="a simpler one: fewer alternatives, and smaller counts of repetition",
            )


def _in_our_words(message: str) -> str:
    short = _in_short(message)
    return next((ours for theirs, ours in _WORDS.items() if theirs in short), short)


def _in_short(message: str) -> str:
    """The first lines of a message of the library, without details for its developers."""
    words = message.replace("<non-verbose/>", "").partition("<backtrace>")[0]
    lines = [line.strip() for line in words.splitlines()]
    # Without the excerpt, which shows a generated grammar around the given text.
    lines = [line for line in lines if line and not re.match(r"\d+ \| |\^+$", line)]
    if errors := [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]:
        found, *_ = lines[0].partition(" (in regex)")
        lines = [re.sub(r"^at \d+\(\d+\): ", "", f"{found}:"), *errors]
    return " ".join(lines)[:300].rstrip(".: ")
