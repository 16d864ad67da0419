"""A quantised matrix as codes and scales: what all published layouts are unpacked to.

Between a layout and the numbers stands one record, so that a kernel that runs on codes can take it
in the numbers' place.

Shapes:  O = outputs, I = inputs, R = outputs / rows, G = groups of inputs, N = outputs of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers that are made at once, in float32.
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A byte for each number, and what makes numbers of them:

        x[o, i] = scales[o // rows, g] * (codes[o, i] - zeros[o // rows, g])       g = group of i

    Group of i is i // group_size or, where inputs were quantised in another order (act order),
    `groups_I` of it. No zeros stand for 0, and with a `table` its values stand for the codes;
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
        """That of the tensor in an unquantised checkpoint. Stacks of experts are stored there as
        inputs by outputs, as `numbers` gives them."""
        num_out, num_in = self.codes_OI.shape
        if self.count == 1 and self.table is None:
            return num_out, num_in
        return self.count, num_in, num_out // self.count

    @property
    def order(self) -> Tensor | None:
        """order_I: the inputs group by group; None where they lie so."""
        return None if self.groups_I is None else torch.argsort(self.groups_I, stable=True)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Rounded once, from float32; made some outputs at a time."""
        num_out, num_in = self.codes_OI.shape
        out_OI = torch.empty(num_out, num_in, dtype=dtype)
        step = max(1, _AT_ONCE // max(num_in, 1))
        for first in range(0, num_out, step):
            out_OI[first : first + step] = self._piece(first, min(first + step, num_out))
        if len(self.shape) == 2:
            return out_OI
        return out_OI.view(self.count, -1, num_in).transpose(1, 2)

    def _piece(self, first: int, last: int) -> Tensor:
        codes_NI = self.codes_OI[first:last]
        table = self.table
        x_NI = codes_NI.to(torch.float32) if table is None else table[codes_NI.int()]
        at_N = torch.arange(first, last) // self.rows
        if self.zeros_RG is not None:
            x_NI -= self._spread(self.zeros_RG[at_N].float(), x_NI.shape[1])
        return x_NI.mul_(self._spread(self.scales_RG[at_N].float(), x_NI.shape[1]))

    def _spread(self, by_group_NG: Tensor, num_in: int) -> Tensor:
        """By group to by input."""
        if self.groups_I is not None:
            return by_group_NG[:, self.groups_I]
        if by_group_NG.shape[1] == 1:
            return by_group_NG
        return by_group_NG.repeat_interleave(self.group_size, dim=1)[:, :num_in]
