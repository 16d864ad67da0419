"""The quantised matrices among a folder's tensors, unpacked from each method's layout to `Codes`.

Several stored tensors stand for one matrix: `q_proj.qweight`, `.qzeros` and `.scales` for
`q_proj.weight`. A layout is a function that unpacks them to `Codes`.

Words of 32 bits hold 32 // b codes of b bits, the lowest bits first. Nothing in a file is trusted:
the size of every part is compared with that of the codes before it is used.

Shapes:  O = outputs, I = inputs, W = words, G = groups of inputs, R = rows of scales, B = bytes,
         E = experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from outrider.core.spec import Scheme
from outrider.models.json_object import JsonObject
from outrider.plugins.published.codes import (
    BLOCK,
    E2M1,
    E2M1_GROUP,
    FLOAT8,
    FLOAT8_BLOCK,
    FLOATS,
    NVFP4_BLOCK,
    NVFP4_GROUP,
    Codes,
    Stored,
    scales_in,
)

# AWQ's order of eight neighbours in a word.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The document of a matrix of bitsandbytes, whose name ends with the kind of floats.
STATE = ".quant_state.bitsandbytes__"
_BLOCK_DIMENSIONS = 4


def plain(stored: Stored) -> Codes:
    """A byte for each weight, int8 or float8: `weight` with `weight_scale`. DeepSeek's files have
    `weight_scale_inv` instead, which in spite of its name is multiplied by as well."""
    codes_OI = stored.part(".weight", torch.int8, *FLOAT8)
    if codes_OI.ndim != 2:
        stored.wrong(".weight", f"shape {list(codes_OI.shape)}")
    name = ".weight_scale_inv" if ".weight_scale_inv" in stored.parts else ".weight_scale"
    scales = stored.part(name, *FLOATS, torch.uint8)
    if scales.dtype == torch.uint8:
        scales = _powers(scales)  # MXFP8
    elif scales.ndim == _BLOCK_DIMENSIONS:
        scales = scales.flatten(2).flatten(0, 1)  # ModelOpt's: blocks by 1 by blocks by 1
    zeros = stored.optional(".weight_zero_point", torch.int8, *FLOAT8, *FLOATS)
    scales_RG, rows, group_size = _grid(stored, name, scales, codes_OI)
    if zeros is not None:
        if zeros.numel() != scales.numel():
            stored.wrong(".weight_zero_point", f"{zeros.numel()} zeros for {scales.numel()} scales")
        zeros = zeros.float().reshape(scales_RG.shape)
    return Codes(
        codes_OI=codes_OI, scales_RG=scales_RG, zeros_RG=zeros, rows=rows, group_size=group_size
    )


def _grid(stored: Stored, name: str, scales: Tensor, codes_OI: Tensor) -> tuple[Tensor, int, int]:
    """Scales by groups of outputs and of inputs, and the sizes of both kinds of groups."""
    num_out, num_in = codes_OI.shape
    if scales.numel() == 1:
        return scales.reshape(1, 1), num_out, num_in
    if scales.shape in ((num_out,), (num_out, 1)):
        return scales.reshape(num_out, 1), 1, num_in
    block = stored.scheme.block
    if block is not None:
        rows, group_size = block
        shape = (-(-num_out // rows), -(-num_in // group_size))
        return stored.check(name, scales, *shape), rows, group_size
    if scales.ndim != 2 or scales.shape[0] != num_out or num_in % scales.shape[1]:
        stored.wrong(name, f"shape {list(scales.shape)}, where the codes have {[num_out, num_in]}")
    return scales, 1, num_in // scales.shape[1]


def _powers(exponents: Tensor) -> Tensor:
    """Powers of two whose exponents, plus 127, are bytes; 255 stands for NaN."""
    powers = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
    return powers.masked_fill_(exponents == 255, torch.nan)


def floats_of_4_bits(stored: Stored) -> Codes:
    """MXFP4 and NVFP4: two codes a byte, the lower one first. Scales are exponents for 32 inputs,
    or float8 for 16; then compressed-tensors divides all by a number, and ModelOpt multiplies."""
    name = ".weight_packed" if ".weight_packed" in stored.parts else ".weight"
    bytes_OW = stored.part(name, torch.uint8)
    if bytes_OW.ndim != 2:
        stored.wrong(name, f"shape {list(bytes_OW.shape)}")
    scales = stored.part(".weight_scale", torch.uint8, *FLOAT8)
    group = E2M1_GROUP if scales.dtype == torch.uint8 else NVFP4_GROUP
    num_out, num_in = len(bytes_OW), 2 * bytes_OW.shape[1]
    stored.check(".weight_scale", scales, num_out, -(-num_in // group))
    over = stored.optional(".weight_global_scale", *FLOATS)
    times = stored.optional(".weight_scale_2", *FLOATS)
    for part, one in ((".weight_global_scale", over), (".weight_scale_2", times)):
        if one is not None and one.numel() != 1:
            stored.wrong(part, f"shape {list(one.shape)}, where a matrix has one number")
    factor = torch.ones(1) if over is None else 1 / over.float()
    return Codes(
        codes_OI=_pairs(bytes_OW),
        scales_RG=_powers(scales) if scales.dtype == torch.uint8 else scales.float(),
        group_size=group,
        table=E2M1,
        factor=float(factor if times is None else factor * times.float()),
    )


def _pairs(packed: Tensor) -> Tensor:
    """The two codes of each byte, the lower one first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def bitsandbytes(stored: Stored) -> Codes:
    """NF4 and FP4: two codes a byte, the higher one first, in one row; a document states the shape.
    Scales of 64 codes may be bytes, which are codes of a second table in groups of 256. Int8: a
    scale of each output over 127."""
    if ".SCB" in stored.parts:
        codes_OI = stored.part(".weight", torch.int8)
        scales = stored.check(".SCB", stored.part(".SCB", *FLOATS), len(codes_OI))
        return Codes(
            codes_OI=codes_OI,
            scales_RG=scales.float()[:, None] / 127,
            group_size=codes_OI.shape[-1],
        )
    state_name = next(part for part in stored.parts if STATE in part)
    state = _document(stored, state_name)
    shape, group = state.integers("shape"), state.integer("blocksize", 64, least=1)
    bytes_W = stored.part(".weight", torch.uint8).flatten()
    if len(shape) != 2 or 2 * len(bytes_W) != shape[0] * shape[1] or shape[1] % group:
        stored.wrong(".weight", f"{len(bytes_W)} bytes for {list(shape)} in groups of {group}")
    scales = stored.part(".weight.absmax", torch.uint8, torch.float32)
    stored.check(".weight.absmax", scales, shape[0] * shape[1] // group)
    if scales.dtype == torch.uint8:
        table = stored.part(".weight.nested_quant_map", torch.float32)
        stored.check(".weight.nested_quant_map", table, 256)
        size = state.integer("nested_blocksize", 256, least=1)
        outer = stored.part(".weight.nested_absmax", torch.float32)
        stored.check(".weight.nested_absmax", outer, -(-len(scales) // size))
        outer = outer.repeat_interleave(size)[: len(scales)]
        scales = table[scales.int()] * outer + state.number("nested_offset", 0.0)
    table = stored.part(".weight.quant_map", torch.float32)
    return Codes(
        codes_OI=torch.stack([bytes_W >> 4, bytes_W & 15], dim=-1).view(*shape),
        scales_RG=scales.view(shape[0], -1),
        group_size=group,
        table=stored.check(".weight.quant_map", table, 16),
    )


def mlx(stored: Stored) -> Codes:
    """MLX: codes of a row are a stream of bits in words, the lowest bits first, with scales and
    offsets (`biases`) of each group of inputs. Experts are a stack. In its modes of floats, scales
    are bytes: exponents, or float8 (nvfp4)."""
    modules = stored.scheme.modules
    own = modules.get(stored.stem) or modules[""]
    words, scales = (
        stored.part(".weight", torch.uint32),
        stored.part(".scales", *FLOATS, torch.uint8),
    )
    if words.ndim not in (2, 3) or scales.shape[:-1] != words.shape[:-1]:
        stored.wrong(".scales", f"shape {list(scales.shape)} for codes of {list(words.shape)}")
    count = len(words) if words.ndim == 3 else None
    num_in = scales.shape[-1] * own.group_size
    bits, left = divmod(words.shape[-1] * 32, num_in)
    if left or bits not in stored.scheme.bits:
        stored.wrong(".weight", f"{words.shape[-1] * 32} bits a row for {num_in} inputs")
    stream_OB = words.flatten(0, -2).contiguous().view(torch.uint8)
    if own.mode == "affine":
        offsets = stored.check(".biases", stored.part(".biases", *FLOATS), *scales.shape)
        return Codes(
            codes_OI=_bit_stream(stream_OB, bits),
            scales_RG=scales.flatten(0, -2),
            offsets_RG=offsets.flatten(0, -2),
            group_size=own.group_size,
            count=count,
        )
    scales_RG = scales.flatten(0, -2)
    if scales_RG.dtype != torch.uint8:
        stored.wrong(".scales", f"type {scales_RG.dtype}")
    is_8_bit = own.mode == "mxfp8"
    return Codes(
        codes_OI=stream_OB.view(torch.float8_e4m3fn) if is_8_bit else _pairs(stream_OB),
        scales_RG=scales_RG.view(torch.float8_e4m3fn).float()
        if own.mode == "nvfp4"
        else _powers(scales_RG),
        table=None if is_8_bit else E2M1,
        group_size=own.group_size,
        count=count,
    )


def _bit_stream(bytes_OB: Tensor, bits: int) -> Tensor:
    """Codes of `bits` bits; `bits` bytes hold 8 of them, the lowest bits first."""
    if bits == 8:
        return bytes_OB
    some_OGB = bytes_OB.view(len(bytes_OB), -1, bits).int()
    out = torch.empty(*some_OGB.shape[:2], 8, dtype=torch.uint8)
    for position in range(8):
        byte, shift = divmod(position * bits, 8)
        code = some_OGB[..., byte] >> shift
        if shift + bits > 8:
            code = code | some_OGB[..., byte + 1] << (8 - shift)
        out[..., position] = code & ((1 << bits) - 1)
    return out.flatten(1)


def packed(stored: Stored) -> Codes:
    """compressed-tensors' `weight_packed`: neighbouring inputs share a word. Half of their range
    was added to codes. Zeros, if any, share words by outputs and were shifted likewise."""
    words_OW = stored.part(".weight_packed", torch.int32)
    num_out, num_in = _claimed(stored)
    fitting = [
        bits for bits in stored.scheme.bits if words_OW.shape == (num_out, -(-num_in * bits // 32))
    ]
    if not fitting:
        stored.wrong(".weight_packed", f"shape {list(words_OW.shape)} for {[num_out, num_in]}")
    bits = fitting[0]
    codes_OI = _unpacked(words_OW, bits)[:, :num_in]
    scales = stored.part(".weight_scale", *FLOATS)
    scales_RG, rows, group_size = _grid(stored, ".weight_scale", scales, codes_OI)
    packed_zeros = stored.optional(".weight_zero_point", torch.int32)
    if packed_zeros is None:
        zeros_RG = torch.full_like(scales_RG, 1 << (bits - 1))
    else:
        num, groups = scales_RG.shape
        stored.check(".weight_zero_point", packed_zeros, -(-num * bits // 32), groups)
        zeros_RG = _unpacked(packed_zeros.T, bits)[:, :num].T
    groups_I = stored.optional(".weight_g_idx", torch.int32, torch.int64)
    return Codes(
        codes_OI=codes_OI,
        scales_RG=scales_RG,
        zeros_RG=zeros_RG,
        rows=rows,
        group_size=group_size,
        groups_I=None
        if groups_I is None
        else _groups(stored, ".weight_g_idx", groups_I, num_in, scales_RG),
    )


def _claimed(stored: Stored) -> tuple[int, int]:
    shape = stored.part(".weight_shape", torch.int64, torch.int32)
    sizes = [int(size) for size in shape.flatten()[:3]]
    if len(sizes) != 2 or min(sizes) < 1:
        stored.wrong(".weight_shape", f"the sizes {sizes}")
    return sizes[0], sizes[1]


def _groups(
    stored: Stored, name: str, found: Tensor, num_in: int, scales_RG: Tensor
) -> Tensor | None:
    """The group of each input; None if groups are in order, or unset (-1, before calibration)."""
    groups_I = stored.check(name, found, num_in).long()
    if int(groups_I.max()) == -1 == int(groups_I.min()):
        return None
    if int(groups_I.min()) < 0 or int(groups_I.max()) >= scales_RG.shape[1]:
        stored.wrong(
            name, f"groups {int(groups_I.min())} to {int(groups_I.max())} of {scales_RG.shape[1]}"
        )
    size = -(-num_in // scales_RG.shape[1])
    return None if torch.equal(groups_I, torch.arange(num_in) // size) else groups_I


def awq(stored: Stored) -> Codes:
    """AWQ: `qweight` has inputs by words of eight outputs, in AWQ's order; so has `qzeros`."""
    words_IW, scales_GO = stored.part(".qweight", torch.int32), stored.part(".scales", *FLOATS)
    if words_IW.ndim != 2:
        stored.wrong(".qweight", f"shape {list(words_IW.shape)}")
    num_in, num_out = words_IW.shape[0], 8 * words_IW.shape[1]
    group_size = stored.scheme.group_size or num_in
    num_groups = -(-num_in // group_size)
    stored.check(".scales", scales_GO, num_groups, num_out)
    zeros_GW = stored.check(
        ".qzeros", stored.part(".qzeros", torch.int32), num_groups, words_IW.shape[1]
    )
    return Codes(
        codes_OI=_in_awq_order(words_IW).T.contiguous(),
        scales_RG=scales_GO.T.contiguous(),
        zeros_RG=_in_awq_order(zeros_GW).T.contiguous(),
        group_size=group_size,
    )


def _in_awq_order(words: Tensor) -> Tensor:
    by_position = _unpacked(words, 4).view(len(words), -1, 8)
    out = torch.empty_like(by_position)
    out[..., list(_AWQ_ORDER)] = by_position
    return out.flatten(1)


def gptq(stored: Stored) -> Codes:
    """GPTQ: `qweight` has words of inputs by outputs, `qzeros` groups by words of outputs; `g_idx`
    has the group of each input. The first version stores zeros minus 1, modulo their range."""
    scheme, bits = stored.scheme, stored.scheme.bits[0]
    words_WO, scales_GO = stored.part(".qweight", torch.int32), stored.part(".scales", *FLOATS)
    if words_WO.ndim != 2:
        stored.wrong(".qweight", f"shape {list(words_WO.shape)}")
    num_in, num_out = words_WO.shape[0] * 32 // bits, words_WO.shape[1]
    group_size = scheme.group_size or num_in
    num_groups = -(-num_in // group_size)
    stored.check(".scales", scales_GO, num_groups, num_out)
    words_GW = stored.part(".qzeros", torch.int32)
    stored.check(".qzeros", words_GW, num_groups, -(-num_out * bits // 32))
    zeros_GO = _unpacked(words_GW, bits)[:, :num_out]
    zeros_GO = (zeros_GO + scheme.zero_offset) & ((1 << bits) - 1)
    scales_RG = scales_GO.T.contiguous()
    groups_I = stored.optional(".g_idx", torch.int32, torch.int64)
    return Codes(
        codes_OI=_unpacked(words_WO.T, bits),
        scales_RG=scales_RG,
        zeros_RG=zeros_GO.T.contiguous(),
        group_size=group_size,
        groups_I=None
        if groups_I is None
        else _groups(stored, ".g_idx", groups_I, num_in, scales_RG),
    )


def mxfp4(stored: Stored) -> Codes:
    """MXFP4: `_blocks` has two codes a byte, the lower one first; `_scales` has exponents."""
    bytes_EOGB = stored.part("_blocks", torch.uint8)
    if bytes_EOGB.ndim != 4 or bytes_EOGB.shape[3] != E2M1_GROUP // 2:
        stored.wrong("_blocks", f"shape {list(bytes_EOGB.shape)}")
    exponents = stored.part("_scales", torch.uint8)
    stored.check("_scales", exponents, *bytes_EOGB.shape[:3])
    count, num_out = bytes_EOGB.shape[:2]
    return Codes(
        codes_OI=_pairs(bytes_EOGB).view(count * num_out, -1),
        scales_RG=_powers(exponents.view(count * num_out, -1)),
        group_size=E2M1_GROUP,
        table=E2M1,
        count=count,
        turned=True,
    )


def _unpacked(words_RW: Tensor, bits: int) -> Tensor:
    """The codes of each word, the lowest bits first, as bytes."""
    words_RW = words_RW.contiguous()
    mask, per_word = (1 << bits) - 1, 32 // bits
    out = torch.empty(*words_RW.shape, per_word, dtype=torch.uint8)
    for position in range(per_word):
        out[..., position] = (words_RW >> (bits * position)) & mask
    return out.flatten(1)


def _document(stored: Stored, name: str) -> JsonObject:
    """The JSON object that the bytes of a tensor are."""
    try:
        found: object = json.loads(stored.part(name, torch.uint8).contiguous().numpy().tobytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        stored.wrong(name, "bytes that are no JSON object")
    return JsonObject(f"{stored.stem}{name}", cast("dict[str, object]", found))


Layout = Callable[[Stored], Codes]
_PARTS: Mapping[Layout, tuple[str, ...]] = {
    packed: (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape",
             ".weight_g_idx"),
    plain: (".weight", ".weight_scale", ".weight_scale_inv", ".weight_zero_point"),
    awq: (".qweight", ".qzeros", ".scales"),
    gptq: (".qweight", ".qzeros", ".scales", ".g_idx"),
    mxfp4: ("_blocks", "_scales"),
    floats_of_4_bits: (".weight_packed", ".weight", ".weight_scale", ".weight_scale_2",
                       ".weight_global_scale"),
    mlx: (".weight", ".scales", ".biases"),
    bitsandbytes: (".weight", ".SCB", ".weight_format", ".weight.absmax", ".weight.quant_map",
                   ".weight.nested_absmax", ".weight.nested_quant_map",
                   *(f".weight{STATE}{kind}" for kind in ("nf4", "fp4"))),
}  # fmt: skip
# Scales of activations, and of keys and values, which are not quantised here.
_RUNTIME_SCALES = (
    ".input_scale", ".input_zero_point", ".activation_scale", ".output_scale",
    ".output_zero_point", ".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point",
    ".input_global_scale",
)  # fmt: skip
# Bytes in memory for a byte of codes, by bits: a block adds 3 or 4 bytes to 16 of codes, or 2 to
# 32. Codes of 2 and 3 bits take 4.
_HELD = {2: 2 * 19 / 16, 4: 19 / 16, 8: 34 / 32}
_HELD_MLX = {2: 2 * 20 / 16, 3: 4 / 3 * 20 / 16, 4: 20 / 16}


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix: the names of its stored tensors, and the layout that unpacks them."""

    layout: Layout
    stem: str
    names: tuple[str, ...]

    @property
    def parts(self) -> frozenset[str]:
        return frozenset(name.removeprefix(self.stem) for name in self.names)


class Quantised:
    """The quantised matrices of a folder. `stored` are the names of the folder's tensors, and
    `read` returns a tensor by its name."""

    def __init__(
        self, scheme: Scheme, stored: Collection[str], read: Callable[[str], Tensor]
    ) -> None:
        self._scheme, self._stored, self._read = scheme, stored, read
        self._matrices = _matrices(scheme, frozenset(stored))

    def __contains__(self, name: str) -> bool:
        return name in self._matrices

    @property
    def has_blocks(self) -> bool:
        return self._scheme.has_blocks

    @property
    def values_a_byte(self) -> int:
        """The largest number of values that a byte of the folder's files may hold."""
        return -(-8 // min(self._scheme.bits))

    def held_bytes(self, look: Callable[[str], Tensor], width: int) -> int:
        """Bytes of all tensors in memory if kernels run on codes; 0 if they cannot. Codes then have
        a scale and a zero for every 32 (`Codes.blocks`) instead of a matrix's other parts. Matrices
        that no blocks can hold become numbers of `width` bytes. `look` maps a stored tensor."""
        scheme = self._scheme
        if not scheme.has_blocks:
            return 0
        matrices = self._matrices.values()
        parts = {name for matrix in matrices for name in matrix.names}
        plain = sum(look(name).nbytes for name in self._stored if name not in parts)
        return plain + sum(_held(scheme, matrix, look, width) for matrix in matrices)

    def files_of(self, stored: Mapping[str, Path]) -> dict[str, Path]:
        """The file of each tensor of a plain checkpoint; a matrix is in that of its codes."""
        parts = {part for matrix in self._matrices.values() for part in matrix.names}
        found = {
            name: path
            for name, path in stored.items()
            if name not in parts and not name.endswith(_RUNTIME_SCALES)
        }
        return found | {name: stored[m.names[0]] for name, m in self._matrices.items()}

    def codes(self, name: str) -> Codes | None:
        """The codes of a matrix, None if it has none. Raises CheckpointError for bad parts."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return None
        return matrix.layout(Stored(self._scheme, matrix.stem, matrix.parts, self._read))

    def is_no_bias(self, name: str) -> bool:
        """True for a bias of zeros; GPTQ's files may have one for every matrix without a bias."""
        stem = name.removesuffix(".bias")
        return stem != name and f"{stem}.weight" in self and not bool(self._read(name).any())


def _held(scheme: Scheme, matrix: Matrix, look: Callable[[str], Tensor], width: int) -> int:
    codes = look(matrix.names[0])
    if matrix.layout is mlx:
        return _held_mlx(scheme, matrix, look, width)
    if matrix.layout is floats_of_4_bits:
        whole = codes.shape[-1] * 2 % NVFP4_BLOCK == 0
        return codes.nbytes * 40 // 32 if whole else codes.nbytes * 2 * width
    bits = 8 if matrix.layout is plain else min(scheme.bits)
    others = {name.removeprefix(matrix.stem): look(name) for name in matrix.names[1:]}
    if codes.is_floating_point():
        return round(codes.nbytes * (_held_float8(scheme, codes, others) or width))
    if not all(_in_blocks(scheme, bits, part, tensor) for part, tensor in others.items()):
        return codes.nbytes * 8 // bits * width
    return round(codes.nbytes * _HELD[bits])


def _held_float8(scheme: Scheme, codes: Tensor, others: Mapping[str, Tensor]) -> float:
    """Bytes in memory for a float8 where blocks can hold them, else 0."""
    grouped = scheme.block is not None and scheme.block[1] % FLOAT8_BLOCK != 0
    scales = [one for name, one in others.items() if "scale" in name]
    fine = any(one.ndim == 2 and one.shape[1] > 1 and scheme.block is None for one in scales)
    zeros = any(name.endswith("zero_point") for name in others)
    if codes.shape[1] % FLOAT8_BLOCK or grouped or fine or zeros:
        return 0
    return 1 + 4 / FLOAT8_BLOCK


def _held_mlx(scheme: Scheme, matrix: Matrix, look: Callable[[str], Tensor], width: int) -> int:
    words, scales = look(matrix.names[0]), look(matrix.names[1])
    own = scheme.modules.get(matrix.stem) or scheme.modules[""]
    bits = words.shape[-1] * 32 // (scales.shape[-1] * own.group_size)
    if bits not in _HELD_MLX or (own.group_size % BLOCK and own.mode != "nvfp4"):
        return words.nbytes * 8 // bits * width
    return round(words.nbytes * _HELD_MLX[bits])


def _in_blocks(scheme: Scheme, bits: int, part: str, tensor: Tensor) -> bool:
    """True if blocks can hold this part of a matrix, of which it reads only a small part."""
    tensor = tensor.flatten()
    if part.endswith("g_idx"):
        return not bool((tensor.diff() < 0).any())
    if part in (".weight_zero_point", ".qzeros") and bits == 8:
        middle = 128 - scheme.zero_offset if tensor.dtype == torch.int32 else 0
        zeros = tensor.contiguous().view(torch.uint8) if middle else tensor.float()
        return bool((zeros == middle).all())
    return tensor.dtype != torch.float32 or scales_in(tensor) is not None


def _matrices(scheme: Scheme, have: frozenset[str]) -> dict[str, Matrix]:
    return {
        name: Matrix(
            layout, stem, tuple(stem + part for part in _PARTS[layout] if stem + part in have)
        )
        for name, stem, layout in _found(scheme, have)
    }


def _found(scheme: Scheme, have: frozenset[str]) -> list[tuple[str, str, Layout]]:
    if scheme.method == "mxfp4":
        stems = [name.removesuffix("_blocks") for name in have if name.endswith("_blocks")]
        return [(stem, stem, mxfp4) for stem in stems]
    if scheme.method in ("awq", "gptq"):
        layout = awq if scheme.method == "awq" else gptq
        stems = [name.removesuffix(".qweight") for name in have if name.endswith(".qweight")]
        return [(f"{stem}.weight", stem, layout) for stem in stems]
    if scheme.method == "mlx":
        stems = [name.removesuffix(".scales") for name in have if name.endswith(".scales")]
        return [(_mlx_name(stem), stem, mlx) for stem in stems if f"{stem}.weight" in have]
    if scheme.method == "bitsandbytes":
        stems = [name.partition(STATE)[0].removesuffix(".weight") for name in have if STATE in name]
        stems += [name.removesuffix(".SCB") for name in have if name.endswith(".SCB")]
        return [(f"{stem}.weight", stem, bitsandbytes) for stem in stems]
    floats = {
        name.removesuffix(part)
        for part in (".weight_global_scale", ".weight_scale_2")
        for name in have
        if name.endswith(part)
    }
    found: list[tuple[str, str, Layout]] = []
    for name in have:
        stem = name.removesuffix(".weight_packed")
        if stem != name:
            is_float = scheme.has_4_bit_floats and f"{stem}.weight_shape" not in have
            found.append((f"{stem}.weight", stem, floats_of_4_bits if is_float else packed))
    for scale in (".weight_scale", ".weight_scale_inv"):
        for stem in [name.removesuffix(scale) for name in have if name.endswith(scale)]:
            if f"{stem}.weight" in have:
                layout = floats_of_4_bits if stem in floats else plain
                found.append((f"{stem}.weight", stem, layout))
    return found


def _mlx_name(stem: str) -> str:
    """MLX calls a stack of experts `switch_mlp`."""
    return f"{stem.replace('.switch_mlp.', '.experts.')}.weight"
