"""A GGUF file as the folder of a checkpoint: its documents, and its tensors under their names.

`document` returns `config.json`, `tokenizer.json` and the like; `GgufTensors` reads weights, one
object for each file of a split model. A header is read again only if its files have changed.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import CheckpointError
from outrider.core.files import file_identity, open_regular
from outrider.kernels.plan import BlockRows
from outrider.models.gguf.blocks import decode, held_bytes
from outrider.models.gguf.config import (
    architecture_of,
    config_of,
    head_dim_of,
    missing_in,
    notes_of,
)
from outrider.models.gguf.names import TensorSource, tensor_sources
from outrider.models.gguf.reader import MAGIC, Header, map_file, read_header
from outrider.models.gguf.vocabulary import tokenizer_config_of, tokenizer_of, vocabulary_of
from outrider.models.json_object import GGUF_DOCUMENTS

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_PARTS = 1000
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
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
    return {
        name: round(value, 7) if isinstance(value, float) else value
        for name, value in found.items()
        if value is not None
    }


_DOCUMENTS = (config_of, tokenizer_of, tokenizer_config_of, generation_of)
_MAKERS = dict(zip(GGUF_DOCUMENTS, _DOCUMENTS, strict=True))


def document(path: Path) -> dict[str, Any]:
    """The contents of the JSON file `path` as if its parent, a GGUF file, were a folder. Raises
    CheckpointError for a file that no GGUF file stands for."""
    if path.name not in GGUF_DOCUMENTS:
        raise CheckpointError(
            f"{path.parent} has no {path.name}.", hint="name a Hugging Face folder that has it"
        )
    return _MAKERS[path.name](header_of(path.parent))


def notes_on(path: Path) -> tuple[str, ...]:
    """Notes on the GGUF file `path` as a model."""
    return notes_of(header_of(path))


def tokenizer_notes(path: Path) -> tuple[str, ...]:
    """A note on merges that the tokenizer of the GGUF file `path` leaves out, if there are any."""
    lost = vocabulary_of(header_of(path)).lost_merges
    if not lost:
        return ()
    return (
        f"{len(lost)} merges of {path} name a text that is no token, such as "
        f"{' '.join(lost[0])!r}: they are left out, so a program that applies them may cut some "
        "words into other tokens",
    )


def missing_tensor(path: Path) -> str | None:
    """The name of a tensor that the GGUF file `path` lacks, if it lacks one."""
    return missing_in(header_of(path))


def is_gguf(path: Path) -> bool:
    """True if a file has GGUF's first bytes; other programs name such files by their hash."""
    with suppress(OSError), open_regular(path) as stream:
        return stream.read(len(MAGIC)) == MAGIC
    return False


def gguf_in(folder: Path) -> Path | None:
    """The GGUF model of a folder without safetensors. Raises CheckpointError for several."""
    if any(folder.glob("*.safetensors")):
        return None
    # Files named mmproj hold the part for pictures of a text model, which is no model by itself.
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj"))
    firsts = sorted({parts_of(file)[0] for file in files})
    if len(firsts) > 1:
        raise CheckpointError(
            f"{folder} has {len(firsts)} models as GGUF files, such as {firsts[0].name}.",
            hint=f"name the file, as in {firsts[0]}",
        )
    return firsts[0] if firsts else None


