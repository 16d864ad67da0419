"""Checkpoint weights: tensors of safetensors and GGUF files, fused and packed for a decoder.

Formats that run code when they are read (pickle, under all its file names) are never opened. A
mapped tensor is pages of the file, so loading needs no second copy in memory. Every tensor is read
by name and shape; a tensor that is never read is an error, since ignoring a weight would silently
change the model. Tensors of several names become one matrix if the decoder needs one product. A
tied output head shares the embedding's values but not its memory.

Shapes:  D = hidden size, V = vocabulary, T = positions, O = outputs, I = inputs.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.core.errors import CheckpointError, OutriderError, out_of_memory, reason_of
from outrider.core.files import FileKind, open_regular
from outrider.core.process import give_back
from outrider.core.spec import DecoderConfig, ModelSpec
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import BlockRows, PackedLinear, PackedTable
from outrider.models.checkpoint import Checkpoint, open_checkpoint, quantised_in

if TYPE_CHECKING:
    from outrider.plugins.published.codes import Codes

HEAD = "lm_head.weight"
# Old files store the rotary frequencies, and GPT-NeoX's the causal masks.
DERIVED = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# Bytes of a safetensors file that say how long its header is.
_HEADER_LENGTH = 8


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
    return out_of_memory(error, f"mapping {path}") or CheckpointError(
        f"{path} ({path.stat().st_size} bytes) is damaged or incomplete: {reason_of(error)}.",
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
    "backbone.embeddings.weight",
    "transformer.wte.weight",
    "wte.weight",
)
# Prefixes of the other tensors of a model for text and pictures or sound.
VISION_PREFIXES = tuple(
    f"{outer}{part}"
    for outer in ("model.", "")
    for part in (
        "visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "vit.", "mlp_AR.",
        "embed_vision.", "audio_tower.", "embed_audio.",
        "vision_adapter.", "vision_projection.",
    )
)  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class FamilyNames(TextNames):
    """Names of a family whose folders have other parts of names: `own` has theirs for each part.
    GGUF files have the usual names; `weights` says which ones are there."""

    own: Mapping[str, str] = field(default_factory=dict[str, str])
    weights: Container[str] = ()

    def stored(self, name: str) -> str:
        plain = found = TextNames.stored(self, name)
        for part, theirs in self.own.items():
            found = found.replace(part, theirs)
        return plain if plain in self.weights else found


def without_mtp(names: Iterable[str], config: Any) -> list[str]:
    """`names` without those of MTP blocks, which are numbered on after the last layer. `config`,
    the settings of transformers, has the number of blocks."""
    text = config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    num_blocks = getattr(text, "num_nextn_predict_layers", None) or 0
    behind = range(num_layers, num_layers + num_blocks)
    blocks = tuple(f"{prefix}layers.{index}." for prefix, _ in _PREFIXES for index in behind)
    return [name for name in names if not name.startswith(blocks)]


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Sizes of a checkpoint's weight files: of all of them, and of the largest. They can hold at
    most `most_values` weights. `has_head`: an output head is among them. `held_bytes` is the memory
    that weights take if kernels run on the blocks of the files; 0 for files without such blocks."""

    checkpoint: Checkpoint
    num_bytes: int
    most_values: int
    largest_file: int
    has_head: bool
    held_bytes: int = 0

    def stays(self, dtype: str, quantise: str) -> bool:
        """True if matrices stay in their stored format, as the options request no other one."""
        return self.held_bytes > 0 and dtype == "auto" and quantise == "none"

    def check_claim(self, num_weights: int) -> None:
        """Raise CheckpointError for a model of more weights than the files can hold, so that no
        memory is allocated for weights that do not exist. A safetensors file can hold one weight a
        byte, or more if it is quantised; a GGUF file as many as its table lists."""
        if num_weights > self.most_values:
            raise self.checkpoint.contradiction(num_weights, self.most_values)


