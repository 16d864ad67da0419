"""Checkpoint weights: tensors of safetensors and GGUF files, fused and packed for a decoder.

Formats that run code when they are read (pickle, under all its file names) are never opened. A
mapped tensor is pages of the file, so loading needs no second copy in memory. Every tensor is asked
for by name and shape; a tensor that nobody asked for is an error as well, since ignoring a weight
would change the model without a word. Tensors of several names become one matrix where the decoder
wants one product. A tied output head shares the embedding's values but not its memory.

Shapes:  D = hidden size, V = vocabulary, T = positions, O = outputs, I = inputs.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.core.errors import CheckpointError, OutriderError, out_of_memory
from outrider.core.files import FileKind, open_regular
from outrider.core.spec import DecoderConfig, ModelSpec
from outrider.kernels.plan import PackedLinear
from outrider.kernels.registry import Kernels
from outrider.models.gguf.folder import GgufTensors
from outrider.models.published.codes import Codes
from outrider.models.published.scheme import scheme_in
from outrider.models.published.tensors import Quantised
from outrider.models.weight_files import INDEX, weight_files

HEAD = "lm_head.weight"
# Old files store the rotary frequencies.
DERIVED = ("rotary_emb.inv_freq",)
# Bytes of a safetensors file that say how long its header is.
_HEADER_LENGTH = 8
# Bytes read of a file before it is mapped anew: pages once read count as memory of this process
# while they are mapped, and the old mapping goes with the last tensor that was taken from it.
_MAX_MAPPED = 1 << 25
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Sizes of a folder's weights in its files: in all, and of the largest. `most_values` is how
    many weights they can hold. `has_head` says that an output head is among them."""

    folder: Path
    num_bytes: int
    most_values: int
    largest_file: int
    has_head: bool

    @property
    def is_gguf(self) -> bool:
        return self.folder.is_file()

    def check_claim(self, num_weights: int) -> None:
        """Raise CheckpointError for a model of more weights than the files can hold, one a byte or
        as many as a table lists: nothing is to be allocated for what is not there."""
        if num_weights > self.most_values:
            raise CheckpointError(
                f"{self.folder}: config.json implies {num_weights} weights, and the files have "
                f"{self.num_bytes} bytes.",
                hint="config.json and the weights belong to different models, or the download is "
                "incomplete",
            )


class _File(Protocol):
    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str, /) -> Tensor: ...


