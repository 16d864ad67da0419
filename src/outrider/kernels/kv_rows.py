"""Rows of keys and values in an arena: floats, or integers of 8 bits (`--kv-dtype int8`).

A row of integers has the numbers of GGUF's format Q8_0, with all codes before the scales: D bytes
of -127 to 127, then a float16 for each 32 of them, so D + D / 16 bytes. A number is its code times
its scale. A row's bytes depend on that row alone, so speculation changes no text.

Shapes:  D = head size, R = bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.spec import KV_GROUP as GROUP

LARGEST = 127


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Number of elements of a stored row. For integers, `head_dim` is a multiple of 32."""
    return head_dim + head_dim // GROUP * 2 if dtype == torch.int8 else head_dim


def head_dim_of(rows: Tensor) -> int:
    """The head size D of rows of any shape [..., R]."""
    size = rows.shape[-1]
    return size * GROUP // (GROUP + 2) if rows.dtype == torch.int8 else size


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats [..., D] as an arena of `dtype` has them, [..., R]."""
    if dtype != torch.int8:
        return x.to(dtype)
    groups = x.float().reshape(*x.shape[:-1], -1, GROUP)
    # A number that is not finite makes its whole group NaN.
    scale = groups.abs().amax(-1, keepdim=True) / LARGEST + (groups * 0).sum(-1, keepdim=True)
    half = scale.half()
    kept = half.float()
    inverse = torch.where(kept > 0, 1 / kept, 0.0)
    codes = (groups * inverse).nan_to_num(0.0).clamp(-LARGEST, LARGEST).round().to(torch.int8)
    return torch.cat([codes.flatten(-2), half.squeeze(-1).view(torch.int8)], dim=-1)


def floats(rows: Tensor) -> Tensor:
    """Stored rows as float32, [..., D]."""
    if rows.dtype != torch.int8:
        return rows.float()
    head_dim = head_dim_of(rows)
    scales = rows[..., head_dim:].contiguous().view(torch.float16).float()
    codes = rows[..., :head_dim].reshape(*rows.shape[:-1], -1, GROUP)
    return (codes * scales[..., None]).flatten(-2)
