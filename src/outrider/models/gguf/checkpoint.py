"""A GGUF file as a checkpoint: documents and tensors under the names of a Hugging Face folder.

Some tensors also have another layout. llama.cpp rotates neighbours (2i, 2i + 1) of a head in some
architectures, where checkpoints pair (i, i + H/2), so rows of queries and keys are moved back.
GPT-2's matrices are inputs by outputs in checkpoints. Gemma's hold a norm's weight minus 1.

Shapes:  H = size of a head, O = rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import CheckpointError
from outrider.models.gguf.architectures import PAIRED, first_missing, sizes_of
from outrider.models.gguf.blocks import codebook, decode, has_codebook, held_bytes
from outrider.models.gguf.config import Architecture, Sizes, Values, config_of, notes_of
from outrider.models.gguf.reader import Entry, Header, file_key, header_of, map_file, parts_of
from outrider.models.gguf.vocabulary import tokenizer_config_of, tokenizer_of, vocabulary_of
from outrider.models.json_object import JsonObject

# PyTorch is imported where tensors are made: documents are read before it (gguf/packing.py).
if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outrider.kernels.plan import BlockRows

# Factors of rotary frequencies, which config.json has, and no weights.
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Of NVFP4: the factor of a matrix, and one of activations in 4 bits, which stay in 8 or more here.
SCALES = (".scale", ".input_scale")
# Names such as `model.layers.0.mlp.up_proj.weight`.
_LAYER_PARTS = 6


# Tensors whose names in checkpoints have no ending.
_WHOLE = (
    "attn_sinks", "exp_probs_b", "ssm_a", "ssm_d", "ssm_dt", "attn_conv_base", "ffn_conv_base",
    "layer_output_scale",
)  # fmt: skip
# Tensors that have one axis in checkpoints.
_FLAT = ("ssm_a", "ssm_d", "ssm_norm")
# Tensors that have one more axis in checkpoints, of size 1, and its number.
_NEW_AXIS = {"ffn_gate_inp_shexp": 0, "ssm_conv1d": 1, "shortconv.conv": 1}
# Tensors of an MTP block that belong to no layer of it.
MTP_NAMES = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The source of a checkpoint's tensor: `stored` is its name in the file. Its layout may differ:
    its rows are `order_O` of those in the file, rows of heads of `head_dim` are paired as
    neighbours (0: they are not), the matrix is `transposed`, numbers are 1 larger (`above_one`) or
    the exponentials of the checkpoint's, negated (`is_rate`), or checkpoints have one more axis, of
    size 1 (`new_axis`), or only one (`flat`). A bias that the file lacks is `zero`: a 0 for each
    row of the matrix
    `stored`. `factor` names the tensor of what all numbers are multiplied by, one for each matrix
    of a stack (NVFP4's second scale)."""

    stored: str
    head_dim: int = 0
    order_O: Tensor | None = None
    transposed: bool = False
    above_one: bool = False
    is_rate: bool = False
    new_axis: int | None = None
    flat: bool = False
    zero: bool = False
    factor: str = ""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        if self.zero:
            return stored[:1]
        if self.flat:
            return (prod(stored),)
        if self.order_O is not None:
            stored = (len(self.order_O), *stored[1:])
        if self.new_axis is not None:
            return (*stored[: self.new_axis], 1, *stored[self.new_axis :])
        return stored[::-1] if self.transposed else stored

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The tensor in a checkpoint's layout."""
        import torch

        tensor = tensor.flatten() if self.flat else tensor
        order_O = self.order(tensor.shape[0])
        if order_O is not None:
            tensor = tensor[order_O]
        if self.new_axis is not None:
            tensor = tensor.unsqueeze(self.new_axis)
        if self.is_rate:
            return torch.log(-tensor)
        if self.above_one:
            return tensor - 1
        return tensor.T.contiguous() if self.transposed else tensor

    def order(self, num_rows: int) -> Tensor | None:
        """order_O: the row in the file of each row of the checkpoint; None if no row moves. In a
        checkpoint's head, all first partners of pairs come before all second ones."""
        if self.order_O is not None or not self.head_dim or num_rows % self.head_dim:
            return self.order_O
        import torch

        order_H = torch.arange(self.head_dim).view(-1, 2).T.flatten()
        return torch.arange(num_rows).view(-1, self.head_dim)[:, order_H].flatten()


