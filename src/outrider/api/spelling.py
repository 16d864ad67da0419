"""Bytes of each token, by the parts of a tokenizer's decoder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True)
class Spelling:
    """Bytes of tokens: `read` gives those of a token, None where its text depends on others.
    `whole` says that such a token is no part of a character; `table` has what was asked. `own` are
    added tokens that stand for their own text, where the library reads their letters as bytes."""

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
    """Each character of a byte-level token is a byte; a token with others is its own text."""
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
    return table | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _bytes_by_character()
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_text(data: bytes) -> str:
    """Bytes as byte-level vocabularies write them."""
    return "".join(_CHARACTER_OF[byte] for byte in data)
