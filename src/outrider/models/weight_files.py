"""The files of a checkpoint's weights: opens them, reports their sizes, names a text model's part.

Formats that could run code are refused.
"""

from __future__ import annotations

import errno
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.core.errors import CheckpointError, OutriderError, out_of_memory
from outrider.core.files import FileKind, open_regular
from outrider.models.gguf.folder import missing_tensor, parts_of
from outrider.models.json_object import JsonObject

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Medusa heads are published under this name.
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Bytes of a safetensors file that say how long its header is.
_HEADER_LENGTH = 8


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Sizes of a folder's weight files: of all of them, and of the largest. They can hold at most
    `most_values` weights. `has_head`: an output head is among them. `held_bytes` is the memory that
    weights take if kernels run on the blocks of the files; 0 for files without such blocks."""

    folder: Path
    num_bytes: int
    most_values: int
    largest_file: int
    has_head: bool
    held_bytes: int = 0

    @property
    def is_gguf(self) -> bool:
        return self.folder.is_file()

    def stays(self, dtype: str, quantise: str) -> bool:
        """True if matrices stay in their stored format, as the options request no other one."""
        return self.held_bytes > 0 and dtype == "auto" and quantise == "none"

    def check_claim(self, num_weights: int) -> None:
        """Raise CheckpointError for a model of more weights than the files can hold, so that no
        memory is allocated for weights that do not exist. A safetensors file can hold one weight a
        byte, or more if it is quantised; a GGUF file as many as its table lists."""
        if num_weights <= self.most_values:
            return
        if self.is_gguf:
            missing = missing_tensor(self.folder)
            settings = f"its settings imply {num_weights} weights, and it has {self.most_values}"
            raise CheckpointError(
                f"{self.folder}: {f'the tensor {missing} is missing' if missing else settings}.",
                hint="the file was made wrong, or is not whole: download it again, or choose "
                "another one",
            )
        raise CheckpointError(
            f"{self.folder}: config.json implies {num_weights} weights, and the files have "
            f"{self.num_bytes} bytes.",
            hint="config.json and the weights belong to different models, or the download is "
            "incomplete",
        )


class TensorFile(Protocol):
    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str, /) -> Tensor: ...


def weight_files(folder: Path) -> list[Path]:
    """The weight files of `folder`. Raises CheckpointError, naming the others, for none."""
    if folder.is_file():
        return list(parts_of(folder))
    for name in (WEIGHTS, MEDUSA_WEIGHTS):
        if (folder / name).exists():
            return [folder / name]
    if (folder / INDEX).exists():
        return _shards(folder)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights only as {pickles[0]}, a format that can run code when it "
            "is read; Outrider reads only safetensors.",
            hint="convert it where you trust it: transformers' "
            "from_pretrained(folder) and then save_pretrained(new_folder)",
        )
    raise CheckpointError(
        f"{folder} has neither {WEIGHTS} nor {INDEX}.",
        hint="is the download complete? Pickle files (.bin) are never fetched from the hub",
    )


def _shards(folder: Path) -> list[Path]:
    index = JsonObject.read(folder / INDEX)
    weight_map = index.child("weight_map")
    if not weight_map or not weight_map.values:
        raise CheckpointError(f"{index.where}: weight_map is missing or empty.")
    names = sorted({weight_map.text(name) for name in weight_map.values})
    for name in names:
        # A shard is in the folder of its index; a name with a separator could be any file.
        if not name.endswith(".safetensors") or set(name) & set("/\\:\0"):
            raise CheckpointError(
                f"{weight_map.where} names {name!r}, which is not a safetensors file of this "
                "folder."
            )
    return [folder / name for name in names]


def open_safetensors(path: Path) -> TensorFile:
    """Open a file of safetensors. Raises CheckpointError if it is missing or damaged."""
    if not path.exists():
        raise CheckpointError(
            f"{path} is missing, though {INDEX} names it.",
            hint="download the missing shard",
        )
    try:
        check_header(path)
        return cast("TensorFile", safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error


def check_header(path: Path) -> None:
    """Check the length of a header, since it takes several times its size in memory. Raises OSError
    if the header is longer than those of real models, or the path is no regular file."""
    with open_regular(path) as stream:
        size = int.from_bytes(stream.read(_HEADER_LENGTH), "little")
    if size > FileKind.HEADER.max_bytes:
        most = f"the {FileKind.HEADER.max_bytes} that {FileKind.HEADER.what} may have"
        raise OSError(errno.EFBIG, f"it would have a header of {size} bytes, more than {most}")


def damaged(path: Path, error: Exception) -> OutriderError:
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
