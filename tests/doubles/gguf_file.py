"""Reads a GGUF file as its specification says, sharing no code with what writes it; and a tokenizer
that such a file can hold."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
# Tensor types of the format: name, values a block, bytes a block.
TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    30: ("bf16", 1, 2),
    8: ("q8_0", 32, 34),
    2: ("q4_0", 32, 18),
}
SCALARS = {4: "<I", 5: "<i", 6: "<f", 7: "<?"}
STRING, ARRAY = 8, 9


@dataclass
class Gguf:
    """The file as the specification says to read it."""

    raw: bytes
    place: int = 0
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    tensors: dict[str, tuple[str, Floats]] = field(default_factory=dict[str, tuple[str, Floats]])

    @classmethod
    def read(cls, path: Path) -> Gguf:
        file = cls(path.read_bytes())
        assert file.raw[:4] == b"GGUF"
        file.place = 4
        version, num_tensors, num_keys = file.numbers("<IQQ")
        assert version == 3
        for _ in range(num_keys):
            key = file.text()
            file.metadata[key] = file.value(file.numbers("<I")[0])
        listed: list[tuple[str, list[int], int, int]] = []
        for _ in range(num_tensors):
            name, num_sizes = file.text(), file.numbers("<I")[0]
            sizes = list(file.numbers(f"<{num_sizes}Q"))
            listed.append((name, sizes, *file.numbers("<IQ")))
        start = -(-file.place // 32) * 32
        for name, sizes, type_id, offset in listed:
            assert offset % 32 == 0
            file.tensors[name] = file.tensor(start + offset, type_id, sizes[::-1])
        return file

    def numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self.raw, self.place)
        self.place += struct.calcsize(form)
        return found

    def text(self) -> str:
        size = self.numbers("<Q")[0]
        self.place += size
        return self.raw[self.place - size : self.place].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, num = self.numbers("<IQ")
            return [self.value(inner) for _ in range(num)]
        return self.numbers(SCALARS[kind])[0]

    def tensor(self, place: int, type_id: int, shape: list[int]) -> tuple[str, Floats]:
        name, values, num_bytes = TYPES[type_id]
        num_blocks = int(np.prod(shape)) // values
        raw = np.frombuffer(self.raw, np.uint8, num_blocks * num_bytes, place)
        return name, decoded(name, raw.reshape(num_blocks, num_bytes)).reshape(shape)


def decoded(name: str, blocks: NDArray[np.uint8]) -> Floats:
    """By the format's definition: scale times integer."""
    if name == "f32":
        return blocks.copy().view(np.float32)
    if name == "f16":
        return blocks.copy().view(np.float16).astype(np.float32)
    if name == "bf16":
        return (blocks.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if name == "q8_0":
        return scale * blocks[:, 2:].copy().view(np.int8)
    ints = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return scale * (ints.astype(np.float32) - 8)


def tokenizer_for(folder: Path, vocab_size: int = 96) -> Path:
    """A byte-level tokenizer of Llama 3's kind beside a tiny checkpoint; returns the folder."""
    vocab = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4, "é": 5, "Ġ": 6}
    vocab |= {f"t{i}": i for i in range(len(vocab), vocab_size - 2)}
    raw: dict[str, Any] = {
        "added_tokens": [
            {"id": 0, "content": "<s>", "special": True},
            {"id": vocab_size - 2, "content": "<tool>", "special": False},
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b", ["Ġ", "a"]]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder
