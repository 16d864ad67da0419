"""The quantised matrices among a folder's tensors, unpacked from each method's layout to `Codes`.

Several stored tensors stand for one matrix: `q_proj.qweight`, `.qzeros` and `.scales` for
`q_proj.weight`. Words of 32 bits hold 32 // b codes of b bits, the lowest bits first. Nothing in a
file is trusted: the size of every part is compared with that of the codes before it is used.

Shapes:  O = outputs, I = inputs, R = rows of scales (outputs / rows), G = groups of inputs, W =
         words, N = outputs of a piece, U = blocks of an output, E = experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError
from outrider.kernels.plan import BlockRows
from outrider.models.published.scheme import Scheme

# A quantised matrix as codes and scales, the record that all published layouts are unpacked to.
#
# Numbers are made from the record. Kernels that run on blocks (csrc/groups.h) use the codes
# themselves, as blocks of 32 inputs: of GGUF's type MXFP4 or Q8_0, or of types of our own, 128 to
# 130, with a zero for each block or with scales that are bfloat16.
#
# Shapes:  O = outputs, I = inputs, R = outputs / rows, G = groups of inputs,
#          N = outputs of a piece,
#          U = blocks of an output.
_BLOCK = 32
# Numbers of the types of blocks, by the dtype of their scales.
_MXFP4 = 39
_FOUR_BITS = {torch.float16: 128, torch.bfloat16: 129}
_EIGHT_BITS = {torch.float16: 8, torch.bfloat16: 130}
# Numbers decoded at once, in float32.
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A matrix with a byte (code) for each number, and the parts of the formula for the numbers:

        x[o, i] = scales[o // rows, g] * (codes[o, i] - zeros[o // rows, g])       g = group of i

    The group of input i is i // group_size or, if inputs were quantised in another order (act
    order), groups_I[i]. Zeros of None mean 0. With a `table`, codes are indices of its values;
    float8 codes are values themselves. The matrix may be `count` matrices one below the other.
    """

    codes_OI: Tensor
    scales_RG: Tensor
    group_size: int
    zeros_RG: Tensor | None = None
    rows: int = 1
    groups_I: Tensor | None = None
    table: Tensor | None = None
    count: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in an unquantised checkpoint. Stacks of experts are stored there
        as inputs by outputs, and `numbers` returns them so."""
        num_out, num_in = self.codes_OI.shape
        if self.count == 1 and self.table is None:
            return num_out, num_in
        return self.count, num_in, num_out // self.count

    @property
    def order(self) -> Tensor | None:
        """order_I: the inputs group by group; None if they are in that order already."""
        return None if self.groups_I is None else torch.argsort(self.groups_I, stable=True)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Decode the matrix, some outputs at a time. Numbers are rounded once, from float32."""
        num_out, num_in = self.codes_OI.shape
        out_OI = torch.empty(num_out, num_in, dtype=dtype)
        step = max(1, _AT_ONCE // max(num_in, 1))
        for first in range(0, num_out, step):
            out_OI[first : first + step] = self._piece(first, min(first + step, num_out))
        if len(self.shape) == 2:
            return out_OI
        return out_OI.view(self.count, -1, num_in).transpose(1, 2)

    def blocks(self) -> Sequence[BlockRows]:
        """The matrices as blocks with the same values. Empty if no type of block can hold them: for
        float8, for inputs in another order, and for groups that are no multiple of 32 inputs."""
        num_in = self.codes_OI.shape[1]
        size = num_in if self.scales_RG.shape[1] == 1 else self.group_size
        if self.groups_I is not None or num_in % _BLOCK or size % _BLOCK:
            return ()
        found = self._as_mxfp4() if self.table is not None else self._as_integers()
        if found is None:
            return ()
        kind, raw_OUB = found
        each = raw_OUB.numpy().reshape(self.count, -1)
        num_out = len(raw_OUB) // self.count
        return [BlockRows(raw, kind, num_out, num_in) for raw in each]

    def _as_mxfp4(self) -> tuple[int, Tensor] | None:
        # 2^(e - 127); the largest e has no float32 and stands for NaN.
        if not bool(self.scales_RG.isfinite().all()):
            return None
        exponents = torch.frexp(self._by_block(self.scales_RG)).exponent + 126
        return _MXFP4, torch.cat([exponents[..., None].byte(), self._halves()], dim=2)

    def _as_integers(self) -> tuple[int, Tensor] | None:
        codes_OI, zeros_RG = self.codes_OI, self.zeros_RG
        if codes_OI.is_floating_point():
            return None
        kept = scales_in(self.scales_RG)
        if kept is None:
            return None
        scales_OU2 = self._by_block(self.scales_RG.to(kept)[..., None].view(torch.uint8))
        if codes_OI.dtype == torch.uint8 and zeros_RG is not None and int(codes_OI.max()) < 16:
            zeros_OU1 = self._by_block(zeros_RG)[..., None].byte()
            return _FOUR_BITS[kept], torch.cat([scales_OU2, zeros_OU1, self._halves()], dim=2)
        if codes_OI.dtype == torch.uint8 and zeros_RG is not None:
            if not bool((zeros_RG == 128).all()):
                return None
            codes_OI = codes_OI ^ 128
        elif zeros_RG is not None and bool(zeros_RG.any()):
            return None
        codes_OUB = codes_OI.view(torch.uint8).reshape(len(codes_OI), -1, _BLOCK)
        return _EIGHT_BITS[kept], torch.cat([scales_OU2, codes_OUB], dim=2)

    def _halves(self) -> Tensor:
        """16 bytes for each block, whose first 16 codes are the low halves of the bytes."""
        codes = self.codes_OI.reshape(len(self.codes_OI), -1, 2, _BLOCK // 2)
        return codes[:, :, 0] | codes[:, :, 1] << 4

    def _by_block(self, by_group_RG: Tensor) -> Tensor:
        num_out, num_in = self.codes_OI.shape
        groups_U = torch.arange(num_in // _BLOCK) * _BLOCK // self.group_size
        rows_O = torch.arange(num_out) // self.rows
        return by_group_RG[rows_O[:, None], groups_U[None, :]]

    def _piece(self, first: int, last: int) -> Tensor:
        codes_NI = self.codes_OI[first:last]
        table = self.table
        x_NI = codes_NI.to(torch.float32) if table is None else table[codes_NI.int()]
        at_N = torch.arange(first, last) // self.rows
        if self.zeros_RG is not None:
            x_NI -= self._spread(self.zeros_RG[at_N].float(), x_NI.shape[1])
        return x_NI.mul_(self._spread(self.scales_RG[at_N].float(), x_NI.shape[1]))

    def _spread(self, by_group_NG: Tensor, num_in: int) -> Tensor:
        """Expand values by group to values by input."""
        if self.groups_I is not None:
            return by_group_NG[:, self.groups_I]
        if by_group_NG.shape[1] == 1:
            return by_group_NG
        return by_group_NG.repeat_interleave(self.group_size, dim=1)[:, :num_in]


def scales_in(scales: Tensor) -> torch.dtype | None:
    """The dtype in which blocks can hold these scales exactly; None if neither can."""
    whole = scales.float()
    return next((d for d in _FOUR_BITS if torch.equal(whole.to(d).float(), whole)), None)


# Layouts of quantised matrices: unpack the tensors that a method stores into codes.
#
# 32 // b codes of b bits share a word of 32 bits, the lowest bits first. Nothing in a file is
# trusted: the size of every part is compared with that of the codes before it is used.
#
# Shapes:  O = outputs, I = inputs, W = words, G = groups of inputs, R = rows of scales,
#          E = experts.
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


Layout = Callable[[Stored], Codes]
_PARTS: Mapping[Layout, tuple[str, ...]] = {
    packed: (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape",
             ".weight_g_idx"),
    plain: (".weight", ".weight_scale", ".weight_scale_inv", ".weight_zero_point"),
    awq: (".qweight", ".qzeros", ".scales"),
    gptq: (".qweight", ".qzeros", ".scales", ".g_idx"),
    mxfp4: ("_blocks", "_scales"),
}  # fmt: skip
# Scales of activations, and of keys and values, which are not quantised here.
_RUNTIME_SCALES = (
    ".input_scale", ".input_zero_point", ".activation_scale", ".output_scale",
    ".output_zero_point", ".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point",
)  # fmt: skip
# Bytes in memory for a byte of codes, by bits: a block adds 3 bytes to 16 of codes, or 2 to 32.
_HELD = {2: 2 * 19 / 16, 4: 19 / 16, 8: 34 / 32}


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
    """The quantised matrices of a folder; none if `scheme` is None. `stored` are the names of the
    folder's tensors, and `read` returns a tensor by its name."""

    def __init__(
        self, scheme: Scheme | None, stored: Collection[str], read: Callable[[str], Tensor]
    ) -> None:
        self._scheme, self._stored, self._read = scheme, stored, read
        self._matrices = {} if scheme is None else _matrices(scheme, frozenset(stored))

    def __contains__(self, name: str) -> bool:
        return name in self._matrices

    @property
    def has_blocks(self) -> bool:
        return self._scheme is not None and self._scheme.has_blocks

    @property
    def values_a_byte(self) -> int:
        """The largest number of values that a byte of the folder's files may hold."""
        return 1 if self._scheme is None else 8 // min(self._scheme.bits)

    def held_bytes(self, look: Callable[[str], Tensor], width: int) -> int:
        """Bytes of all tensors in memory if kernels run on codes; 0 if they cannot. Codes then have
        a scale and a zero for every 32 (`Codes.blocks`) instead of a matrix's other parts. Matrices
        that no blocks can hold become numbers of `width` bytes. `look` maps a stored tensor."""
        scheme = self._scheme
        if scheme is None or not scheme.has_blocks:
            return 0
        matrices = self._matrices.values()
        parts = {name for matrix in matrices for name in matrix.names}
        plain = sum(look(name).nbytes for name in self._stored if name not in parts)
        return plain + sum(_held(scheme, matrix, look, width) for matrix in matrices)

    def files_of(self, stored: Mapping[str, Path]) -> dict[str, Path]:
        """The file of each tensor of a plain checkpoint; a matrix is in that of its codes."""
        parts = {part for matrix in self._matrices.values() for part in matrix.names}
        skipped = () if self._scheme is None else _RUNTIME_SCALES
        found = {
            name: path
            for name, path in stored.items()
            if name not in parts and not name.endswith(skipped)
        }
        return found | {name: stored[m.names[0]] for name, m in self._matrices.items()}

    def codes(self, name: str) -> Codes | None:
        """The codes of a matrix, None if it has none. Raises CheckpointError for bad parts."""
        matrix = self._matrices.get(name)
        if matrix is None or self._scheme is None:
            return None
        return matrix.layout(Stored(self._scheme, matrix.stem, matrix.parts, self._read))

    def is_no_bias(self, name: str) -> bool:
        """True for a bias of zeros; GPTQ's files may have one for every matrix without a bias."""
        stem = name.removesuffix(".bias")
        return stem != name and f"{stem}.weight" in self and not bool(self._read(name).any())


def _held(scheme: Scheme, matrix: Matrix, look: Callable[[str], Tensor], width: int) -> int:
    codes = look(matrix.names[0])
    bits = 8 if matrix.layout is plain else min(scheme.bits)
    others = {name.removeprefix(matrix.stem): look(name) for name in matrix.names[1:]}
    if codes.is_floating_point() or not all(
        _in_blocks(scheme, bits, part, tensor) for part, tensor in others.items()
    ):
        return codes.nbytes * 8 // bits * width
    return round(codes.nbytes * _HELD[bits])


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
    found: list[tuple[str, str, Layout]] = []
    for name in have:
        stem = name.removesuffix(".weight_packed")
        if stem != name:
            found.append((f"{stem}.weight", stem, packed))
    for scale in (".weight_scale", ".weight_scale_inv"):
        stems = [name.removesuffix(scale) for name in have if name.endswith(scale)]
        found += [(f"{s}.weight", s, plain) for s in stems if f"{s}.weight" in have]
    return found