class Weights:
    """The open files of one folder; use it in a `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers = {path: self._open(path) for path in weight_files(folder)}
        self._stored_in = {
            name: path for path, file in self._readers.items() for name in list(file.keys())
        }
        self._quantised = Quantised(scheme_in(folder), self._stored_in, self._read_stored)
        self._file_of = self._quantised.places(self._stored_in)
        self._untaken = set(self._file_of)
        self._last: Path | None = None
        self._num_mapped = 0

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._readers.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def stored(self) -> StoredWeights:
        sizes = [path.stat().st_size for path in self._readers]
        most = sum(
            file.num_values
            if isinstance(file, GgufTensors)
            else size * self._quantised.values_a_byte
            for file, size in zip(self._readers.values(), sizes, strict=True)
        )
        return StoredWeights(self.folder, sum(sizes), most, max(sizes), HEAD in self)

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor `name`: a view of its file, not to be written, or, of one that is quantised,
        its numbers in `dtype`. Raises for another shape."""
        tensor = self._taken(name, shape, dtype)
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{self._file_of[name]}: {name} has type {tensor.dtype} and no scales that say "
                "which numbers its codes are.",
                hint="is quantization_config missing in config.json, or the download incomplete?",
            )
        return tensor

    def codes(self, name: str) -> Codes | None:
        """Codes and scales of a matrix that is quantised; None for any other tensor."""
        return self._quantised.codes(name)

    def take_integers(self, name: str, *shape: int) -> Tensor:
        """The same of a tensor of whole numbers: a table of ids, no weight."""
        tensor = self._taken(name, shape, torch.float32)
        if tensor.is_floating_point() or tensor.is_complex():
            raise CheckpointError(
                f"{self._file_of[name]}: {name} has type {tensor.dtype}, not whole numbers.",
                hint="does the file belong to this format of heads?",
            )
        return tensor.long()

    def _taken(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        path = self._file_of.get(name)
        if path is None:
            raise CheckpointError(
                f"{self.folder}: the tensor {name}, of shape {list(shape)}, is missing.",
                hint=self._near(name),
            )
        found = self.codes(name) or self._read(path, name)
        if found.shape != shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(found.shape)}, but config.json implies "
                f"{list(shape)}.",
                hint="config.json and the weights belong to different models",
            )
        self._untaken.discard(name)
        return found.numbers(dtype) if isinstance(found, Codes) else found

    @property
    def names(self) -> tuple[str, ...]:
        """Of every tensor in the files."""
        return tuple(self._file_of)

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, whoever takes it; one is read when its turn comes."""
        for name, path in self._file_of.items():
            codes = self.codes(name)
            yield name, self._read(path, name) if codes is None else codes.numbers(torch.float32)

    def stored_dtype(self, name: str) -> torch.dtype:
        path = self._file_of.get(name)
        if path is None or name in self._quantised:
            return torch.float32
        file = self._readers[path]
        return (
            file.dtype_of(name) if isinstance(file, GgufTensors) else self._read(path, name).dtype
        )

    def check_all_taken(
        self, *, ignored: tuple[str, ...] = DERIVED, beside: tuple[str, ...] = ()
    ) -> None:
        """Raise CheckpointError if the folder holds a tensor that nobody asked for.

        Names that end in one of `ignored` hold nothing that config.json does not determine; those
        that begin with one of `beside` belong to other models in the same files.
        """
        left = sorted(
            name
            for name in self._untaken
            if not name.endswith(ignored)
            and not name.startswith(beside)
            and not self._quantised.is_no_bias(name)
        )
        if left:
            raise CheckpointError(
                f"{self.folder}: {left[0]} has no place in this model "
                f"({len(left)} such tensors in all).",
                hint="do config.json and the weights belong to one model?",
            )

    def _read_stored(self, name: str) -> Tensor:
        return self._read(self._stored_in[name], name)

    def _read(self, path: Path, name: str) -> Tensor:
        try:
            tensor = self._readers[path].get_tensor(name)
        except SafetensorError as error:
            raise _damaged(path, error) from error
        self._let_go(path, tensor.nbytes)
        return tensor

    def _let_go(self, path: Path, num_bytes: int) -> None:
        """Map a file anew when much of it has been read, or another's turn has come."""
        last, self._last = self._last, path
        if last is not None and last != path:
            self._readers[last], self._num_mapped = self._open(last), 0
        self._num_mapped += num_bytes
        if self._num_mapped > _MAX_MAPPED:
            self._readers[path], self._num_mapped = self._open(path), 0

    def _open(self, path: Path) -> _File:
        return GgufTensors(path, self.folder) if self.folder.is_file() else _open(path)

    def _near(self, name: str) -> str:
        close = difflib.get_close_matches(name, self._file_of, n=1)
        found = f"the nearest name in the files is {close[0]}; " if close else ""
        return f"{found}is the download complete?"


def stored_in(folder: Path) -> StoredWeights:
    """Raises CheckpointError as `Weights` does."""
    with Weights(folder) as weights:
        return weights.stored


def _open(path: Path) -> _File:
    if not path.exists():
        raise CheckpointError(
            f"{path} is missing, though {INDEX} names it.",
            hint="download the missing shard",
        )
    try:
        check_header(path)
        return cast("_File", safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def check_header(path: Path) -> None:
    """A header takes memory several times its size. Raises OSError, also for what is no regular
    file, or has a header longer than those of real models."""
    with open_regular(path) as stream:
        size = int.from_bytes(stream.read(_HEADER_LENGTH), "little")
    if size > FileKind.HEADER.max_bytes:
        most = f"the {FileKind.HEADER.max_bytes} that {FileKind.HEADER.what} may have"
        raise OSError(errno.EFBIG, f"it would have a header of {size} bytes, more than {most}")


def _damaged(path: Path, error: Exception) -> OutriderError:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return out_of_memory(error, f"mapping {path}") or CheckpointError(
        f"{path} ({path.stat().st_size} bytes) is damaged or incomplete: {reason}.",
        hint="compare its size with the original and download it again",
    )


# Names of the table of tokens in all families' files.
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "transformer.wte.weight",
    "wte.weight",
)
EVERYTHING = slice(None)


