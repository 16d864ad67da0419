"""Published quantised checkpoints, packed here code by code from each format's description.

A format makes of a matrix the tensors that its folder stores and, as the formula says, the numbers
that they stand for. Words are put together with Python's integers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doubles.tiny_checkpoints import Variant, random_tensors, save_tensors, write_checkpoint

Numbers = np.ndarray[Any, np.dtype[Any]]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


@dataclass(frozen=True, slots=True)
class Packed:
    """The tensors by the end of their names, and the matrix that they are."""

    parts: Mapping[str, Tensor]
    numbers: Numbers


Packer = Callable[[Numbers], Packed]


@dataclass(frozen=True, slots=True)
class Format:
    """`config` is the folder's quantization_config."""

    name: str
    config: Mapping[str, Any]
    pack: Packer


def words(codes: Sequence[int], bits: int) -> list[int]:
    """Codes into words of 32 bits, the first one lowest; as signed integers."""
    per_word = 32 // bits
    found: list[int] = []
    for first in range(0, len(codes), per_word):
        word = 0
        for place, code in enumerate(codes[first : first + per_word]):
            assert 0 <= code < 1 << bits
            word |= int(code) << (bits * place)
        found.append(word - (1 << 32) if word >= 1 << 31 else word)
    return found


def packed_rows(codes: Numbers, bits: int) -> Tensor:
    """Each row for itself."""
    return torch.tensor([words(row.tolist(), bits) for row in codes], dtype=torch.int32)


