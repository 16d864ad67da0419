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
    """`config` is the folder's quantization_config, or what another `key` of config.json has."""

    name: str
    config: Mapping[str, Any]
    pack: Packer
    key: str = "quantization_config"


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


def _nearest(table: Sequence[float], value: float) -> int:
    return int(np.argmin([abs(known - value) for known in table]))


SIGNED_FP4 = (*FP4, *(-value for value in FP4))


def _in_bytes(codes: Numbers, *, low_first: bool = True) -> Tensor:
    """Two codes of 4 bits a byte."""
    rows: list[list[int]] = []
    for row in codes.tolist():
        pairs = zip(row[::2], row[1::2], strict=True)
        rows.append([a | b << 4 if low_first else b | a << 4 for a, b in pairs])
    return torch.tensor(rows, dtype=torch.uint8)


def floats_of_4_bits(kind: str) -> Packer:
    """`mx`: 32 with a power of two. `nv` and `modelopt`: 16 with a float8, and one number for all,
    which the first divides by."""
    group = 32 if kind == "mx" else 16

    def pack(weight: Numbers) -> Packed:
        rows, columns = weight.shape
        codes = np.zeros(weight.shape, np.int64)
        numbers = np.zeros(weight.shape, np.float32)
        scales = np.zeros((rows, columns // group), np.float32)
        over = np.float32(448 * 6 / np.abs(weight).max())
        factor = np.float32(1) if kind == "mx" else np.float32(1) / over
        for row, part in np.ndindex(*scales.shape):
            place = np.s_[row, part * group : (part + 1) * group]
            wide = float(np.abs(weight[place]).max())
            if kind == "mx":
                scale = np.float32(2.0 ** np.ceil(np.log2(wide / 6)))
            else:
                scale = torch.tensor(wide / 6 * over).to(torch.float8_e4m3fn).float().numpy()
            scales[row, part] = scale
            each = [_nearest(SIGNED_FP4, v / (scale * factor)) for v in weight[place].tolist()]
            codes[place] = each
            exact = np.array([SIGNED_FP4[code] for code in each], np.float32) * scale
            numbers[place] = exact * factor
        if kind == "mx":
            exponents = (np.log2(scales) + 127).astype(np.int64).tolist()
            parts = {".weight_scale": torch.tensor(exponents, dtype=torch.uint8)}
            return Packed({".weight_packed": _in_bytes(codes), **parts}, numbers)
        stored = torch.tensor(scales.tolist()).to(torch.float8_e4m3fn)
        if kind == "nv":
            end = {".weight_global_scale": torch.tensor([float(over)])}
            return Packed(
                {".weight_packed": _in_bytes(codes), ".weight_scale": stored, **end}, numbers
            )
        end = {".weight_scale_2": torch.tensor(float(factor)), ".input_scale": torch.tensor(0.5)}
        return Packed({".weight": _in_bytes(codes), ".weight_scale": stored, **end}, numbers)

    return pack


def mxfp8(weight: Numbers) -> Packed:
    rows, columns = weight.shape
    scales = np.zeros((rows, columns // 32), np.int64)
    values, numbers = np.zeros(weight.shape, np.float32), np.zeros(weight.shape, np.float32)
    for row, part in np.ndindex(*scales.shape):
        place = np.s_[row, part * 32 : part * 32 + 32]
        power = int(np.ceil(np.log2(float(np.abs(weight[place]).max()) / 448)))
        scales[row, part] = power + 127
        coded = torch.tensor((weight[place] / 2.0**power).tolist()).to(torch.float8_e4m3fn)
        values[place] = coded.float().numpy()
        numbers[place] = values[place] * np.float32(2.0**power)
    parts = {
        ".weight": torch.tensor(values.tolist()).to(torch.float8_e4m3fn),
        ".weight_scale": torch.tensor(scales.tolist(), dtype=torch.uint8),
    }
    return Packed(parts, numbers)


# Any 16 numbers will do for a table, as files hold their own.
NF4 = (-1, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1)


def bitsandbytes(kind: str, *, nested: bool = False) -> Packer:
    """Groups of 16 in one row, their scales in float32 or, `nested`, as bytes of a second table in
    groups of 256."""

    def pack(weight: Numbers) -> Packed:
        rows, columns = weight.shape
        if kind == "int8":
            tops = np.abs(weight).max(axis=1)
            codes = np.asarray(np.round(weight / tops[:, None] * 127), np.int64)
            parts = {
                ".weight": torch.tensor(codes.tolist(), dtype=torch.int8),
                ".SCB": torch.tensor(tops.tolist()),
                ".weight_format": torch.tensor(0, dtype=torch.uint8),
            }
            scales = (tops / np.float32(127)).astype(np.float32)
            return Packed(parts, codes.astype(np.float32) * scales[:, None])
        parts: dict[str, torch.Tensor] = {}
        scales = np.abs(weight).reshape(-1, 16).max(axis=1).astype(np.float32)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 16, "shape": [rows, columns]}
        stored = torch.tensor(scales.tolist())
        if nested:
            table = np.linspace(-1, 1, 256, dtype=np.float32)
            offset = np.float32(scales.mean())
            tops = [
                np.abs(scales[at : at + 256] - offset).max() for at in range(0, len(scales), 256)
            ]
            outer = np.array(tops, np.float32)
            by_scale = np.repeat(outer, 256)[: len(scales)]
            inner = [
                _nearest(table.tolist(), float(s)) for s in np.asarray((scales - offset) / by_scale)
            ]
            scales = table[inner] * by_scale + offset
            stored = torch.tensor(inner, dtype=torch.uint8)
            parts |= {
                ".weight.nested_absmax": torch.tensor(outer.tolist()),
                ".weight.nested_quant_map": torch.tensor(table.tolist()),
            }
            state |= {"nested_blocksize": 256, "nested_offset": float(offset)}
        parts[".weight.absmax"] = stored
        spread = np.repeat(scales, 16).reshape(rows, columns)
        codes = np.array([[_nearest(NF4, float(v)) for v in row] for row in weight / spread])
        document = json.dumps(state).encode()
        parts |= {
            ".weight": _in_bytes(codes, low_first=False).reshape(-1, 1),
            ".weight.quant_map": torch.tensor(NF4),
            f".weight.quant_state.bitsandbytes__{kind}": torch.tensor(
                list(document), dtype=torch.uint8
            ),
        }
        return Packed(parts, np.array(NF4, np.float32)[codes] * spread)

    return pack


def mlx(bits: int, dtype: torch.dtype = torch.bfloat16) -> Packer:
    """Groups of 32 with a scale and an offset; a row is one stream of bits."""

    def pack(weight: Numbers) -> Packed:
        rows, columns = weight.shape
        parts = weight.reshape(rows, columns // 32, 32)
        top = (1 << bits) - 1
        low, high = parts.min(axis=2), parts.max(axis=2)
        scales = torch.tensor(((high - low) / top).tolist()).to(dtype)
        offsets = torch.tensor(low.tolist()).to(dtype)
        by_column = [np.repeat(one.float().numpy(), 32, axis=1) for one in (scales, offsets)]
        codes = np.clip(np.round((weight - by_column[1]) / by_column[0]), 0, top).astype(np.int64)
        rows_of_words: list[list[int]] = []
        for row in codes.tolist():
            stream = sum(code << (bits * at) for at, code in enumerate(row))
            count = columns * bits // 32
            rows_of_words.append([stream >> 32 * at & 0xFFFFFFFF for at in range(count)])
        stored = {
            ".weight": torch.tensor(rows_of_words, dtype=torch.int64).to(torch.uint32),
            ".scales": scales,
            ".biases": offsets,
        }
        return Packed(stored, codes.astype(np.float32) * by_column[0] + by_column[1])

    return pack


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
    Format(
        "mxfp4-compressed",
        compressed("mxfp4-pack-quantized", type="float", num_bits=4, group_size=32),
        floats_of_4_bits("mx"),
    ),
    Format(
        "nvfp4-compressed",
        compressed("nvfp4-pack-quantized", type="float", num_bits=4, group_size=16),
        floats_of_4_bits("nv"),
    ),
    Format(
        "nvfp4-modelopt",
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        floats_of_4_bits("modelopt"),
    ),
    Format(
        "mxfp8-compressed",
        compressed("mxfp8-quantized", **_FLOAT, strategy="group", group_size=32),
        mxfp8,
    ),
    Format("mxfp8-modelopt", {"quant_method": "modelopt", "quant_algo": "MXFP8"}, mxfp8),
    Format("nf4", {"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes("nf4")),
    Format(
        "fp4-nested", {"quant_method": "bitsandbytes", "load_in_4bit": True},
        bitsandbytes("fp4", nested=True),
    ),
    Format(
        "bitsandbytes-int8", {"quant_method": "bitsandbytes", "load_in_8bit": True},
        bitsandbytes("int8"),
    ),
    *(
        Format(f"mlx-{bits}", {"group_size": 32, "bits": bits}, mlx(bits), "quantization")
        for bits in (2, 3, 4, 5, 6, 8)
    ),
    Format(
        "mlx-float16", {"group_size": 32, "bits": 4}, mlx(4, torch.float16), "quantization"
    ),
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
    text = json.dumps({**config, form.key: form.config})
    (quantised / "config.json").write_text(text)
    save_tensors(quantised / "model.safetensors", stored)
    save_tensors(other / "model.safetensors", plain)
    return quantised, other
