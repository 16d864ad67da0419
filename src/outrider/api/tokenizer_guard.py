"""Checks of a tokenizer.json before the `tokenizers` library builds a tokenizer from it.

A tokenizer is a chain of small programs that came with a checkpoint: replacements may multiply a
text until memory is full, and some parameters make the library panic. So only components of real
tokenizers are accepted, with bounds far above real ones, and `Growth` computes how many bytes the
chain can make of one byte of text. Unknown patterns may not nest repetitions, and are tried in the
helper process of the chat template.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tokenizers import Tokenizer as Backend

from outrider.api.chat_template import BASE_OUTPUT_CHARS, Helper, HelperLostError
from outrider.core.errors import CheckpointError
from outrider.models.gguf.splits import PATTERNS, TEKKEN

# Regular expressions of tokenizers: the published ones, and limits of unknown ones.
#
# The library's engine backtracks. A repetition within a repetition, `(a+)+b`, takes exponential
# time and panics after ten million steps, so such a pattern is refused. The remaining unknown
# patterns are polynomial and are tried in a helper process (helper.py); published ones
# need neither.
# Patterns of rules that GGUF files name, and of other published tokenizers.
KNOWN = PATTERNS | {
    r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    # The embedded pair's pattern.
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n+|\s+(?!\S)|\s+",
    # o200k with three digits and without contractions.
    TEKKEN.replace(r"\p{N}|", r"\p{N}{1,3}|"),
    r"(?:\r?\n)+(?!\r?\n)",
    r"\d",
    r"\s+",
    " {2,}",
    " ",
    ".",
}

_TRIAL_CPU_SECONDS = 10.0
MAX_CHARS = 4096
MAX_COUNT = 1000
MAX_DEPTH = 32
# Recursion, conditions, callouts and absence: no tokenizer has them.
_ENDLESS = math.inf
# Includes the mark that makes it lazy or possessive; a brace with other content is text.
_QUANTIFIER = re.compile(
    r"(?:(?P<sign>[?*+])[?+]?"
    r"|\{(?=[\d,]*\d)(?P<least>\d{0,9})(?P<comma>,)?(?P<most>(?<=,)\d{0,9})?\}\??)"
)
_STRANGE = ("?R", "?&", "?P>", "?(", "?{", "?~", "*")


def refusal(pattern: str) -> str | None:
    """Reason for which an unknown pattern may not run; None if it may."""
    if len(pattern) > MAX_CHARS:
        return f"has {len(pattern)} characters, more than {MAX_CHARS}"
    try:
        return _Scanner(pattern).run()
    except IndexError:
        return "ends too early"


def try_out(patterns: Sequence[str]) -> str | None:
    """Reason for which one of the patterns may not run; None if all may. They run in a process of
    their own, since a search cannot be interrupted. Raises MachineError if it does not start."""
    if not patterns:
        return None
    helper = Helper("patterns")
    try:
        request = {"patterns": list(patterns), "seconds": _TRIAL_CPU_SECONDS}
        reply = helper.ask(request, max_bytes=BASE_OUTPUT_CHARS)
    except HelperLostError as problem:
        return f"its patterns take too long: {problem}"
    finally:
        helper.close()
    return reply.get("error")


class _Scanner:
    """Reads a pattern once. For every open group, and last for the pattern, it knows whether it
    contains a repetition of no fixed number, and the largest product of fixed ones."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._groups: list[tuple[bool, int]] = [(False, 1)]

    def run(self) -> str | None:
        while self._at < len(self._pattern):
            reason = self._step()
            if reason is not None:
                return reason
        return None if len(self._groups) == 1 else "leaves a group open"

    def _step(self) -> str | None:
        char = self._pattern[self._at]
        if char == "(":
            return self._open()
        item = (False, 1)
        if char == ")":
            if len(self._groups) == 1:
                return "closes a group that is not open"
            item = self._groups.pop()
            self._at += 1
        elif char == "\\":
            if self._pattern[self._at + 1] in "123456789kgKX":
                return "refers to what was matched before"
            self._at += 2
        elif char == "[":
            self._skip_set()
        else:
            self._at += 1
        return self._repeated(*item)

    def _open(self) -> str | None:
        after = self._pattern[self._at + 1 : self._at + 4]
        if after.startswith(_STRANGE):
            return "has a group of a kind that no tokenizer needs"
        self._groups.append((False, 1))
        # The question mark of a group is no quantifier.
        self._at += 2 if after.startswith("?") else 1
        return "nests groups too deep" if len(self._groups) > MAX_DEPTH else None

    def _skip_set(self) -> None:
        depth = 0
        while True:
            char = self._pattern[self._at]
            self._at += 2 if char == "\\" else 1
            depth += (char == "[") - (char == "]")
            if depth == 0:
                return
            if char == "[":
                self._at += self._pattern.startswith("^", self._at)
                self._at += self._pattern.startswith("]", self._at)

    def _repeated(self, varies: bool, product: int) -> str | None:
        """Read the quantifiers after an item, whose content is known."""
        while (found := self._quantifier()) is not None:
            least, most = found
            if most > 1 and varies:
                return "repeats what repeats"
            varies |= most > max(least, 1)
            product *= max(least, 1 if most is _ENDLESS else int(most))
            if product > MAX_COUNT:
                return f"repeats more than {MAX_COUNT} times"
        outer_varies, outer_product = self._groups[-1]
        self._groups[-1] = outer_varies or varies, max(outer_product, product)
        return None

    def _quantifier(self) -> tuple[int, float] | None:
        """The least and the largest number; None if no quantifier follows."""
        match = _QUANTIFIER.match(self._pattern, self._at)
        if match is None:
            return None
        self._at = match.end()
        if match["sign"]:
            return {"?": (0, 1.0), "*": (0, _ENDLESS), "+": (1, _ENDLESS)}[match["sign"]]
        least = int(match["least"] or 0)
        if match["comma"] is None:
            return least, float(least)
        return least, float(match["most"]) if match["most"] else _ENDLESS


