"""What an EAGLE net is made of, packed as its operators read it.

Shapes:  D = hidden size, V = vocabulary, W = ids that are drafted, T = positions,
         H = half of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.kernels.plan import PackedLinear


@dataclass(frozen=True, slots=True)
class EagleLayer:
    """Packed weights; norms are float32. `token_norm_D` and `state_norm_D` are EAGLE 3's."""

    fc: PackedLinear
    fc_bias_D: Tensor | None
    token_norm_D: Tensor | None
    state_norm_D: Tensor | None
    qkv: PackedLinear
    out: PackedLinear
    ffn_norm_D: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class EagleHead:
    """From the layer's states to logits: after `norm_D`, if there is one, those of the `ids_W`
    that are drafted, None for all. `weight` may be the target's."""

    weight: PackedLinear
    norm_D: Tensor | None = None
    ids_W: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EagleParts:
    """`target_norm_D`, with its eps, makes the target's last residual what its output head reads;
    only EAGLE 1 and 2 want that. `embedding_VD` may be the target's table."""

    embedding_VD: Tensor
    layer: EagleLayer
    head: EagleHead
    cos_TH: Tensor
    sin_TH: Tensor
    target_norm_D: Tensor
    target_eps: float