class Weights:
    """The open files of one checkpoint; use it in a `with` block."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._readers = {
            path: checkpoint.tensors(path) or SafetensorsFile(path) for path in checkpoint.files()
        }
        self._stored_in = {
            name: path for path, file in self._readers.items() for name in list(file.keys())
        }
        self._quantised = quantised_in(checkpoint, self._stored_in, self._read)
        quantised, stored = self._quantised, self._stored_in
        self._file_of = dict(stored) if quantised is None else quantised.files_of(stored)
        self._untaken = set(self._file_of)
        self._last: Path | None = None
        self._num_read = 0

    @classmethod
    def at(cls, path: Path) -> Weights:
        """The weights in a folder or GGUF file."""
        return cls(open_checkpoint(path))

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def stored(self) -> StoredWeights:
        sizes = [path.stat().st_size for path in self._readers]
        readers = self._readers.values()
        most = sum(file.num_values for file in readers)
        held = sum(file.held_bytes for file in readers)
        if self._quantised is not None:
            most *= self._quantised.values_a_byte
            if self._quantised.has_blocks:
                width = self.stored_dtype(self.embedding).itemsize
                held = self._quantised.held_bytes(self._look, width)
        return StoredWeights(self.checkpoint, sum(sizes), most, max(sizes), HEAD in self, held)

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor `name`: a view of its file, not to be written, or the decoded numbers of a
        quantised one in `dtype`. Raises CheckpointError for another shape."""
        tensor = self._taken(name, shape, dtype)
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{self._file_of[name]}: {name} has type {tensor.dtype} and no scales that say "
                "which numbers its codes are.",
                hint="is quantization_config missing in config.json, or the download incomplete?",
            )
        return tensor

    def stacked_blocks(
        self, name: str, count: int, num_out: int, num_in: int
    ) -> Sequence[BlockRows] | None:
        """The `count` matrices of the tensor `name` in their stored format; None if it is not
        quantised or has another shape, for which `take` raises an error."""
        path = self._file_of.get(name)
        if path is None:
            return None
        found = self._readers[path].blocks(name) or self._coded_blocks(name)
        if [(one.num_out, one.num_in) for one in found] != [(num_out, num_in)] * count:
            return None
        self._let_go(path, sum(one.raw.nbytes for one in found), trims=False)
        self._untaken.discard(name)
        return found

    def _coded_blocks(self, name: str) -> Sequence[BlockRows]:
        quantised = self._quantised
        codes = quantised.codes(name) if quantised is not None and quantised.has_blocks else None
        return codes.blocks() if codes else ()

    def codes(self, name: str) -> Codes | None:
        """Codes and scales of a matrix that is quantised; None for any other tensor."""
        return None if self._quantised is None else self._quantised.codes(name)

    def take_integers(self, name: str, *shape: int) -> Tensor:
        """The tensor `name` of whole numbers, a table of ids. Raises CheckpointError otherwise."""
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
                f"{self.checkpoint.path}: the tensor {name}, of shape {list(shape)}, is missing.",
                hint=self._near(name),
            )
        found = self.codes(name) or self._read(name)
        if found.shape != shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(found.shape)}, but config.json implies "
                f"{list(shape)}.",
                hint="config.json and the weights belong to different models",
            )
        self._untaken.discard(name)
        return found if isinstance(found, Tensor) else found.numbers(dtype)

    @property
    def embedding(self) -> str:
        """The name of the table of tokens."""
        return next((name for name in EMBEDDINGS if name in self), EMBEDDINGS[0])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors in the files."""
        return tuple(self._file_of)

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, taken or not; each is read when its turn comes."""
        for name in self._file_of:
            codes = self.codes(name)
            yield name, self._read(name) if codes is None else codes.numbers(torch.float32)

    def stored_dtype(self, name: str) -> torch.dtype:
        path = self._file_of.get(name)
        if path is None or (self._quantised is not None and name in self._quantised):
            return torch.float32
        return self._readers[path].dtype_of(name)

    def check_all_taken(
        self, *, ignored: tuple[str, ...] = DERIVED, unread: tuple[str, ...] = ()
    ) -> None:
        """Raise CheckpointError if a tensor was not taken. Tensors whose names end with `ignored`
        follow from config.json; those that begin with `unread` belong to other models."""
        left = sorted(
            name
            for name in self._untaken
            if not name.endswith(ignored)
            and not name.startswith(unread)
            and not (self._quantised is not None and self._quantised.is_no_bias(name))
        )
        if left:
            raise CheckpointError(
                f"{self.checkpoint.path}: the tensor {left[0]} is not part of this model "
                f"({len(left)} such tensors in all).",
                hint="do config.json and the weights belong to one model?",
            )

    def _look(self, name: str) -> Tensor:
        """The mapped tensor, of which only a part is to be read."""
        return self._readers[self._stored_in[name]].get_tensor(name)

    def _read(self, name: str) -> Tensor:
        tensor = self._look(name)
        self._let_go(self._stored_in[name], tensor.nbytes)
        return tensor

    def _let_go(self, path: Path, num_bytes: int, *, trims: bool = True) -> None:
        """Release pages when much of a file has been read, or when another file's turn comes. With
        `trims` also what decoded tensors took: the allocator's search takes about as long as 4 MB
        of blocks take to be packed."""
        last, self._last = self._last or path, path
        self._num_read += num_bytes
        file = self._readers[last]
        if last == path and self._num_read <= file.max_read:
            return
        self._num_read = 0
        file.let_go()
        if trims:
            give_back()

    def _near(self, name: str) -> str:
        close = difflib.get_close_matches(name, self._file_of, n=1)
        found = f"the nearest name in the files is {close[0]}; " if close else ""
        return f"{found}is the download complete?"


