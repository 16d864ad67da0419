"""Tables of rotary positions: cos and sin of position times frequency, for one half of a head.

Plain frequencies are theta ** (-2i / D). The ways to stretch a window change them once, at load:
`linear` divides all by the factor; `llama3` divides the slow ones, leaves the fast ones and blends
between; `yarn` blends by how often a pair turns within the original window. Every expression
follows transformers operation by operation in float32, because a last-bit difference in a
frequency grows with the position.

Shapes:  T = positions, H = half of a head's size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.models.hf_config import Rope


def rope_tables(rope: Rope, *, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """(cos_TH, sin_TH) in float32, both times the attention factor."""
    freqs_H = frequencies(rope, head_dim)
    angles_TH = torch.arange(num_positions, dtype=torch.float32)[:, None] * freqs_H
    return angles_TH.cos() * rope.attention_factor, angles_TH.sin() * rope.attention_factor


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    turns_H = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, turns_H)
    freqs_H = 1.0 / turns_H
    if rope.kind == "linear":
        return freqs_H / rope.factor
    return _llama3(rope, freqs_H) if rope.kind == "llama3" else freqs_H


def _llama3(rope: Rope, freqs_H: Tensor) -> Tensor:
    low, high, window = rope.low_freq_factor, rope.high_freq_factor, rope.original_tokens
    wavelength_H = 2 * math.pi / freqs_H
    slow_H = wavelength_H > window / low
    fast_H = wavelength_H < window / high
    stretched_H = torch.where(slow_H, freqs_H / rope.factor, freqs_H)
    blend_H = (window / wavelength_H - low) / (high - low)
    blended_H = (1 - blend_H) * stretched_H / rope.factor + blend_H * stretched_H
    return torch.where(slow_H | fast_H, stretched_H, blended_H)


def _yarn(rope: Rope, head_dim: int, turns_H: Tensor) -> Tensor:
    low = _dim_that_turns(rope.beta_fast, rope, head_dim)
    high = _dim_that_turns(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp_H = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep_H = 1 - ramp_H.clamp(0, 1)
    return 1.0 / (rope.factor * turns_H) * (1 - keep_H) + 1.0 / turns_H * keep_H


def _dim_that_turns(num_turns: float, rope: Rope, head_dim: int) -> float:
    """The dimension whose pair turns `num_turns` times within the original window."""
    wavelength = rope.original_tokens / (num_turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))
