"""Regular expressions of tokenizers: the published ones, and limits of unknown ones.

The library's engine backtracks. A repetition within a repetition, `(a+)+b`, takes exponential time
and panics after ten million steps, so such a pattern is refused. The remaining unknown patterns are
polynomial and are tried in a helper process (template_helper.py); published ones need neither.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer as Backend

from outrider.api.chat_template import BASE_OUTPUT_CHARS, Helper, HelperLostError
from outrider.models.gguf.splits import PATTERNS, TEKKEN

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

_TRIAL_SECONDS = 20.0
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
    helper = Helper("template_helper.py", "patterns")
    try:
        request = {"patterns": list(patterns)}
        reply = helper.ask(request, max_bytes=BASE_OUTPUT_CHARS, seconds=_TRIAL_SECONDS)
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
        own = {i: text for i, text in added.items() if _byte_level(text) != text.encode()}
        known: dict[int, bytes | None] = {i: text.encode() for i, text in own.items()}
        return Spelling(_byte_level, whole=True, own=own, table=known)
    if "ByteLevel" in parts:
        return Spelling(lambda _: None, whole=False)
    return Spelling(_byte_piece if "ByteFallback" in parts else lambda _: None, whole=True)


def _decoder_types(decoder: Mapping[str, Any]) -> list[str]:
    if decoder["type"] != "Sequence":
        return [decoder["type"]]
    return [name for part in decoder["decoders"] for name in _decoder_types(part)]


def _byte_level(token: str) -> bytes:
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
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_text(data: bytes) -> str:
    """Bytes as byte-level vocabularies write them."""
    return "".join(_CHARACTER_OF[byte] for byte in data)
