"""The pass of EAGLE heads as one native call (kernels/native/forward.py), where there is a native
library.

EAGLE 1 and 2 join token and state by fc, and attention reads the residual as it is. In EAGLE 3 the
residual is the state, and attention reads the normed pair.

Shapes:  N = packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.drafters.eagle.config import EagleConfig
from outrider.drafters.eagle.parts import EagleLayer, EagleParts
from outrider.drafters.head_pass import EntranceRoom, HeadPass, head_pass
from outrider.kernels.native.forward import (
    Attends,
    Entrance,
    ForwardBuffers,
    ForwardParts,
    LayerWeights,
)
from outrider.kernels.registry import Kernels
from outrider.models.decoder import Room
from outrider.models.heads import HeadMemory


def native_pass(
    config: EagleConfig, parts: EagleParts, kernels: Kernels, state: HeadMemory, room: Room
) -> HeadPass | None:
    """None without native kernels. `room` says how many tokens and logits a pass may have."""
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
    room = EntranceRoom.of(num_tokens, config.layer.hidden_size)
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
