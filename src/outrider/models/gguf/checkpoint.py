"""A GGUF file as a checkpoint: documents and tensors under the names of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from outrider.core.errors import CheckpointError
from outrider.models.gguf.architectures import first_missing, sizes_of
from outrider.models.gguf.config import config_of, notes_of
from outrider.models.gguf.reader import Header, header_of, parts_of
from outrider.models.gguf.tensors import GgufTensors, tensor_sources
from outrider.models.gguf.vocabulary import tokenizer_config_of, tokenizer_of, vocabulary_of
from outrider.models.json_object import JsonObject

# Settings of sampling that a file recommends, and their names in a generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def generation_of(header: Header) -> dict[str, Any]:
    """The keys `general.sampling.*` under the names of a generation_config.json. Files hold numbers
    such as 0.95 in 32 bits, so they are rounded to seven digits."""
    found = {
        ours: header.metadata.get(f"general.sampling.{key}") for key, ours in _SAMPLING.items()
    }
    # Tokens that a model is never to write, such as ends of pictures.
    suppressed = header.metadata.get("tokenizer.ggml.suppress_tokens")
    if isinstance(suppressed, np.ndarray):
        found["suppress_tokens"] = suppressed.tolist()
    return {
        name: round(value, 7) if isinstance(value, float) else value
        for name, value in found.items()
        if value is not None
    }


_DOCUMENTS: Mapping[str, Callable[[Header], dict[str, Any]]] = {
    "config.json": lambda header: config_of(sizes_of(header)),
    "tokenizer.json": tokenizer_of,
    "tokenizer_config.json": tokenizer_config_of,
    "generation_config.json": generation_of,
}


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """A model of one GGUF file, or of several, of which `path` is the first."""

    path: Path
    is_gguf: ClassVar[bool] = True

    @property
    def header(self) -> Header:
        """Metadata and tensors; read once, and again only if the files have changed."""
        return header_of(self.path)

    @property
    def notes(self) -> tuple[str, ...]:
        return notes_of(sizes_of(self.header))

    @property
    def tokenizer_notes(self) -> tuple[str, ...]:
        lost = vocabulary_of(self.header).lost_merges
        if not lost:
            return ()
        return (
            f"{len(lost)} merges of {self.path} name a text that is no token, such as "
            f"{' '.join(lost[0])!r}: they are left out, so a program that applies them may cut "
            "some words into other tokens",
        )

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files())

    def has(self, name: str) -> bool:
        return name in _DOCUMENTS

    def file(self, name: str) -> None:
        """Documents are made from the header."""
        del name

    def document(self, name: str) -> JsonObject:
        if name not in _DOCUMENTS:
            raise CheckpointError(
                f"{self.path} has no {name}.", hint="name a Hugging Face folder that has it"
            )
        return JsonObject(str(self.path), _DOCUMENTS[name](self.header))

    def files(self) -> tuple[Path, ...]:
        return parts_of(self.path)

    def tensors(self, file: Path) -> GgufTensors:
        header = self.header
        return GgufTensors(file, header.entries, tensor_sources(sizes_of(header)))

    def contradiction(self, num_weights: int, most_values: int) -> CheckpointError:
        missing = first_missing(sizes_of(self.header))
        settings = f"its settings imply {num_weights} weights, and it has {most_values}"
        return CheckpointError(
            f"{self.path}: {f'the tensor {missing} is missing' if missing else settings}.",
            hint="the file was made wrong, or is not whole: download it again, or choose "
            "another one",
        )
