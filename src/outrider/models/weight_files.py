"""Files of a checkpoint's weights, and the names of a text model's tensors in them.

A mapped tensor is pages of its file, so loading needs no second copy in memory. GGUF files are
another such file (gguf/tensors.py).
"""

from __future__ import annotations

import errno
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.core.errors import CheckpointError, OutriderError, out_of_memory
from outrider.core.files import FileKind, open_regular
from outrider.kernels.plan import BlockRows

# Bytes of a safetensors file that say how long its header is.
_HEADER_LENGTH = 8


class TensorFile(Protocol):
    """An open file of tensors. Methods raise CheckpointError if it is damaged.

    `max_read` are bytes that may be read before pages, which count as this process's memory, are to
    be released by `let_go`."""

    @property
    def max_read(self) -> int: ...
    @property
    def num_values(self) -> int:
        """Most numbers that the file can hold, one in a byte if it does not list them."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of all tensors in memory where kernels run on their blocks; 0 without blocks."""
        ...

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of the tensor that `get_tensor` returns."""
        ...

    def blocks(self, name: str) -> Sequence[BlockRows]:
        """The stored rows of a matrix, or of each matrix of a stack. Empty for a tensor that is not
        quantised or has another layout in checkpoints."""
        ...

    def let_go(self) -> None:
        """Release the pages that were read; a later read takes them from the file again."""
        ...


class _Opened(Protocol):
    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str, /) -> Tensor: ...


class SafetensorsFile:
    """A mapped file of safetensors. Raises CheckpointError if it is damaged."""

    max_read = 1 << 25
    held_bytes = 0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()

    def _open(self) -> _Opened:
        try:
            check_header(self._path)
            return cast("_Opened", safe_open(self._path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise _damaged(self._path, error) from error

    @property
    def num_values(self) -> int:
        return self._path.stat().st_size

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> Tensor:
        try:
            return self._file.get_tensor(name)
        except SafetensorError as error:
            raise _damaged(self._path, error) from error

    def dtype_of(self, name: str) -> torch.dtype:
        return self.get_tensor(name).dtype

    def blocks(self, name: str) -> Sequence[BlockRows]:
        del name
        return ()

    def let_go(self) -> None:
        """Map the file anew; the old mapping ends with the last tensor of it."""
        self._file = self._open()


def check_header(path: Path) -> None:
    """Check the length of a header, since it takes several times its size in memory. Raises OSError
    if the header is longer than those of real models, or the path is no regular file."""
    with open_regular(path) as stream:
        size = int.from_bytes(stream.read(_HEADER_LENGTH), "little")
    if size > FileKind.HEADER.max_bytes:
        most = f"the {FileKind.HEADER.max_bytes} that {FileKind.HEADER.what} may have"
        raise OSError(errno.EFBIG, f"it would have a header of {size} bytes, more than {most}")


def _damaged(path: Path, error: Exception) -> OutriderError:
    """The error for a file that cannot be read."""
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return out_of_memory(error, f"mapping {path}") or CheckpointError(
        f"{path} ({path.stat().st_size} bytes) is damaged or incomplete: {reason}.",
        hint="compare its size with the original and download it again",
    )


# Beginnings of the names of a text model and of its output head.
_PREFIXES = (
    ("model.", "lm_head."),
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
)
_EMBEDDING = "embed_tokens.weight"
# Names of the table of tokens in all families' files.
EMBEDDINGS = (
    *(f"{prefix}{_EMBEDDING}" for prefix, _ in _PREFIXES),
    "transformer.wte.weight",
    "wte.weight",
)
# Prefixes of the other tensors of a model for text and pictures.
VISION_PREFIXES = tuple(
    f"{outer}{part}"
    for outer in ("model.", "")
    for part in ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.")
)


@dataclass(frozen=True, slots=True)
class TextNames:
    """The prefixes that the files have instead of `model.` and `lm_head.`."""

    model: str = "model."
    head: str = "lm_head."

    @classmethod
    def of(cls, weights: Container[str]) -> TextNames:
        """The names of the files; plain names if the files have no table of tokens."""
        found = (pair for pair in _PREFIXES if f"{pair[0]}{_EMBEDDING}" in weights)
        return cls(*next(found, _PREFIXES[0]))

    def stored(self, name: str) -> str:
        for plain, own in (("model.", self.model), ("lm_head.", self.head)):
            if name.startswith(plain):
                return own + name.removeprefix(plain)
        return name


def without_mtp(names: Iterable[str], config: Any) -> list[str]:
    """`names` without those of MTP blocks, which are numbered on after the last layer. `config`,
    the settings of transformers, has the number of blocks."""
    text = config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    num_blocks = getattr(text, "num_nextn_predict_layers", None) or 0
    behind = range(num_layers, num_layers + num_blocks)
    blocks = tuple(f"{prefix}layers.{index}." for prefix, _ in _PREFIXES for index in behind)
    return [name for name in names if not name.startswith(blocks)]