def tensor_sources(sizes: Sizes) -> Mapping[str, TensorSource]:
    """The tensors by their checkpoint names. Unknown ones keep their own, which no model reads."""
    header, row = sizes.header, sizes.row
    ffn_size = max(sizes.by_layer("feed_forward_length"), default=0)
    found: dict[str, TensorSource] = {}
    for stored in header.entries:
        if scaled := _own_scale(sizes, stored):
            found[scaled] = TensorSource(stored)
        if stored in FACTORS or stored.endswith(SCALES):
            continue
        module, _, ending = stored.rpartition(".")
        if ending not in ("weight", "bias"):
            module, ending = stored, ""
        block, _, part = module.removeprefix("blk.").partition(".")
        if module.startswith("blk.") and part and block.isdecimal():
            known = row.names.get(part)
            # Gate and up may be one matrix under the name of up.
            fused = known == "mlp.up_proj" and header.entries[stored].shape[0] == 2 * ffn_size
            name = _layer(sizes, int(block)) + ("mlp.gate_up_proj" if fused else known or "")
            if row.mtp and known in MTP_NAMES:
                name = MTP_NAMES[known]
        else:
            known = row.outer.get(module)
            name = known or ""
        source = TensorSource(
            stored,
            sizes.head_dim if row.paired and part in PAIRED else 0,
            transposed=part in row.transposed and ending == "weight",
            above_one=row.above_one and stored.endswith("norm.weight") and part != "ssm_norm",
            new_axis=_NEW_AXIS.get(part) if ending == "weight" else None,
            flat=part in _FLAT,
            is_rate=part == "ssm_a",
            factor=_factor(sizes, module),
        )
        # Falcon H1's norm before the FFN is stored without an ending.
        is_whole = part in _WHOLE or (not ending and part != "ffn_norm")
        whole = name if is_whole else f"{name}.{ending or 'weight'}"
        if known:
            found |= (
                {whole: source} if sizes.values is None else by_values(sizes.values, whole, source)
            )
        else:
            found[stored] = source
    return {**found, **_zero_biases(found, row)}


def _own_scale(sizes: Sizes, stored: str) -> str:
    """The name of a tensor of the model whose name ends as that of a matrix's factor does; else
    ""."""
    block, _, part = stored.removeprefix("blk.").partition(".")
    own = sizes.row.names.get(part) if stored.endswith(SCALES) else None
    return _layer(sizes, int(block)) + own if own and block.isdecimal() else ""


def _factor(sizes: Sizes, module: str) -> str:
    """The name of the tensor with the factors of the matrix `module`; "" if there is none."""
    found = f"{module}.scale"
    return found if found in sizes.header.entries and not _own_scale(sizes, found) else ""


def _layer(sizes: Sizes, block: int) -> str:
    """The prefix of the names of a layer, or of one of an MTP block behind the last layer."""
    behind = block - sizes.num_layers
    is_mtp = sizes.row.mtp and behind >= 0
    return f"mtp.layers.{behind}." if is_mtp else f"{sizes.row.stem}{block}."


def by_values(values: Values, name: str, source: TensorSource) -> dict[str, TensorSource]:
    """Sources of a tensor of a recurrent layer, whose value heads lie in another order in files."""
    stem, _, part = name.rpartition("linear_attn.")
    if not stem:
        return {name: source}
    if part == "in_proj_ba.weight":
        parts = zip(("b", "a"), values.halves(), strict=True)
        return {
            f"{stem}linear_attn.in_proj_{key}.weight": replace(source, order_O=order)
            for key, order in parts
        }
    rows = values.rows_of(part) if values.tiled else None
    return {name: source if rows is None else replace(source, order_O=rows)}