def scales_of(weight: Numbers, group: int, top: float) -> Numbers:
    """One for each row and group, a float16 that is not 0."""
    rows, columns = weight.shape
    wide = np.abs(weight).reshape(rows, columns // group, group).max(axis=2)
    return np.maximum(wide / top, 1e-4).astype(np.float16)


def rounded(weight: Numbers, scales: Numbers, group: int, low: int, high: int) -> Numbers:
    """Codes with the sign, by row and group."""
    spread = np.repeat(scales.astype(np.float32), group, axis=1)
    return np.clip(np.round(weight / spread), low, high).astype(np.int64)


def formula(codes: Numbers, zeros: Numbers, scales: Numbers, groups: Sequence[int]) -> Numbers:
    """Number by number; zeros and scales are by row and group, and `groups` by column."""
    found = np.zeros(codes.shape, np.float32)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            group = groups[column]
            steps = np.float32(int(codes[row, column]) - int(zeros[row, group]))
            found[row, column] = np.float32(scales[row, group]) * steps
    return found


def half(numbers: Numbers) -> Tensor:
    return torch.tensor(numbers.tolist(), dtype=torch.float16)


def _zeros(weight: Numbers, group: int, top: int) -> Numbers:
    """Some zeros, none of them the middle one alone."""
    rows, columns = weight.shape
    wide = columns // group
    return np.array(
        [[((row * wide + at) * 5 + 3) % (top + 1) for at in range(wide)] for row in range(rows)]
    )


def pack_quantized(bits: int, group: int, *, zeros: bool = False, order: bool = False) -> Packer:
    def pack(weight: Numbers) -> Packed:
        rows, columns = weight.shape
        size = group or columns
        middle, top = 1 << (bits - 1), (1 << bits) - 1
        scales = scales_of(weight, size, middle - 1)
        stored_zeros = np.full(scales.shape, middle)
        if zeros:
            stored_zeros = _zeros(weight, size, top)
        groups = [column // size for column in range(columns)]
        if order:
            groups = groups[::-1]
        by_column = np.stack([scales[:, g].astype(np.float32) for g in groups], axis=1)
        moved = np.stack([stored_zeros[:, g] for g in groups], axis=1)
        codes = np.clip(np.round(weight / by_column) + moved, 0, top).astype(np.int64)
        parts = {
            ".weight_packed": packed_rows(codes, bits),
            ".weight_scale": half(scales),
            ".weight_shape": torch.tensor([rows, columns]),
        }
        if zeros:
            parts[".weight_zero_point"] = packed_rows(stored_zeros.T, bits).T.contiguous()
        if order:
            parts[".weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
        return Packed(parts, formula(codes, stored_zeros, scales, groups))

    return pack


def int_quantized(group: int, *, zeros: bool = False) -> Packer:
    def pack(weight: Numbers) -> Packed:
        size = group or weight.shape[1]
        scales = scales_of(weight, size, 127)
        shift = np.full(scales.shape, 3 if zeros else 0)
        codes = np.clip(rounded(weight, scales, size, -127, 127) + shift[0, 0], -128, 127)
        parts = {
            ".weight": torch.tensor(codes.tolist(), dtype=torch.int8),
            ".weight_scale": half(scales),
        }
        if zeros:
            parts[".weight_zero_point"] = torch.tensor(shift.tolist(), dtype=torch.int8)
        groups = [column // size for column in range(weight.shape[1])]
        return Packed(parts, formula(codes, shift, scales, groups))

    return pack


def float8(kind: str, block: int = 0, name: str = ".weight_scale") -> Packer:
    """A scale for a tensor, a channel or a block, in float32."""

    def pack(weight: Numbers) -> Packed:
        rows, columns = weight.shape
        tall = {"tensor": rows, "channel": 1, "block": block}[kind]
        wide = {"tensor": columns, "channel": columns, "block": block}[kind]
        scales = np.zeros((-(-rows // tall), -(-columns // wide)), np.float32)
        values = np.zeros(weight.shape, np.float32)
        numbers = np.zeros(weight.shape, np.float32)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                place = np.s_[row * tall : (row + 1) * tall, column * wide : (column + 1) * wide]
                scale = np.float32(np.abs(weight[place]).max() / 448)
                scales[row, column] = scale
                coded = torch.tensor((weight[place] / scale).tolist()).to(torch.float8_e4m3fn)
                values[place] = coded.float().numpy()
                numbers[place] = values[place] * scale
        stored = torch.tensor(scales.tolist())
        parts = {
            ".weight": torch.tensor(values.tolist()).to(torch.float8_e4m3fn),
            name: stored.reshape(()) if kind == "tensor" else stored,
        }
        return Packed(parts, numbers)

    return pack


def awq(group: int) -> Packer:
    def ordered(codes: Numbers) -> Numbers:
        """Within each eight columns, the order in which they are put into the word."""
        columns = [
            first + column for first in range(0, codes.shape[1], 8) for column in AWQ_COLUMNS
        ]
        return codes[:, columns]

    def pack(weight: Numbers) -> Packed:
        scales, zeros = scales_of(weight, group, 7), _zeros(weight, group, 15)
        spread = np.repeat(zeros, group, axis=1)
        codes = np.clip(rounded(weight, scales, group, -8, 7) + spread, 0, 15)
        parts = {
            ".qweight": packed_rows(ordered(codes.T), 4),
            ".qzeros": packed_rows(ordered(zeros.T), 4),
            ".scales": half(scales.T),
        }
        groups = [column // group for column in range(weight.shape[1])]
        return Packed(parts, formula(codes, zeros, scales, groups))

    return pack


def gptq(bits: int, group: int, *, less: int, order: bool = False, named: bool = True) -> Packer:
    """`less` is what is taken from zeros before they are stored."""

    def pack(weight: Numbers) -> Packed:
        columns, top = weight.shape[1], (1 << bits) - 1
        size = group or columns
        groups = [column // size for column in range(columns)]
        if order:
            groups = [groups[(column * 7) % columns] for column in range(columns)]
        scales, zeros = scales_of(weight, size, max(1, top // 2)), _zeros(weight, size, top)
        by_column = np.stack([scales[:, g].astype(np.float32) for g in groups], axis=1)
        moved = np.stack([zeros[:, g] for g in groups], axis=1)
        codes = np.clip(np.round(weight / by_column) + moved, 0, top).astype(np.int64)
        parts = {
            ".qweight": packed_rows(codes, bits).T.contiguous(),
            ".qzeros": packed_rows((zeros.T - less) % (top + 1), bits),
            ".scales": half(scales.T),
        }
        if named:
            parts[".g_idx"] = torch.tensor(groups, dtype=torch.int32)
        return Packed(parts, formula(codes, zeros, scales, groups))

    return pack


def mxfp4(stack: Numbers) -> Packed:
    """Experts by outputs by inputs; the numbers lie as experts by inputs by outputs."""
    experts, outputs, inputs = stack.shape
    blocks = np.zeros((experts, outputs, inputs // 32, 16), np.uint8)
    exponents = np.zeros((experts, outputs, inputs // 32), np.uint8)
    numbers = np.zeros(stack.shape, np.float32)
    for expert, output, block in np.ndindex(*exponents.shape):
        part = stack[expert, output, block * 32 : block * 32 + 32]
        power = int(np.floor(np.log2(np.abs(part).max()))) - 2
        exponents[expert, output, block] = power + 127
        for place, value in enumerate((part / 2.0**power).tolist()):
            code = int(np.argmin([abs(known - abs(value)) for known in FP4]))
            numbers[expert, output, block * 32 + place] = np.copysign(FP4[code] * 2.0**power, value)
            code |= 8 if value < 0 else 0
            blocks[expert, output, block, place // 2] |= code << (4 * (place % 2))
    parts = {"_blocks": torch.from_numpy(blocks), "_scales": torch.from_numpy(exponents)}  # pyright: ignore[reportUnknownMemberType]
    return Packed(parts, numbers.transpose(0, 2, 1))


def compressed(layout: str, **weights: object) -> dict[str, Any]:
    """As llm-compressor writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "int", "symmetric": True, "dynamic": False, **weights},
                "input_activations": None,
            }
        },
        "ignore": ["lm_head"],
    }


_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
_AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
}  # fmt: skip
_FLOAT = {"type": "float", "num_bits": 8}
FORMATS = (
    Format(
        "packed-int4",
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
        pack_quantized(4, 32),
    ),
    Format(
        "packed-int4-zeros",
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        pack_quantized(4, 32, zeros=True),
    ),
    Format(
        "packed-int4-order",
        compressed("pack-quantized", num_bits=4, strategy="group", actorder="group"),
        pack_quantized(4, 32, order=True),
    ),
    Format(
        "packed-int8-channel",
        compressed("pack-quantized", num_bits=8, strategy="channel"),
        pack_quantized(8, 0),
    ),
    Format("int8", compressed("int-quantized", num_bits=8, strategy="channel"), int_quantized(0)),
    Format(
        "int8-zeros",
        compressed("int-quantized", num_bits=8, strategy="group", symmetric=False),
        int_quantized(32, zeros=True),
    ),
    Format(
        "float8-tensor",
        compressed("float-quantized", **_FLOAT, strategy="tensor"),
        float8("tensor"),
    ),
    Format(
        "float8-channel",
        compressed("float-quantized", **_FLOAT, strategy="channel"),
        float8("channel"),
    ),
    Format(
        "float8-block-compressed",
        compressed("float-quantized", **_FLOAT, strategy="block", block_structure=[40, 40]),
        float8("block", 40),
    ),
    Format("fp8-tensor", {"quant_method": "fp8", "fmt": "e4m3"}, float8("tensor")),
    Format(
        "fp8-block",
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [40, 40]},
        float8("block", 40, ".weight_scale_inv"),
    ),
    Format("awq", _AWQ, awq(32)),
    Format("gptq", _GPTQ, gptq(4, 32, less=1)),
    Format("gptq-v2", {**_GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, 32, less=0)),
    Format("gptq-order", {**_GPTQ, "desc_act": True}, gptq(4, 32, less=1, order=True)),
    Format(
        "gptq-int8", {**_GPTQ, "bits": 8, "group_size": -1}, gptq(8, 0, less=1, named=False)
    ),
    Format("gptq-int2", {**_GPTQ, "bits": 2}, gptq(2, 32, less=1)),
)  # fmt: skip


def write_published(
    folder: Path, item: Variant, form: Format, *, seed: int = 0
) -> tuple[Path, Path]:
    """A quantised folder and an unquantised one of the same numbers, below `folder`."""
    config = {**item.config, "torch_dtype": "float32"}
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in random_tensors(config, seed=seed).items():
        if not name.endswith("_proj.weight"):
            stored[name] = plain[name] = tensor
            continue
        packed = form.pack(tensor.numpy())
        stem = name.removesuffix(".weight")
        stored |= {stem + part: value.contiguous() for part, value in packed.parts.items()}
        plain[name] = torch.from_numpy(packed.numbers)  # pyright: ignore[reportUnknownMemberType]
    quantised = write_checkpoint(folder / form.name, item)
    other = write_checkpoint(folder / f"{form.name}-plain", item)
    text = json.dumps({**config, "quantization_config": form.config})
    (quantised / "config.json").write_text(text)
    save_tensors(quantised / "model.safetensors", stored)
    save_tensors(other / "model.safetensors", plain)
    return quantised, other