def header_of(path: Path) -> Header:
    """The header of a model of one or several files. Raises CheckpointError for a bad file."""
    files = parts_of(path)
    return _header(files, tuple(map(file_identity, files)))


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of the model that begins with `path`. Raises CheckpointError if one is missing."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return (path,)
    count = int(found["count"])
    if not 1 <= count <= _MAX_PARTS:
        raise CheckpointError(f"{path}: a model of {count} files is not supported.")
    files = tuple(
        path.with_name(f"{found['name']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    )
    if path not in files:
        raise CheckpointError(f"{path} is no file of a model of {count} files, by its name.")
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing, one of {count} files of a model.",
                hint="download the missing file into the same folder",
            )
    return files


@lru_cache(maxsize=8)
def _header(files: tuple[Path, ...], identity: tuple[object, ...]) -> Header:
    """Read the headers of a model's files as one, again if `identity` (a cache key) changes."""
    del identity
    headers = [read_header(file) for file in files]
    first = headers[0]
    claimed = first.metadata.get("split.count", 1)
    if claimed != len(files) and claimed not in (0, 1):
        raise CheckpointError(
            f"{files[0]} is one of {claimed} files of a model, and its name does not say so.",
            hint=f"give them back their names, such as NAME-00001-of-{claimed:0>5}.gguf",
        )
    entries = dict(first.entries)
    for number, header in enumerate(headers[1:], 1):
        if header.metadata.get("split.no") != number or entries.keys() & header.entries.keys():
            raise CheckpointError(
                f"{header.path} is not part {number + 1} of the model of {files[0]}.",
                hint="download the files of one model into one folder",
            )
        entries |= header.entries
    total = first.metadata.get("split.tensors.count", len(entries))
    if len(files) > 1 and total != len(entries):
        raise CheckpointError(
            f"{files[0]} and the other files of the model have {len(entries)} tensors of {total}.",
            hint="download all files of the model again",
        )
    return replace(first, entries=entries)


class GgufTensors:
    """The tensors of one file under the names of checkpoints, decoded when they are read.

    Floats have their own dtype; quantised tensors become float32.
    """

    def __init__(self, path: Path, first: Path) -> None:
        """`first` is the first file of the model, which `path` may be itself."""
        header = header_of(first)
        known = tensor_sources(header, architecture_of(header), head_dim_of(header))
        self._entries = header.entries
        self._sources: dict[str, TensorSource] = {
            name: source
            for name, source in known.items()
            if header.entries[source.stored].path == path
        }
        self._memory = map_file(path)

    def let_go(self) -> None:
        """Release the pages that were read; a later read takes them from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)

    def keys(self) -> list[str]:
        return list(self._sources)

    @property
    def num_values(self) -> int:
        entries = self._entries
        return sum(prod(p.shape(entries[p.stored].shape)) for p in self._sources.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors in memory where kernels run on blocks (native/csrc/groups.h)."""
        sources = (source for source in self._sources.values() if not source.zero)
        entries = [self._entries[source.stored] for source in sources]
        return sum(one.num_values // one.kind.block * held_bytes(one.kind) for one in entries)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of the tensor that `get_tensor` returns."""
        source = self._sources[name]
        if source.zero:
            return torch.float32
        return _DTYPES.get(self._entries[source.stored].kind.name, torch.float32)

    def blocks(self, name: str) -> Sequence[BlockRows]:
        """The stored rows of a matrix, or of each matrix of a stack. Empty for a tensor that is not
        quantised or has another layout in checkpoints."""
        source = self._sources[name]
        entry = self._entries[source.stored]
        if (
            not entry.kind.is_quantised
            or source.transposed
            or source.zero
            or len(entry.shape) not in (2, 3)
        ):
            return ()
        *stack, num_out, num_in = entry.shape
        raw = np.frombuffer(self._memory, np.uint8, entry.num_bytes, entry.offset)
        order_O = source.order(num_out)
        return [
            BlockRows(part, entry.kind.number, num_out, num_in, order_O)
            for part in raw.reshape(prod(stack), -1)
        ]

    def get_tensor(self, name: str) -> Tensor:
        source = self._sources[name]
        entry = self._entries[source.stored]
        if source.zero:
            return torch.zeros(source.shape(entry.shape))
        raw = np.frombuffer(self._memory, np.uint8, entry.num_bytes, entry.offset)
        # Copied if nothing is decoded: PyTorch accepts no read-only memory.
        numbers = decode(raw, entry.kind) if entry.kind.is_quantised else raw.copy()
        flat: Tensor = torch.from_numpy(numbers)  # pyright: ignore[reportUnknownMemberType]
        return source.laid_out(flat.view(self.dtype_of(name)).view(entry.shape))