@dataclass(frozen=True, slots=True)
class Spelling:
    """Bytes of tokens: `read` returns those of a token, None if its text depends on others. `whole`
    says that such a token is no part of a character; `table` caches results. `own` are added tokens
    that stand for their own text, while the library reads their letters as bytes."""

    read: Callable[[str], bytes | None]
    whole: bool
    own: Mapping[int, str] = field(default_factory=dict[int, str])
    table: dict[int, bytes | None] = field(default_factory=dict[int, "bytes | None"])


def spelling_of(backend: Backend) -> Spelling:
    """The spelling that the parts of the tokenizer's decoder imply."""
    decoder: Any = backend.decoder
    parts = _decoder_types(json.loads(decoder.__getstate__())) if decoder is not None else []
    if parts == ["ByteLevel"]:
        added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        own = {i: text for i, text in added.items() if _bytes_of(text) != text.encode()}
        known: dict[int, bytes | None] = {i: text.encode() for i, text in own.items()}
        return Spelling(_bytes_of, whole=True, own=own, table=known)
    if "ByteLevel" in parts:
        return Spelling(lambda _: None, whole=False)
    return Spelling(_byte_piece if "ByteFallback" in parts else lambda _: None, whole=True)


def _decoder_types(decoder: Mapping[str, Any]) -> list[str]:
    if decoder["type"] != "Sequence":
        return [decoder["type"]]
    return [name for part in decoder["decoders"] for name in _decoder_types(part)]


def _bytes_of(token: str) -> bytes:
    """Bytes of a byte-level token: one per character; a token with others is its own text."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_piece(token: str) -> bytes | None:
    found = _BYTE_PIECE.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else None


def _bytes_by_character() -> dict[str, int]:
    """GPT-2's table: printable bytes of Latin-1 are themselves, the others follow U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _bytes_by_character()
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


MAX_ID = 1 << 22
MAX_TOKEN_CHARS = 2048
# The lattice of a unigram model tries every prefix at every position; published ones end at 64.
MAX_PIECE_CHARS = 256
MAX_ADDED = 1 << 18
MAX_ADDED_BYTES = 64 << 20
MAX_CONTENT_BYTES = 64
MAX_WORD_CHARS = 1024
MAX_STEPS = 64
MAX_PIECES = 64
MAX_STRIPPED = 16
# Bytes per byte: XLNet's normalizer is at 1,188 with the worst of characters at every step.
MAX_NORMALIZING, MAX_SPLITTING, MAX_DECODING = 2048.0, 64.0, 8.0

