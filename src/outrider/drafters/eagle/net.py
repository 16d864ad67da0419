"""EAGLE draft heads: one transformer layer that predicts the target's next hidden state.

At position p the layer reads the token there, e, and the target's state at the token before it, h.

Shapes:  P = tokens of a text, N = packed tokens, M = packed logits rows, K = captured layers,
         D = hidden size, V = vocabulary, E = fused q, k and v, A = heads x head size, F = FFN size,
         W = ids that are drafted, T = positions, H = half of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.protocols import StepRow
from outrider.drafters.heads import NOT_DRAFTED, NetOutput
from outrider.drafters.native import HeadBuffers, HeadPass, head_pass
from outrider.kernels.native.forward import (
    Attends,
    Entrance,
    ForwardBuffers,
    ForwardParts,
    LayerWeights,
)
from outrider.kernels.plan import PackedLinear, PackedPlan
from outrider.kernels.registry import Kernels
from outrider.models.decoder import Room, wanted_tokens
from outrider.models.families import LlamaConfig
from outrider.models.heads import HeadMemory


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """`layer` has the sizes of the one layer; its window is what the heads were trained on.

    `fused` heads (EAGLE 3) read several layers of the target and have a vocabulary of
    `draft_vocab_size`; others read what the target's output head reads, and use that head.
    `norm_before_residual` says that the residual starts from the normed state.
    """

    layer: LlamaConfig
    fused: bool
    draft_vocab_size: int
    norm_before_residual: bool = False


@dataclass(frozen=True, slots=True)
class EagleLayer:
    """Packed weights; norms are float32. `token_norm_D` and `state_norm_D` are EAGLE 3's.

    EAGLE 1 and 2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858): h is the input of the target's
    output head, after the last norm. The layer runs on fc(e, h) and has no norm before its
    attention; its output is read by the target's output head, and as h at the next position.

    EAGLE 3 (Li et al. 2025, arXiv 2503.01840): h is fc of three layers of the target, low, middle
    and high, side by side. Attention reads norm(e) and norm(h) side by side; h is the residual. The
    output is h at the next position and, after a norm, gives the logits of an output head of its
    own, which may know fewer ids than the target: draft id i is the target's i + d2t[i].
    """

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


class EagleNet:
    """HeadNet over one layer, with KV of its own. Logits are over the target's ids: an id that is
    not drafted has next to none. With a `native` pass it is that which runs."""

    def __init__(
        self,
        config: EagleConfig,
        parts: EagleParts,
        kernels: Kernels,
        state: HeadMemory,
        *,
        hidden_layers: tuple[int, ...],
        native: HeadPass | None = None,
    ) -> None:
        self._config, self._parts, self._kernels = config, parts, kernels
        self._state, self._hidden_layers = state, hidden_layers
        self.native = native
        self._vocab_size = config.layer.vocab_size

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self._hidden_layers

    @property
    def state(self) -> HeadMemory:
        return self._state

    def fuse(self, hidden_PKD: Tensor) -> Tensor:
        with torch.inference_mode():
            states_PX = hidden_PKD.float().flatten(1).contiguous()
            if self._config.fused:
                return self._fc(states_PX)
            out_PD = torch.empty_like(states_PX)
            self._kernels.rms_norm(
                states_PX, self._parts.target_norm_D, self._parts.target_eps, out_PD
            )
            return out_PD

    def step(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        if self.native is not None:
            return self.native.step(rows, hidden_ND)
        with torch.inference_mode():
            plan = self._state.plan(rows)
            token_ND = self._parts.embedding_VD[plan.tokens_N.long()].float()
            x_ND, inputs_NX = self._enter(token_ND, hidden_ND)
            self._attend(x_ND, inputs_NX, plan)
            self._feed(x_ND)
            wanted = wanted_tokens(rows)
            last_MD = x_ND if len(wanted) == len(x_ND) else x_ND[wanted]
            return NetOutput(self._logits(last_MD), x_ND)

    def _enter(self, token_ND: Tensor, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The residual, and what attention reads."""
        layer, kernels = self._parts.layer, self._kernels
        if layer.token_norm_D is None or layer.state_norm_D is None:
            x_ND = self._fc(torch.cat([token_ND, hidden_ND], dim=1))
            return x_ND, x_ND
        eps = self._config.layer.rms_norm_eps
        x_ND = hidden_ND.clone()
        normed = torch.empty_like(token_ND), torch.empty_like(x_ND)
        kernels.rms_norm(token_ND, layer.token_norm_D, eps, normed[0])
        kernels.rms_norm(x_ND, layer.state_norm_D, eps, normed[1])
        inputs_NX = torch.cat(normed, dim=1)
        return (normed[1] if self._config.norm_before_residual else x_ND), inputs_NX

    def _fc(self, inputs_NX: Tensor) -> Tensor:
        layer = self._parts.layer
        out_ND = inputs_NX.new_empty(len(inputs_NX), layer.fc.num_out)
        self._kernels.linear(inputs_NX, layer.fc, out_ND)
        return out_ND if layer.fc_bias_D is None else out_ND.add_(layer.fc_bias_D)

    def _attend(self, x_ND: Tensor, inputs_NX: Tensor, plan: PackedPlan) -> None:
        parts, kernels, config = self._parts, self._kernels, self._config.layer
        k_GSD, v_GSD = self._state.layers[0]
        qkv_NE = x_ND.new_empty(len(x_ND), config.qkv_size)
        kernels.linear(inputs_NX, parts.layer.qkv, qkv_NE)
        kernels.rope_append(qkv_NE, parts.cos_TH, parts.sin_TH, plan, k_GSD, v_GSD)
        attended_NA = x_ND.new_empty(len(x_ND), config.num_heads * config.head_dim)
        scale = config.head_dim**-0.5
        kernels.attention(qkv_NE, k_GSD, v_GSD, plan, scale, attended_NA)
        kernels.linear(attended_NA, parts.layer.out, x_ND, accumulate=True)

    def _feed(self, x_ND: Tensor) -> None:
        layer, kernels, config = self._parts.layer, self._kernels, self._config.layer
        norm_ND = torch.empty_like(x_ND)
        kernels.rms_norm(x_ND, layer.ffn_norm_D, config.rms_norm_eps, norm_ND)
        up_NF2 = x_ND.new_empty(len(x_ND), 2 * config.ffn_size)
        kernels.linear(norm_ND, layer.gate_up, up_NF2)
        activated_NF = x_ND.new_empty(len(x_ND), config.ffn_size)
        kernels.silu_mul(up_NF2, activated_NF)
        kernels.linear(activated_NF, layer.down, x_ND, accumulate=True)

    def _logits(self, x_MD: Tensor) -> Tensor:
        head, kernels = self._parts.head, self._kernels
        if head.norm_D is not None:
            norm_MD = torch.empty_like(x_MD)
            kernels.rms_norm(x_MD, head.norm_D, self._config.layer.rms_norm_eps, norm_MD)
            x_MD = norm_MD
        out_MW = x_MD.new_empty(len(x_MD), head.weight.num_out)
        if len(x_MD):
            kernels.linear(x_MD, head.weight, out_MW)
        if head.ids_W is None:
            return out_MW
        logits_MV = x_MD.new_full((len(x_MD), self._vocab_size), NOT_DRAFTED)
        return logits_MV.index_copy_(1, head.ids_W, out_MW)


