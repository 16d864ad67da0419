"""Layouts of quantised matrices: unpack the tensors that a method stores into codes.

32 // b codes of b bits share a word of 32 bits, the lowest bits first. Nothing in a file is
trusted: the size of every part is compared with that of the codes before it is used.

Shapes:  O = outputs, I = inputs, W = words, G = groups of inputs, R = rows of scales, E = experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError
from outrider.models.published.codes import Codes
from outrider.models.published.scheme import Scheme

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT8 = (torch.float8_e4m3fn,)
# AWQ's order of eight neighbours in a word.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# E2M1: a sign, two bits of exponent, one of the fraction.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_BLOCK = 32
_AGAIN = "compare the files with the originals and download them again"


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored tensors of one matrix, named `stem` and a part each; `read` reads one by name."""

    scheme: Scheme
    stem: str
    parts: frozenset[str]
    read: Callable[[str], Tensor]

    def part(self, name: str, *kinds: torch.dtype) -> Tensor:
        """Read the part `name`. Raises CheckpointError if it is missing or has another dtype."""
        if name not in self.parts:
            raise CheckpointError(
                f"{self.scheme.where}: {self.stem} is quantised, and {self.stem}{name} is missing.",
                hint="is the download complete?",
            )
        found = self.read(self.stem + name)
        if found.dtype not in kinds:
            self.wrong(name, f"type {found.dtype}")
        if not found.numel():
            self.wrong(name, f"shape {list(found.shape)}")
        return found

    def optional(self, name: str, *kinds: torch.dtype) -> Tensor | None:
        return self.part(name, *kinds) if name in self.parts else None

    def check(self, name: str, found: Tensor, *shape: int) -> Tensor:
        """Return `found`. Raises CheckpointError unless it has `shape`."""
        if found.shape != shape:
            self.wrong(name, f"shape {list(found.shape)}, where the codes imply {list(shape)}")
        return found

    def wrong(self, name: str, what: str) -> NoReturn:
        raise CheckpointError(
            f"{self.scheme.where}: {self.stem}{name} has {what}, which does not fit "
            f"{self.scheme.method}.",
            hint=_AGAIN,
        )


def plain(stored: Stored) -> Codes:
    """A byte for each weight, int8 or float8: `weight` with `weight_scale`. DeepSeek's files have
    `weight_scale_inv` instead, which in spite of its name is multiplied by as well."""
    codes_OI = stored.part(".weight", torch.int8, *_FLOAT8)
    if codes_OI.ndim != 2:
        stored.wrong(".weight", f"shape {list(codes_OI.shape)}")
    name = ".weight_scale_inv" if ".weight_scale_inv" in stored.parts else ".weight_scale"
    scales = stored.part(name, *_FLOATS)
    zeros = stored.optional(".weight_zero_point", torch.int8, *_FLOAT8, *_FLOATS)
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
    scales = stored.part(".weight_scale", *_FLOATS)
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
    words_IW, scales_GO = stored.part(".qweight", torch.int32), stored.part(".scales", *_FLOATS)
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
    words_WO, scales_GO = stored.part(".qweight", torch.int32), stored.part(".scales", *_FLOATS)
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
    if bytes_EOGB.ndim != 4 or bytes_EOGB.shape[3] != _E2M1_BLOCK // 2:
        stored.wrong("_blocks", f"shape {list(bytes_EOGB.shape)}")
    exponents = stored.part("_scales", torch.uint8)
    stored.check("_scales", exponents, *bytes_EOGB.shape[:3])
    pairs = torch.stack([bytes_EOGB & 15, bytes_EOGB >> 4], dim=-1)
    count, num_out = bytes_EOGB.shape[:2]
    powers = exponents.view(count * num_out, -1).int() - 127
    return Codes(
        codes_OI=pairs.view(count * num_out, -1),
        scales_RG=torch.ldexp(torch.ones(powers.shape), powers),
        group_size=_E2M1_BLOCK,
        table=torch.tensor([*_E2M1, *(-value for value in _E2M1)]),
        count=count,
    )


def _unpacked(words_RW: Tensor, bits: int) -> Tensor:
    """The codes of each word, the lowest bits first, as bytes."""
    words_RW = words_RW.contiguous()
    mask, per_word = (1 << bits) - 1, 32 // bits
    out = torch.empty(*words_RW.shape, per_word, dtype=torch.uint8)
    for position in range(per_word):
        out[..., position] = (words_RW >> (bits * position)) & mask
    return out.flatten(1)