# UTF-8 bytes that normal forms make of one: U+FDFA becomes 18 letters, a Hangul syllable three.
_COMPATIBLE, _CANONICAL, _LOWER = 12.0, 3.0, 1.5
_FORMS = {
    "NFKC": _COMPATIBLE,
    "NFKD": _COMPATIBLE,
    "NFC": _CANONICAL,
    "NFD": _CANONICAL,
    "Lowercase": _LOWER,
}
_HINT = "Outrider runs the components of published tokenizers; was the file changed?"

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Growth:
    """The most bytes that each part makes of one byte, and the patterns to try."""

    normalizing: float
    splitting: float
    decoding: float
    patterns: tuple[str, ...]


NO_GROWTH = Growth(1.0, 1.0, 1.0, ())


class _RefusedError(Exception):
    """A part that no published tokenizer has; the message says which."""


def check(loaded: object, where: str) -> Growth:
    """Raises CheckpointError, with `where`, for a part that no published tokenizer has."""
    try:
        data = _entry("the file", loaded)
        patterns: list[str] = []
        normalizing = _chain("normalizer", "normalizers", data, _NORMALIZERS, patterns)
        splitting = _chain("pre_tokenizer", "pretokenizers", data, _PRE_TOKENIZERS, patterns)
        decoding = _chain("decoder", "decoders", data, _DECODERS, patterns)
        _bounded("normalizer makes of a byte", normalizing, MAX_NORMALIZING)
        _bounded("pre_tokenizer makes of a byte", splitting, MAX_SPLITTING)
        _bounded("decoder makes of a byte", decoding, MAX_DECODING)
        _check_post_processor(data.get("post_processor"))
        _check_added(data.get("added_tokens") or [], normalizing)
        _check_model(_entry("model", data.get("model")))
    except _RefusedError as error:
        raise CheckpointError(f"{where}: {error}.", hint=_HINT) from None
    return Growth(normalizing, splitting, decoding, tuple(dict.fromkeys(patterns)))


def _steps(part: str, key: str, loaded: object, depth: int = 0) -> Iterator[tuple[str, Entry]]:
    """Components one after another, with sequences expanded."""
    if loaded is None:
        return
    entry = _entry(part, loaded)
    kind = entry.get("type")
    if kind != "Sequence":
        if not isinstance(kind, str):
            raise _RefusedError(f"{part} has no type")
        yield kind, entry
        return
    if depth == 2:
        raise _RefusedError(f"{part} nests sequences")
    for step in _list(f"{part}: {key}", entry.get(key), MAX_STEPS):
        yield from _steps(part, key, step, depth + 1)


# The most bytes that a part makes of one, or the function that finds it.
_Factor = float | Callable[[Entry, list[str]], float]


def _chain(
    part: str, key: str, data: Entry, known: Mapping[str, _Factor], patterns: list[str]
) -> float:
    """Growth by the steps of a part. A form grows a text only once, until another step changes
    it."""
    growth, taken, count = 1.0, set[float](), 0
    for kind, entry in _steps(part, key, data.get(part)):
        count += 1
        if kind not in known:
            raise _RefusedError(f"{part}: unknown type {kind!r:.60}")
        found = known[kind]
        factor = found(entry, patterns) if callable(found) else found
        if kind in _FORMS:
            if factor in taken:
                continue
            taken |= {factor} if factor < _COMPATIBLE else {_COMPATIBLE, _CANONICAL}
        elif factor > 1:
            taken.clear()
        growth *= factor
    _bounded(f"steps of the {part}", count, MAX_STEPS)
    return growth


def _prepend(entry: Entry, _patterns: list[str]) -> float:
    _text("Prepend: prepend", entry.get("prepend"))
    return 1.0


def _replace(entry: Entry, patterns: list[str]) -> float:
    content = _text("Replace: content", entry.get("content"))
    literal = _pattern("Replace", entry, patterns)
    if literal is None:
        # It may match the empty string, hence everywhere.
        return 1.0 + content
    if not literal:
        raise _RefusedError("Replace: the pattern is empty")
    return max(content / len(literal.encode("utf-8", "replace")), 1.0)


