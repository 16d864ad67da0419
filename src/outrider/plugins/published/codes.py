"""A quantised matrix as codes and scales, the record that all published layouts are unpacked to.

Numbers are made from the record. Kernels that run on blocks (csrc/groups.h) use the codes
themselves, as blocks of 32 inputs: of GGUF's types MXFP4, NVFP4, Q4_1 or Q8_0, or of types of our
own, 128 to 132: with a zero for each block, with scales that are bfloat16, or float8.

Shapes:  O = outputs, I = inputs, R = rows of scales (outputs / rows), G = groups of inputs,
         N = outputs of a piece, U = blocks of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError
from outrider.core.spec import Scheme
from outrider.kernels.plan import BlockRows

BLOCK = 32
# Numbers of the types of blocks, by the dtype of their scales.
_MXFP4, _NVFP4 = 39, 40
_FOUR_BITS = {torch.float16: 128, torch.bfloat16: 129}
_FOUR_BITS_WITH_OFFSETS = {torch.float16: 3, torch.bfloat16: 131}
_EIGHT_BITS = {torch.float16: 8, torch.bfloat16: 130}
_FLOAT8, FLOAT8_BLOCK = 132, 128
# Numbers decoded at once, in float32.
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A matrix with a byte (code) for each number, and the parts of the formula for the numbers:

        x[o, i] = scales[o // rows, g] * (codes[o, i] - zeros[o // rows, g]) + offsets[o, g]

    g is the group of input i: i // group_size or, if inputs were quantised in another order (act
    order), groups_I[i]. Zeros and offsets of None mean 0. With a `table`, codes are indices of its
    values; float8 codes are values themselves. All numbers are multiplied by `factor`. The matrix
    may be `count` matrices one below the other, a stack, which checkpoints of some families hold
    `turned`, as inputs by outputs.
    """

    codes_OI: Tensor
    scales_RG: Tensor
    group_size: int
    zeros_RG: Tensor | None = None
    rows: int = 1
    groups_I: Tensor | None = None
    table: Tensor | None = None
    offsets_RG: Tensor | None = None
    factor: float = 1.0
    count: int | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in an unquantised checkpoint, which `numbers` returns."""
        num_out, num_in = self.codes_OI.shape
        if self.count is None:
            return num_out, num_in
        if self.turned:
            return self.count, num_in, num_out // self.count
        return self.count, num_out // self.count, num_in

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
        if self.count is None:
            return out_OI
        stack = out_OI.view(self.count, -1, num_in)
        return stack.transpose(1, 2) if self.turned else stack

    def blocks(self) -> Sequence[BlockRows]:
        """The matrices as blocks with the same values. Empty if no type of block can hold them: for
        inputs in another order, and for groups that are no multiple of 32 inputs (16 of NVFP4, 128
        of float8)."""
        num_in = self.codes_OI.shape[1]
        size = num_in if self.scales_RG.shape[1] == 1 else self.group_size
        if self.groups_I is not None:
            return ()
        if self.table is not None and not torch.equal(self.table, E2M1):
            return ()
        if self.table is not None and size == NVFP4_GROUP:
            found = self._as_nvfp4()
        elif self.codes_OI.is_floating_point():
            found = self._as_float8(size)
        elif num_in % BLOCK or size % BLOCK:
            return ()
        else:
            found = self._as_mxfp4() if self.table is not None else self._as_integers()
        if found is None:
            return ()
        kind, raw_OUB = found
        count = self.count or 1
        each = raw_OUB.numpy().reshape(count, -1)
        num_out = len(raw_OUB) // count
        return [BlockRows(raw, kind, num_out, num_in, factor=self.factor) for raw in each]

    def _as_mxfp4(self) -> tuple[int, Tensor] | None:
        # 2^(e - 127); the largest e has no float32 and stands for NaN.
        if not bool(self.scales_RG.isfinite().all()):
            return None
        exponents = torch.frexp(self._by_block(self.scales_RG)).exponent + 126
        return _MXFP4, torch.cat([exponents[..., None].byte(), self._halves()], dim=2)

    def _as_nvfp4(self) -> tuple[int, Tensor] | None:
        # A block has 64 inputs: four scales, then the codes of each 16.
        num_out, num_in = self.codes_OI.shape
        scales_RG = self.scales_RG.float()
        bytes_RG = scales_RG.to(torch.float8_e4m3fn)
        if num_in % NVFP4_BLOCK or not torch.equal(bytes_RG.float(), scales_RG):
            return None
        scales_OU4 = bytes_RG.view(torch.uint8).view(num_out, -1, NVFP4_BLOCK // NVFP4_GROUP)
        return _NVFP4, torch.cat([scales_OU4, self._halves(NVFP4_GROUP, NVFP4_BLOCK)], dim=2)

    def _as_float8(self, size: int) -> tuple[int, Tensor] | None:
        bytes_OI = self.codes_OI.view(torch.uint8)
        num_out, num_in = bytes_OI.shape
        if num_in % FLOAT8_BLOCK or size % FLOAT8_BLOCK or self.zeros_RG is not None:
            return None
        if bool((bytes_OI & 127 == 127).any()):  # NaN
            return None
        scales_OU = self._by_block(self.scales_RG.float(), FLOAT8_BLOCK)
        scales_OU4 = scales_OU[..., None].contiguous().view(torch.uint8)
        return _FLOAT8, torch.cat([scales_OU4, bytes_OI.view(num_out, -1, FLOAT8_BLOCK)], dim=2)

    def _with_offsets(self, offsets_RG: Tensor, kept: torch.dtype) -> tuple[int, Tensor] | None:
        if scales_in(offsets_RG, (kept,)) is None or int(self.codes_OI.max()) >= 16:
            return None
        pairs = torch.stack([self._by_block(self.scales_RG), self._by_block(offsets_RG)], dim=2)
        raw = torch.cat([pairs.to(kept).view(torch.uint8), self._halves()], dim=2)
        return _FOUR_BITS_WITH_OFFSETS[kept], raw

    def _as_integers(self) -> tuple[int, Tensor] | None:
        codes_OI, zeros_RG = self.codes_OI, self.zeros_RG
        kept = None if codes_OI.is_floating_point() else scales_in(self.scales_RG)
        if kept is None:
            return None
        if self.offsets_RG is not None:
            return self._with_offsets(self.offsets_RG, kept)
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
        codes_OUB = codes_OI.view(torch.uint8).reshape(len(codes_OI), -1, BLOCK)
        return _EIGHT_BITS[kept], torch.cat([scales_OU2, codes_OUB], dim=2)

    def _halves(self, part: int = BLOCK, block: int = BLOCK) -> Tensor:
        """Bytes of each block: the first half of the codes of a part are the low halves of bytes,
        and the others the high ones."""
        codes = self.codes_OI.reshape(len(self.codes_OI), -1, block // part, 2, part // 2)
        return (codes[:, :, :, 0] | codes[:, :, :, 1] << 4).flatten(2)

    def _by_block(self, by_group_RG: Tensor, block: int = BLOCK) -> Tensor:
        num_out, num_in = self.codes_OI.shape
        groups_U = torch.arange(num_in // block) * block // self.group_size
        rows_O = torch.arange(num_out) // self.rows
        return by_group_RG[rows_O[:, None], groups_U[None, :]]

    def _piece(self, first: int, last: int) -> Tensor:
        codes_NI = self.codes_OI[first:last]
        table = self.table
        x_NI = codes_NI.to(torch.float32) if table is None else table[codes_NI.int()]
        at_N = torch.arange(first, last) // self.rows
        if self.zeros_RG is not None:
            x_NI -= self._spread(self.zeros_RG[at_N].float(), x_NI.shape[1])
        x_NI.mul_(self._spread(self.scales_RG[at_N].float(), x_NI.shape[1]))
        if self.offsets_RG is not None:
            x_NI += self._spread(self.offsets_RG[at_N].float(), x_NI.shape[1])
        return x_NI if self.factor == 1.0 else x_NI.mul_(self.factor)

    def _spread(self, by_group_NG: Tensor, num_in: int) -> Tensor:
        """Expand values by group to values by input."""
        if self.groups_I is not None:
            return by_group_NG[:, self.groups_I]
        if by_group_NG.shape[1] == 1:
            return by_group_NG
        return by_group_NG.repeat_interleave(self.group_size, dim=1)[:, :num_in]


def scales_in(
    scales: Tensor, among: Sequence[torch.dtype] = (torch.float16, torch.bfloat16)
) -> torch.dtype | None:
    """The first dtype in which blocks can hold these scales exactly; None if none can."""
    whole = scales.float()
    return next((d for d in among if torch.equal(whole.to(d).float(), whole)), None)


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn,)
# E2M1: a sign, two bits of exponent, one of the fraction.
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)])
E2M1_GROUP = 32
NVFP4_GROUP, NVFP4_BLOCK = 16, 64
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