@dataclass(frozen=True, slots=True)
class Placement:
    """The precision of weights and KV, and where they live; `name` is the model's, for reports.
    `quantise`, int8 or int4, says that the matrices are held so."""

    name: str
    dtype: torch.dtype
    device: torch.device
    quantise: str = "none"

    def spec(self, config: DecoderConfig) -> ModelSpec:
        size = self.dtype.itemsize
        plain = config.spec(self.name, bytes_per_weight=size, bytes_per_kv=size)
        return replace(plain, quantise=self.quantise)


class WeightReader:
    """Reads, converts and packs one matrix at a time, so the peak is one matrix over the model.

    Every method raises CheckpointError for a tensor that is missing or has another shape.
    """

    def __init__(self, weights: Weights, kernels: Kernels, place: Placement) -> None:
        self._weights, self._kernels, self._place = weights, kernels, place

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def table(self, name: str, *shape: int) -> Tensor:
        """A matrix that is looked up by row, in the weights' dtype."""
        return self._copy(self._take(name, *shape), self._place.dtype)

    def vector(self, name: str, *shape: int) -> Tensor:
        """Norms, biases and positions, in float32."""
        return self._copy(self._weights.take(name, *shape), torch.float32)

    def head(self, embedding_VD: Tensor, *, tied: bool, rows: slice = EVERYTHING) -> PackedLinear:
        """As in transformers, a head that is stored wins over tying. `rows` are those wanted."""
        if tied and HEAD not in self._weights:
            return self._kernels.pack(embedding_VD[rows])
        return self._kernels.pack(self.table(HEAD, *embedding_VD.shape)[rows])

    def linear(
        self,
        outputs: Mapping[str, int],
        num_in: int,
        order_O: Tensor | None = None,
        *,
        columns: slice = EVERYTHING,
    ) -> PackedLinear:
        """One matrix of the weights of `outputs`, in that order; then its rows in `order_O`, and
        of its inputs those in `columns`."""
        parts = [self._take(f"{name}.weight", num_out, num_in) for name, num_out in outputs.items()]
        return self._packed(_ordered(torch.cat(parts), order_O)[:, columns].contiguous())

    def stacked(self, name: str, count: int, num_out: int, num_in: int) -> list[PackedLinear]:
        """The matrices of one tensor that holds `count` of them."""
        stack = self._take(name, count, num_out, num_in)
        return [self._packed(weight_OI) for weight_OI in stack]

    def conv(self, name: str, num_in: int, num_out: int) -> PackedLinear:
        """A Conv1D of GPT-2, which is a linear stored as inputs by outputs."""
        return self._packed(self._take(f"{name}.weight", num_in, num_out).T)

    def bias(
        self, outputs: Mapping[str, int], *, present: bool, order_O: Tensor | None = None
    ) -> Tensor | None:
        if not present:
            return None
        parts = [self._weights.take(f"{name}.bias", num_out) for name, num_out in outputs.items()]
        return self._copy(_ordered(torch.cat(parts), order_O), torch.float32)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(name, *shape, dtype=self._place.dtype)

    def _packed(self, weight_OI: Tensor) -> PackedLinear:
        place = self._place
        return self._kernels.pack(weight_OI.to(device=place.device, dtype=place.dtype))

    def _copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of our own: the file may change or vanish while the model runs."""
        return tensor.to(device=self._place.device, dtype=dtype, copy=True)


def _ordered(rows: Tensor, order_O: Tensor | None) -> Tensor:
    return rows if order_O is None else rows[order_O]
