"""A layer of the Llama line, operator by operator.

    x += out(attention(rope(qkv(norm(x)))))
    x += down(silu(gate(y)) * up(y))            y = norm(x)

where norm scales by the root mean square. Families differ by their config: in biases, in the
positions of norms, in attention, and in mixtures (layer_kinds.py). Ranks sum the residual after
attention and after the FFN: rank 0 contributes the residual plus its summand, the others only their
summands.

Shapes:  N = packed tokens, D = hidden size, E = fused q, k and v, F = FFN size, I = inputs, H = a
         head or all of a kind, A = heads x head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.errors import given
from outrider.kernels.native.forward import LayerWeights
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedLinear, PackedPlan
from outrider.models.decoder import LayerKV, Scratch
from outrider.models.families import LlamaConfig
from outrider.models.layer_kinds import Norms
from outrider.models.mixture import gated, mix
from outrider.models.rope import Turns
from outrider.models.share import Alone, Comm

ALONE = Alone()


@dataclass(frozen=True, slots=True)
class LayerOperators:
    """A layer operator by operator, in sizes of a rank's share. The native call for all layers
    (kernels/native/forward.py) has the same bits. Other positions need other operators."""

    config: LlamaConfig
    turns: Turns
    comm: Comm = ALONE

    def run(
        self,
        kernels: Kernels,
        layer: LayerWeights,
        plan: PackedPlan,
        scratch: Scratch,
        kv: LayerKV,
        reads: Tensor | None = None,
    ) -> None:
        """Add the layer to `scratch.x_ND`. Attention reads `reads`; None is the normed residual."""
        if reads is None:
            reads = self._normed(kernels, layer, layer.attention_norm_D, scratch)
        self._attend(kernels, layer, reads, plan, scratch, kv)
        if self.config.traits.norms is not Norms.PARALLEL:
            reads = self._normed(kernels, layer, layer.ffn_norm_D, scratch)
        self._feed(kernels, layer, reads, scratch)

    def norm(self, kernels: Kernels, x_ND: Tensor, weight_D: Tensor, out_ND: Tensor) -> None:
        eps = self.config.rms_norm_eps
        if self.config.traits.centred:
            kernels.layer_norm(x_ND, weight_D, torch.zeros_like(weight_D), eps, out_ND)
        else:
            kernels.rms_norm(x_ND, weight_D, eps, out_ND)

    def _normed(
        self, kernels: Kernels, layer: LayerWeights, weight_D: Tensor | None, scratch: Scratch
    ) -> Tensor:
        """The normed residual, which a product reads. The router of a mixture reads float32."""
        if weight_D is None:
            return scratch.x_ND
        out_ND = scratch.normed if layer.mixture is None else scratch.norm_ND
        self.norm(kernels, scratch.x_ND, weight_D, out_ND)
        return out_ND

    def _attend(
        self,
        kernels: Kernels,
        layer: LayerWeights,
        reads: Tensor,
        plan: PackedPlan,
        scratch: Scratch,
        kv: LayerKV,
    ) -> None:
        config, qkv_NE = self.config, scratch.qkv_NE
        kernels.linear(reads, layer.qkv, qkv_NE)
        if layer.qkv_bias_E is not None:
            qkv_NE.add_(layer.qkv_bias_E)
        if layer.q_norm_H is not None and layer.k_norm_H is not None:
            self._norm_heads(kernels, layer.q_norm_H, layer.k_norm_H, qkv_NE)
        kernels.rope_append(qkv_NE, *self.turns, plan, *kv)
        attended_NA = scratch.attended_NA
        kernels.attention(qkv_NE, *kv, plan, layer.attention or config.scale, attended_NA)
        product = (attended_NA, layer.out, layer.out_bias_D)
        self._add(kernels, scratch, product, layer.attended_norm_D)

    def _norm_heads(
        self, kernels: Kernels, q_norm_H: Tensor, k_norm_H: Tensor, qkv_NE: Tensor
    ) -> None:
        config, eps = self.config, self.config.rms_norm_eps
        if not config.traits.whole_heads:
            kernels.head_norm(qkv_NE, q_norm_H, k_norm_H, config.num_kv_heads, eps)
            return
        first = 0
        for weight_H in (q_norm_H, k_norm_H):
            part_NH = qkv_NE[:, first : first + len(weight_H)]
            whole_NH = part_NH.contiguous()
            kernels.rms_norm(whole_NH, weight_H, eps, whole_NH)
            part_NH.copy_(whole_NH)
            first += len(weight_H)

    def _feed(self, kernels: Kernels, layer: LayerWeights, reads: Tensor, scratch: Scratch) -> None:
        if layer.mixture is not None:
            mixed_ND = mix(kernels, given(self.config.experts, "sizes"), layer.mixture, reads)
            self._add_to_residual(kernels, scratch, mixed_ND, layer.fed_norm_D)
            return
        kernels.linear(reads, given(layer.gate_up, "dense FFN"), scratch.up_NU)
        if layer.gate_up_bias_2F is not None:
            scratch.up_NU.add_(layer.gate_up_bias_2F)
        gated(kernels, self.config.traits.gate, scratch.up_NU, scratch.activated_NF)
        product = (scratch.activated_NF, given(layer.down, "dense FFN"), layer.down_bias_D)
        self._add(kernels, scratch, product, layer.fed_norm_D)

    def _add(
        self,
        kernels: Kernels,
        scratch: Scratch,
        product: tuple[Tensor, PackedLinear, Tensor | None],
        norm_D: Tensor | None,
    ) -> None:
        """Add a product to the residual, summed over all ranks."""
        x_NI, packed, bias_D = product
        if norm_D is not None or self.config.traits.residual_scale != 1:
            kernels.linear(x_NI, packed, scratch.norm_ND)
            if bias_D is not None:
                scratch.norm_ND.add_(bias_D)
            self._add_to_residual(kernels, scratch, scratch.norm_ND, norm_D)
            return
        kernels.linear(x_NI, packed, scratch.x_ND, accumulate=self.comm.rank == 0)
        if bias_D is not None:
            scratch.x_ND.add_(bias_D)
        self.comm.all_reduce_(scratch.x_ND)

    def _add_to_residual(
        self, kernels: Kernels, scratch: Scratch, given_ND: Tensor, norm_D: Tensor | None
    ) -> None:
        """Norm and scale `given_ND`, which is overwritten, and add it to the residual."""
        if norm_D is not None:
            self.norm(kernels, given_ND, norm_D, given_ND)
        if self.config.traits.residual_scale != 1:
            given_ND.mul_(self.config.traits.residual_scale)
        scratch.x_ND.add_(given_ND)