def stored_in(path: Path) -> StoredWeights:
    """The sizes of the weight files of a folder or GGUF model. Raises CheckpointError as `Weights`
    does."""
    with Weights.at(path) as weights:
        return weights.stored


EVERYTHING = slice(None)


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and precision of a model: of weights, of keys and values, and of the `activations`
    that only linears read. Reports call the model `name`. Matrices are quantised to `quantise`;
    blocks of a file that keep their format take `stored_bytes`."""

    name: str
    dtype: torch.dtype
    device: torch.device
    quantise: str = "none"
    stored_bytes: int = 0
    kv_dtype: str = "auto"
    activations: torch.dtype = torch.float32

    def spec(self, config: DecoderConfig) -> ModelSpec:
        width = self.dtype.itemsize
        plain = config.spec(self.name, bytes_per_weight=width, bytes_per_kv=width)
        held = {key: getattr(self, key) for key in ("quantise", "stored_bytes", "kv_dtype")}
        return replace(plain, **held)


class WeightReader:
    """Reads, converts and packs one matrix at a time, so the peak memory is the model plus one
    matrix. `text` has the files' names of a text model; None means plain names. The matrices of
    linears are stored as inputs by outputs if they are `transposed` (GPT-2's Conv1D).

    Every method raises CheckpointError for a tensor that is missing or has another shape.
    """

    def __init__(
        self,
        weights: Weights,
        kernels: Kernels,
        placement: Placement,
        *,
        text: TextNames | None = None,
        transposed: bool = False,
    ) -> None:
        self._weights, self.kernels, self._placement = weights, kernels, placement
        self._transposed = transposed
        self._text = text or TextNames()

    def __contains__(self, name: str) -> bool:
        return self._named(name) in self._weights

    def _named(self, name: str) -> str:
        return self._text.stored(name)

    def table(self, name: str, *shape: int) -> Tensor:
        """A matrix that is looked up by row, in the weights' dtype."""
        return self._copy(self._take(name, *shape), self._placement.dtype)

    def vector(self, name: str, *shape: int) -> Tensor:
        """Norms, biases and positions, in float32."""
        return self._copy(self._weights.take(self._named(name), *shape), torch.float32)

    def ones(self, *shape: int) -> Tensor:
        """The weight of a norm that has none, as `vector` reads one."""
        return torch.ones(shape, device=self._placement.device)

    def tokens(self, name: str, *shape: int, tied: bool) -> Tensor | PackedTable:
        """The embeddings of all tokens: as stored blocks if kernels run on those; from the output
        head if they are `tied` and kernels pack heads in another format; else as a tensor."""
        kernels, packed = self.kernels, self._as_stored({name: shape[0]}, shape[1])
        if packed is None and kernels.table and kernels.pack_head and tied and HEAD not in self:
            packed = kernels.pack_head(self.table(name, *shape))
        if packed is None or kernels.table is None:
            return self.table(name, *shape)
        return kernels.table(packed, self._placement.dtype)

    def head(
        self, embedding_VD: Tensor | PackedTable, *, tied: bool, rows: slice = EVERYTHING
    ) -> PackedLinear:
        """The output head, or its `rows`. As in transformers, a stored head wins over tying."""
        vocab_size, hidden_size = embedding_VD.shape
        pack = self.kernels.pack_head or self.kernels.pack
        every = range(vocab_size)
        is_tied, is_whole = tied and HEAD not in self, every[rows] == every
        if not is_tied:
            stored = self._as_stored({HEAD: vocab_size}, hidden_size) if is_whole else None
            return stored or pack(self.table(HEAD, vocab_size, hidden_size)[rows])
        if isinstance(embedding_VD, Tensor):
            return pack(embedding_VD[rows])
        if is_whole and self.kernels.table is not None:
            return embedding_VD.packed
        return pack(embedding_VD.floats()[rows])

    def linear(
        self,
        outputs: Mapping[str, int],
        num_in: int,
        order_O: Tensor | None = None,
        *,
        columns: slice | Tensor = EVERYTHING,
    ) -> PackedLinear:
        """One matrix from the weights of `outputs`; its rows in `order_O`, its inputs `columns`."""
        is_part = isinstance(columns, Tensor) or range(num_in)[columns] != range(num_in)
        is_whole = order_O is None and not is_part
        if is_whole and not self._transposed:
            names = {f"{name}.weight": num_out for name, num_out in outputs.items()}
            if (stored := self._as_stored(names, num_in)) is not None:
                return stored
        parts = [self._part(f"{name}.weight", num_out, num_in) for name, num_out in outputs.items()]
        return self._packed(_ordered(torch.cat(parts), order_O)[:, columns].contiguous())

    def stacked(self, outputs: Mapping[str, int], count: int, num_in: int) -> list[PackedLinear]:
        """`count` matrices, each fused from one matrix of every tensor; tensors hold `count`."""
        if (stored := self._stacked_as_stored(outputs, count, num_in)) is not None:
            return stored
        stacks = [self._take(name, count, num_out, num_in) for name, num_out in outputs.items()]
        return [self._packed(torch.cat(parts)) for parts in zip(*stacks, strict=True)]

    def two_by_head(
        self, name: str, count: int, sizes: tuple[int, int], num_in: int
    ) -> tuple[list[PackedLinear], list[PackedLinear]]:
        """Two matrices of each of `count` heads, whose rows lie one after another in the matrix
        `name`: the first one transposed, and the second one as stored."""
        rows = self._take(f"{name}.weight", count * sum(sizes), num_in)
        first, second = torch.split(rows.view(count, sum(sizes), num_in), [*sizes], dim=1)
        transposed = [self._packed(one.T.contiguous()) for one in first]
        return transposed, [self._packed(one.contiguous()) for one in second]

    def stacked_conv(
        self, name: str, count: int, num_in: int, num_out: int, order_O: Tensor | None = None
    ) -> list[PackedLinear]:
        """`count` matrices stored as inputs by outputs; then their rows in the order `order_O`."""
        if (stored := self._stacked_as_stored({name: num_out}, count, num_in, order_O)) is not None:
            return stored
        stack = self._take(name, count, num_in, num_out)
        return [self._packed(_ordered(weight_IO.T, order_O).contiguous()) for weight_IO in stack]

    def bias(
        self, outputs: Mapping[str, int], *, present: bool, order_O: Tensor | None = None
    ) -> Tensor | None:
        if not present:
            return None
        parts = [
            self._weights.take(self._named(f"{name}.bias"), num_out)
            for name, num_out in outputs.items()
        ]
        return self._copy(_ordered(torch.cat(parts), order_O), torch.float32)

    def _part(self, name: str, num_out: int, num_in: int) -> Tensor:
        if self._transposed:
            return self._take(name, num_in, num_out).T
        return self._take(name, num_out, num_in)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(self._named(name), *shape, dtype=self._placement.dtype)

    def _as_stored(self, outputs: Mapping[str, int], num_in: int) -> PackedLinear | None:
        found = self._stacked_as_stored(outputs, 1, num_in)
        return found[0] if found else None

    def _stacked_as_stored(
        self, outputs: Mapping[str, int], count: int, num_in: int, order_O: Tensor | None = None
    ) -> list[PackedLinear] | None:
        """The matrices as blocks of the file; None unless the kernels run on all of them."""
        if (pack := self.kernels.pack_blocks) is None:
            return None
        stacks = [
            self._weights.stacked_blocks(self._named(name), count, num_out, num_in)
            for name, num_out in outputs.items()
        ]
        found = [stack for stack in stacks if stack is not None]
        if len(found) < len(stacks):
            return None
        if order_O is not None:
            found = [[one.in_order(order_O) for one in stack] for stack in found]
        packed = [pack(list(parts)) for parts in zip(*found, strict=True)]
        whole = [one for one in packed if one is not None]
        return whole if len(whole) == count else None

    def _packed(self, weight_OI: Tensor) -> PackedLinear:
        return self.kernels.pack(weight_OI.to(self._placement.device, self._placement.dtype))

    def _copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of our own: the file may change or vanish while the model runs."""
        return tensor.to(device=self._placement.device, dtype=dtype, copy=True)


def _ordered(rows: Tensor, order_O: Tensor | None) -> Tensor:
    return rows if order_O is None else rows[order_O]
