"""Rotary positions (RoPE): tables of cos and sin for half of a head.

Plain frequencies are theta ** (-2i / D). Stretched windows change them once, at load: `linear`
divides all by the factor; `llama3` divides the slow ones, leaves the fast ones and blends between;
`yarn` blends by how often a pair turns within the original window; `longrope` divides each by a
factor of its own. With `proportional` a part of the pairs of a head turns, with the frequencies
of a whole one. Every expression follows transformers operation by operation in float32, because
a last-bit difference in a frequency grows with the position.

Shapes:  T = positions, P = some of them, R = half of a head's rotated dimensions, H = half of a
         head's size, D = head size.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.models.rope_config import Rope

_POSITIONS_AT_ONCE = 1 << 16
# Tables of cos and sin, both of shape TH.
Turns: TypeAlias = tuple[Tensor, Tensor]


class RotatedConfig(Protocol):
    @property
    def rope(self) -> Rope: ...
    @property
    def head_dim(self) -> int: ...


def turns_of(config: RotatedConfig, num_positions: int, device: torch.device) -> Turns:
    """The tables of a model, on its device."""
    cos_TH, sin_TH = rope_tables(config.rope, head_dim=config.head_dim, num_positions=num_positions)
    return cos_TH.to(device), sin_TH.to(device)


def rope_tables(rope: Rope, *, head_dim: int, num_positions: int) -> Turns:
    """(cos_TH, sin_TH) in float32, both times the attention factor; (1, 0) for dimensions that do
    not rotate.

    Computed some positions at a time, so that a long window takes no more memory than its tables.
    """
    freqs_R = frequencies(rope, head_dim)
    num_turning = freqs_R.shape[0]
    cos_TH = torch.ones(num_positions, head_dim // 2, dtype=torch.float32)
    sin_TH = torch.zeros(num_positions, head_dim // 2, dtype=torch.float32)
    for first in range(0, num_positions, _POSITIONS_AT_ONCE):
        end = min(first + _POSITIONS_AT_ONCE, num_positions)
        angles_PR = torch.arange(first, end, dtype=torch.float32)[:, None] * freqs_R
        cos_TH[first:end, :num_turning] = angles_PR.cos() * rope.attention_factor
        sin_TH[first:end, :num_turning] = angles_PR.sin() * rope.attention_factor
    return cos_TH, sin_TH


def still_turns(turns: Turns) -> Turns:
    """Tables like `turns` for layers whose heads do not rotate with positions."""
    cos_TH, sin_TH = turns
    return torch.ones_like(cos_TH), torch.zeros_like(sin_TH)


def growth_of(growth: tuple[float, int], cos_TH: Tensor) -> Tensor:
    """The factors of queries by position, for as many as `cos_TH` has; few of them differ."""
    (beta, step), num_positions = growth, len(cos_TH)
    levels_T = torch.arange(num_positions) // step
    factors = [1 + beta * math.log(1 + level) for level in range(num_positions // step + 1)]
    return torch.tensor(factors)[levels_T].to(cos_TH.device)


def turning_order(rope: Rope, head_dim: int, *, interleaved: bool = False) -> Tensor | None:
    """order_D: the checkpoint's dimension of each dimension of a head as the kernels pair them.

    Kernels rotate (i, i + D/2), checkpoints (i, i + R), or (2i, 2i + 1) if `interleaved`. If only a
    part of a head rotates, the second half of that part must move up to D/2. None if nothing moves.
    The products of queries and keys do not depend on the order, as both have the same one.
    """
    if interleaved:
        return torch.arange(head_dim).view(-1, 2).T.flatten()
    turns = rope.rotary_dim(head_dim)
    if turns == head_dim or rope.kind == "proportional":
        return None
    dims_D = torch.arange(head_dim)
    turning, still = dims_D[:turns], dims_D[turns:]
    first, second = (torch.chunk(part, 2) for part in (turning, still))
    return torch.cat([first[0], second[0], first[1], second[1]])


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """freqs_R in radians a position."""
    dim = rope.rotary_dim(head_dim)
    if rope.kind == "proportional":
        steps_R = torch.arange(0, dim, 2, dtype=torch.float32)
        return 1.0 / rope.theta ** (steps_R / head_dim) / rope.factor
    turns_R = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, dim, turns_R)
    if rope.kind == "longrope":
        factors = rope.long_factors if rope.is_long else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * turns_R)
    freqs_R = 1.0 / turns_R
    if rope.kind == "linear":
        return freqs_R / rope.factor
    return _llama3(rope, freqs_R) if rope.kind == "llama3" else freqs_R


def _llama3(rope: Rope, freqs_R: Tensor) -> Tensor:
    low, high, window = rope.low_freq_factor, rope.high_freq_factor, rope.original_tokens
    wavelength_R = 2 * math.pi / freqs_R
    slow_R = wavelength_R > window / low
    fast_R = wavelength_R < window / high
    stretched_R = torch.where(slow_R, freqs_R / rope.factor, freqs_R)
    blend_R = (window / wavelength_R - low) / (high - low)
    blended_R = (1 - blend_R) * stretched_R / rope.factor + blend_R * stretched_R
    return torch.where(slow_R | fast_R, stretched_R, blended_R)


def _yarn_frequencies(rope: Rope, dim: int, turns_R: Tensor) -> Tensor:
    low = _dim_that_turns(rope.beta_fast, rope, dim)
    high = _dim_that_turns(rope.beta_slow, rope, dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp_R = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    keep_R = 1 - ramp_R.clamp(0, 1)
    return 1.0 / (rope.factor * turns_R) * (1 - keep_R) + 1.0 / turns_R * keep_R


def _dim_that_turns(num_turns: float, rope: Rope, dim: int) -> float:
    """The dimension whose pair turns `num_turns` times within the original window."""
    wavelength = rope.original_tokens / (num_turns * 2 * math.pi)
    return dim * math.log(wavelength) / (2 * math.log(rope.theta))
