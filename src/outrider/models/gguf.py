"""GGUF, version 3: the file format of llama.cpp, as its specification describes it.

A file is a header, metadata (keys with typed values), a list of tensors (name, sizes, type, place)
and then their bytes, each tensor at a multiple of 32. Numbers are little-endian, a text is its
length and its UTF-8. Sizes are listed innermost first, so a matrix of O rows and I columns is
(I, O).

The package `gguf` of the llama.cpp project writes such files too. It would be one more thing to
install for these hundred lines, it brings an HTTP client and a progress bar of its own, and its
blocks are made in numpy, which has no bfloat16. Files from here are checked against it and against
llama.cpp instead.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 32
_MAGIC, _VERSION = b"GGUF", 3
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9

# What a value may be here: numbers are unsigned, in a list they are signed.
Value = str | bool | int | float | Sequence[str] | Sequence[int]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the list has it: `shape` is outermost first, `type_id` the format's own."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    num_bytes: int


def head_of(metadata: Mapping[str, Value], tensors: Iterable[TensorEntry]) -> bytes:
    """Everything before the first tensor's bytes, padded to where they begin."""
    listed = list(tensors)
    parts = [_MAGIC, struct.pack("<IQQ", _VERSION, len(listed), len(metadata))]
    parts += [_text(key) + _typed(value) for key, value in metadata.items()]
    offset = 0
    for entry in listed:
        sizes = entry.shape[::-1]
        parts.append(_text(entry.name))
        parts.append(struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, entry.type_id, offset))
        offset += entry.num_bytes + padding(entry.num_bytes)
    head = b"".join(parts)
    return head + bytes(padding(len(head)))


def padding(num_bytes: int) -> int:
    """How many zeros follow so many bytes."""
    return -num_bytes % ALIGNMENT


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _typed(value: Value) -> bytes:
    match value:
        case str():
            return struct.pack("<I", _STRING) + _text(value)
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            return struct.pack("<II", _UINT32, value)
        case float():
            return struct.pack("<If", _FLOAT32, value)
        case _:
            return struct.pack("<I", _ARRAY) + _array(value)


def _array(values: Sequence[str] | Sequence[int]) -> bytes:
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        return struct.pack("<IQ", _STRING, len(texts)) + b"".join(map(_text, texts))
    return struct.pack(f"<IQ{len(values)}i", _INT32, len(values), *values)