def native_pass(
    config: EagleConfig, parts: EagleParts, kernels: Kernels, state: HeadMemory, room: Room
) -> HeadPass | None:
    """None without native kernels. `room` says how many tokens and logits a pass may have.

    The pass as one native call (kernels/native/forward.py), where there is a native library.
    """
    if kernels.forward is None:
        return None
    layer = config.layer
    made = ForwardParts(
        embedding_VD=parts.embedding_VD,
        final_norm_D=parts.head.norm_D,
        head=parts.head.weight,
        cos_TH=parts.cos_TH,
        sin_TH=parts.sin_TH,
        layers=[_layer(parts.layer)],
        kv=state.layers,
        buffers=_buffers(config, room.max_rows),
        eps=layer.rms_norm_eps,
        scale=layer.head_dim**-0.5,
        ffn_size=layer.ffn_size,
        hidden_SKD=parts.embedding_VD.new_empty(0),
        entrance=_entrance(config, parts.layer, room.max_rows),
    )
    return head_pass(kernels, made, state, max_logits=room.max_logits, ids_W=parts.head.ids_W)


def _entrance(config: EagleConfig, layer: EagleLayer, num_tokens: int) -> Entrance:
    room = HeadBuffers.of(num_tokens, config.layer.hidden_size)
    return Entrance(
        token_norm_D=layer.token_norm_D,
        state_norm_D=layer.state_norm_D,
        states_ND=room.states_ND,
        pair_N2D=room.pair_N2D,
        own_ND=room.own_ND,
        # EAGLE 3 has used fc by then, for the target's states.
        join=None if config.fused else layer.fc,
        join_bias_D=None if config.fused else layer.fc_bias_D,
        attends=Attends.PAIR if config.fused else Attends.RESIDUAL,
        keeps_norm=config.norm_before_residual,
    )


def _layer(layer: EagleLayer) -> LayerWeights:
    return LayerWeights(
        attention_norm_D=torch.empty(0),  # There is none; the entrance says what attention reads.
        qkv=layer.qkv,
        qkv_bias_E=None,
        q_norm_H=None,
        k_norm_H=None,
        out=layer.out,
        out_bias_D=None,
        ffn_norm_D=layer.ffn_norm_D,
        gate_up=layer.gate_up,
        gate_up_bias_2F=None,
        down=layer.down,
        down_bias_D=None,
    )


def _buffers(config: EagleConfig, num_tokens: int) -> ForwardBuffers:
    layer = config.layer

    def buffer(width: int) -> Tensor:
        return torch.empty(num_tokens, width)

    return ForwardBuffers(
        x_ND=buffer(layer.hidden_size),
        norm_ND=buffer(layer.hidden_size),
        qkv_NE=buffer(layer.qkv_size),
        attended_NA=buffer(layer.num_heads * layer.head_dim),
        up_NU=buffer(2 * layer.ffn_size),
        activated_NF=buffer(layer.ffn_size),
    )