def _zero_biases(found: Mapping[str, TensorSource], row: Architecture) -> dict[str, TensorSource]:
    """Zero biases of modules without a bias, in models where other modules have one: llama.cpp adds
    only the biases that a file has, while our decoders read one for every such module."""
    qkv = ("q_proj", "k_proj", "v_proj")
    zeros: dict[str, TensorSource] = {}
    for group, needed in (
        (qkv if row.qkv_bias or not row.out_bias else (*qkv, "o_proj"), row.qkv_bias),
        (("gate_proj", "up_proj", "down_proj"), False),
    ):
        sources = {
            f"{name.removesuffix('weight')}bias": source.stored
            for name, source in found.items()
            if _module(name) in group
        }
        if needed or sources.keys() & found.keys():
            absent = sources.keys() - found.keys()
            zeros |= {name: TensorSource(sources[name], zero=True) for name in sorted(absent)}
    return zeros


def _module(name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`; "" for other kinds of names."""
    parts = name.split(".")
    return parts[-2] if parts[-1] == "weight" and len(parts) == _LAYER_PARTS else ""


# The names of PyTorch's dtypes of types that are not decoded.
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "I64": "int64"}


class GgufTensors:
    """The tensors of one file under the names of checkpoints, decoded when they are read.

    Floats have their own dtype; quantised tensors become float32.
    """

    max_read = 1 << 22

    def __init__(
        self, path: Path, entries: Mapping[str, Entry], sources: Mapping[str, TensorSource]
    ) -> None:
        """`entries` and `sources` are those of the model, of whose files `path` is one."""
        self._entries = entries
        self._sources = {
            name: source for name, source in sources.items() if entries[source.stored].path == path
        }
        self._key, self._memory = file_key(path), map_file(path)

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
        import torch

        source = self._sources[name]
        kind = self._entries[source.stored].kind.name
        return getattr(torch, "float32" if source.zero else _DTYPES.get(kind, "float32"))

    def blocks(self, name: str) -> Sequence[BlockRows]:
        """The stored rows of a matrix, or of each matrix of a stack. Empty for a tensor that is not
        quantised or has another layout in checkpoints."""
        from outrider.kernels.plan import BlockRows

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
        num_out = num_out if order_O is None else len(order_O)
        factors = np.broadcast_to(self._factors(source), prod(stack))
        book = codebook(entry.kind.name) if has_codebook(entry.kind.name) else None
        size = entry.num_bytes // prod(stack)
        starts = [(self._key, entry.offset + index * size) for index in range(prod(stack))]
        parts = zip(raw.reshape(prod(stack), -1), factors, starts, strict=True)
        number = entry.kind.number
        return [
            BlockRows(part, number, num_out, num_in, order_O, book, float(factor), start)
            for part, factor, start in parts
        ]

    def get_tensor(self, name: str) -> Tensor:
        import torch

        source = self._sources[name]
        entry = self._entries[source.stored]
        if source.zero:
            return torch.zeros(source.shape(entry.shape))
        raw = np.frombuffer(self._memory, np.uint8, entry.num_bytes, entry.offset)
        # Copied if nothing is decoded: PyTorch accepts no read-only memory.
        numbers = decode(raw, entry.kind) if entry.kind.is_quantised else raw.copy()
        flat: Tensor = torch.from_numpy(numbers)  # pyright: ignore[reportUnknownMemberType]
        tensor = flat.view(self.dtype_of(name)).view(entry.shape)
        if source.factor:
            factors = torch.tensor(self._factors(source))
            tensor = tensor * factors.view(-1, *[1] * (tensor.dim() - 1))
        return source.laid_out(tensor)

    def _factors(self, source: TensorSource) -> NDArray[np.float32]:
        """One factor, or one for each matrix of a stack."""
        if not source.factor:
            return np.ones(1, np.float32)
        entry = self._entries[source.factor]
        return np.frombuffer(map_file(entry.path), np.float32, entry.num_values, entry.offset)


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