def _precompiled(entry: Entry, _patterns: list[str]) -> float:
    """The length of the longest of its texts, each of which replaces a byte or more."""
    charsmap = entry.get("precompiled_charsmap") or ""
    try:
        blob = base64.b64decode(charsmap, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise _RefusedError("Precompiled: the map is not base64") from None
    size = int.from_bytes(blob[:4], "little")
    if blob and (len(blob) < 4 + size or size % 4 or not blob.endswith(b"\0")):
        raise _RefusedError("Precompiled: the map is cut off")
    longest = max(map(len, blob[4 + size :].split(b"\0")))
    _bounded("bytes of a text in Precompiled", longest, MAX_CONTENT_BYTES)
    return max(float(longest), 1.0)


def _split(entry: Entry, patterns: list[str]) -> float:
    _pattern("Split", entry, patterns)
    return 1.0


def _byte_level(entry: Entry, _patterns: list[str]) -> float:
    return 4.0 if entry.get("add_prefix_space") else 2.0


def _metaspace(entry: Entry, _patterns: list[str]) -> float:
    # One for a space, and one before every part.
    return 2.0 * max(_text("Metaspace: replacement", entry.get("replacement"), 4), 1)


def _strip(entry: Entry, _patterns: list[str]) -> float:
    _text("Strip: content", entry.get("content"), 4)
    for name in ("start", "stop"):
        _integer(f"Strip: {name}", entry.get(name), MAX_STRIPPED)
    return 1.0


def _bpe_end(entry: Entry, _patterns: list[str]) -> float:
    # An empty suffix matches everywhere.
    return 1.0 if _text("BPEDecoder: suffix", entry.get("suffix", "")) else 2.0


def _word_piece(entry: Entry, _patterns: list[str]) -> float:
    _text("WordPiece: prefix", entry.get("prefix", "##"))
    return 2.0


_NORMALIZERS: Mapping[str, _Factor] = {
    **_FORMS,
    # Spaces around Chinese characters, three bytes each; then accents apart and lower case.
    "BertNormalizer": 5 / 3 * _CANONICAL * _LOWER,
    "ByteLevel": 2.0,
    "Precompiled": _precompiled,
    "Prepend": _prepend,
    "Replace": _replace,
    **dict.fromkeys(("Nmt", "Strip", "StripAccents"), 1.0),
}
_PRE_TOKENIZERS: Mapping[str, _Factor] = {
    "ByteLevel": _byte_level,
    "Metaspace": _metaspace,
    "Split": _split,
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "Punctuation"), 1.0),
    **dict.fromkeys(("UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1.0),
}
_DECODERS: Mapping[str, _Factor] = {
    "BPEDecoder": _bpe_end,
    "ByteLevel": 2.0,
    "Replace": _replace,
    "Strip": _strip,
    "WordPiece": _word_piece,
    **dict.fromkeys(("ByteFallback", "Fuse", "Metaspace"), 1.0),
}


def _pattern(part: str, entry: Entry, patterns: list[str]) -> str | None:
    """A literal pattern; None for a regular expression, which joins `patterns` if it is unknown."""
    found = _entry(f"{part}: pattern", entry.get("pattern"))
    if len(found) != 1 or not found.keys() <= {"String", "Regex"}:
        raise _RefusedError(f"{part}: the pattern is neither a string nor a regular expression")
    (kind, text) = next(iter(found.items()))
    if not isinstance(text, str):
        raise _RefusedError(f"{part}: the pattern is no text")
    if kind == "String":
        return text
    if text not in KNOWN:
        reason = refusal(text)
        if reason is not None:
            raise _RefusedError(f"{part}: the pattern {text!r:.60} {reason}")
        patterns.append(text)
    return None


def _check_post_processor(loaded: object) -> None:
    count = 0
    for kind, entry in _steps("post_processor", "processors", loaded):
        count += 1
        if kind == "TemplateProcessing":
            for name in ("single", "pair"):
                _check_template(name, entry.get(name))
            _check_specials(entry.get("special_tokens"))
        elif kind in ("BertProcessing", "RobertaProcessing"):
            for name in ("sep", "cls"):
                pair = _list(f"{kind}: {name}", entry.get(name), 2)
                _integer(f"{kind}: {name}", pair[-1] if pair else None, MAX_ID)
        elif kind != "ByteLevel":
            raise _RefusedError(f"post_processor: unknown type {kind!r:.60}")
    _bounded("steps of the post_processor", count, MAX_STEPS)


def _check_template(name: str, loaded: object) -> None:
    """Check that a text occurs once: twice, in a few processors, would multiply it."""
    texts: list[object] = []
    for piece in _list(f"TemplateProcessing: {name}", loaded or [], MAX_PIECES):
        found = _entry("TemplateProcessing: a piece", piece)
        if len(found) != 1 or not found.keys() <= {"Sequence", "SpecialToken"}:
            raise _RefusedError("TemplateProcessing: a piece of unknown kind")
        if "Sequence" in found:
            texts.append(_entry("TemplateProcessing: a piece", found["Sequence"]).get("id"))
    if len(texts) != len(set(map(str, texts))):
        raise _RefusedError(f"TemplateProcessing: {name} has a text twice")


def _check_specials(loaded: object) -> None:
    for special in _entry("TemplateProcessing: special_tokens", loaded or {}).values():
        ids = _entry("TemplateProcessing: a special token", special).get("ids")
        for token_id in _list("TemplateProcessing: ids", ids, MAX_PIECES):
            _integer("TemplateProcessing: an id", token_id, MAX_ID)


def _check_added(loaded: object, growth: float) -> None:
    total = 0
    for added in _list("added_tokens", loaded, MAX_ADDED):
        entry = _entry("added_tokens", added)
        _integer("added_tokens: id", entry.get("id"), MAX_ID)
        total += _text("added_tokens: content", entry.get("content"), 4 * MAX_TOKEN_CHARS)
    _bounded("bytes of added tokens", total * growth, MAX_ADDED_BYTES)


def _check_model(model: Entry) -> None:
    """Check a model. Files of 2020 lack the type; the same checks fit all types."""
    kind = model.get("type", "BPE")
    if kind not in ("BPE", "WordPiece", "WordLevel", "Unigram"):
        raise _RefusedError(f"model: unknown type {kind!r:.60}")
    vocabulary: Any = model.get("vocab")
    if isinstance(vocabulary, dict):
        ids = cast("dict[str, object]", vocabulary)
        _bounded("characters of a token", max(map(len, ids), default=0), MAX_TOKEN_CHARS)
        if not set(map(type, ids.values())) <= {int}:
            raise _RefusedError("model: an id is no integer")
        numbers = cast("dict[str, int]", ids).values()
        _integer("model: an id", max(numbers, default=0), MAX_ID)
        _integer("model: an id", min(numbers, default=0), MAX_ID)
    else:
        pieces = [_list("model: vocab", piece, 2) for piece in _list("model", vocabulary, MAX_ID)]
        texts = [str(piece[0]) if piece else "" for piece in pieces]
        _bounded("characters of a piece", max(map(len, texts), default=0), MAX_PIECE_CHARS)
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        _text(f"model: {name}", model.get(name) or "")
    if model.get("dropout"):
        raise _RefusedError("model: dropout makes other tokens of the same text every time")
    most = model.get("max_input_chars_per_word")
    _integer("model: max_input_chars_per_word", most or 0, MAX_WORD_CHARS)


def _entry(part: str, loaded: object) -> Entry:
    if not isinstance(loaded, dict):
        raise _RefusedError(f"{part} must be an object")
    return cast("Entry", loaded)


def _list(part: str, loaded: object, most: int) -> list[Any]:
    if not isinstance(loaded, list):
        raise _RefusedError(f"{part} must be a list")
    found = cast("list[Any]", loaded)
    _bounded(f"entries of {part}", len(found), most)
    return found


def _text(part: str, loaded: object, most: int = MAX_CONTENT_BYTES) -> int:
    """The length of a text in bytes."""
    if not isinstance(loaded, str):
        raise _RefusedError(f"{part} must be a text")
    size = len(loaded.encode("utf-8", "replace"))
    _bounded(f"bytes of {part}", size, most)
    return size


def _integer(part: str, loaded: object, most: int) -> None:
    if isinstance(loaded, bool) or not isinstance(loaded, int) or not 0 <= loaded <= most:
        raise _RefusedError(f"{part} must be an integer from 0 to {most}, got {loaded!r:.40}")


def _bounded(what: str, value: float, most: float) -> None:
    if value > most:
        raise _RefusedError(f"{value:,.0f} {what}, more than {most:,.0f}")
