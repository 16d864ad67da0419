"""One MTP block over the tables of its target.

    x = W_eh [norm_e(embedding of the token), norm_h(state of the token before)]
    h = layer(x)        one decoder layer, with keys and values of its own
    logits = head(norm(h))

where the output head and the embedding are the target's, and h, before the norm, is the state that
the block itself reads when it drafts on. DeepSeek-V3 (arXiv 2412.19437), 2.2, equations 21 to 23.

Cost of a pass: one layer, W_eh and the output head. Of a small target the head is most of that.

Shapes:  P = tokens, N = packed tokens, M = packed logits rows, K = captured layers (1 here),
         V = vocabulary, D = hidden size, T = positions, H = half of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.protocols import DraftNeeds, StepRow
from outrider.drafters.beside import NormedTarget, check_finite, own_kernels, placement_of
from outrider.drafters.heads import NetOutput
from outrider.drafters.mtp.config import MtpConfig
from outrider.kernels.forward import Forward, LayerWeights
from outrider.kernels.packed import PackedLinear
from outrider.kernels.plan import PackedPlan
from outrider.models.decoder import Passes, Room, Scratch, num_positions
from outrider.models.llama_config import LlamaConfig
from outrider.models.llama_weights import read_layer
from outrider.models.rope import rope_tables
from outrider.models.weight_reader import WeightReader
from outrider.models.weights import DERIVED, Weights
from outrider.state.paged_kv import PagedKV

# The residual after the block's one layer, of every token.
_OWN_STATES = DraftNeeds(hidden_layers=(1,))
# Copies of the target's tables, which some checkpoints hold.
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Norms are float32. `join` goes from embedding and state, side by side, to the residual."""

    token_norm_D: Tensor
    state_norm_D: Tensor
    join: PackedLinear
    layer: LayerWeights
    norm_D: Tensor


class MtpNet:
    """HeadNet of one block, and the stack that its passes run."""

    def __init__(
        self, config: MtpConfig, weights: BlockWeights, target: NormedTarget, room: Room
    ) -> None:
        self._config, self._weights = replace(config.block, num_layers=1), weights
        self._target, self._kernels = target, own_kernels(target)
        self._reads_normed = config.reads_normed
        self.hidden_layers = (target.spec.num_layers,)
        place = placement_of(target)
        tables = rope_tables(
            config.block.rope,
            head_dim=config.block.head_dim,
            num_positions=num_positions(config.block, room),
        )
        self._cos_TH, self._sin_TH = (table_TH.to(place.device) for table_TH in tables)
        self._passes = Passes(
            place.spec(self._config),
            up_size=2 * config.block.ffn_size,
            place=place,
            room=replace(room, hidden_layers=()),
        )
        width = 2 * config.block.hidden_size
        self._pair_N2D = torch.zeros(room.max_rows, width, device=place.device)
        self._states_ND = torch.empty(0)

    @property
    def state(self) -> PagedKV:
        return self._passes.kv

    @torch.inference_mode()
    def fuse(self, hidden_PKD: Tensor) -> Tensor:
        states_PD = hidden_PKD[:, 0].float().contiguous()
        if not self._reads_normed:
            return states_PD
        normed_PD = torch.empty_like(states_PD)
        eps = self._target.config.rms_norm_eps
        self._kernels.rms_norm(states_PD, self._target.tables.norm_D, eps, normed_PD)
        return normed_PD

    def step(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        self._states_ND = hidden_ND
        out = self._passes.step(self, rows, _OWN_STATES)
        assert out.hidden_NKD is not None
        return NetOutput(out.logits_MV, out.hidden_NKD[:, 0])

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        kernels, weights, eps = self._kernels, self._weights, self._config.rms_norm_eps
        size, pair_N2D = self._config.hidden_size, self._pair_N2D[: plan.num_tokens]
        table_VD = self._target.tables.embedding_VD
        torch.index_select(table_VD, 0, plan.tokens_N, out=scratch.rows_ND)
        scratch.x_ND.copy_(scratch.rows_ND)
        kernels.rms_norm(scratch.x_ND, weights.token_norm_D, eps, scratch.norm_ND)
        pair_N2D[:, :size] = scratch.norm_ND
        scratch.x_ND.copy_(self._states_ND)
        kernels.rms_norm(scratch.x_ND, weights.state_norm_D, eps, scratch.norm_ND)
        pair_N2D[:, size:] = scratch.norm_ND
        kernels.linear(pair_N2D, weights.join, scratch.x_ND)

    def layer(
        self, depth: int, plan: PackedPlan, scratch: Scratch, kv: tuple[Tensor, Tensor]
    ) -> None:
        assert depth == 0
        self._attend(plan, scratch, kv)
        self._feed(scratch)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        kernels = self._kernels
        kernels.rms_norm(x_MD, self._weights.norm_D, self._config.rms_norm_eps, norm_MD)
        kernels.linear(norm_MD, self._target.tables.head, logits_MV)

    def forward(self) -> Forward | None:
        return None

    def _attend(self, plan: PackedPlan, scratch: Scratch, kv: tuple[Tensor, Tensor]) -> None:
        kernels, config, layer = self._kernels, self._config, self._weights.layer
        qkv_NE, (k_GSD, v_GSD) = scratch.qkv_NE, kv
        kernels.rms_norm(scratch.x_ND, layer.attention_norm_D, config.rms_norm_eps, scratch.norm_ND)
        kernels.linear(scratch.norm_ND, layer.qkv, qkv_NE)
        _add(qkv_NE, layer.qkv_bias_E)
        if layer.q_norm_H is not None and layer.k_norm_H is not None:
            kernels.head_norm(
                qkv_NE, layer.q_norm_H, layer.k_norm_H, config.num_kv_heads, config.rms_norm_eps
            )
        kernels.rope_append(qkv_NE, self._cos_TH, self._sin_TH, plan, k_GSD, v_GSD)
        scale = config.head_dim**-0.5
        kernels.attention(qkv_NE, k_GSD, v_GSD, plan, scale, scratch.attended_NA)
        kernels.linear(scratch.attended_NA, layer.out, scratch.x_ND, accumulate=True)
        _add(scratch.x_ND, layer.out_bias_D)

    def _feed(self, scratch: Scratch) -> None:
        kernels, layer = self._kernels, self._weights.layer
        eps = self._config.rms_norm_eps
        kernels.rms_norm(scratch.x_ND, layer.ffn_norm_D, eps, scratch.norm_ND)
        kernels.linear(scratch.norm_ND, layer.gate_up, scratch.up_NU)
        _add(scratch.up_NU, layer.gate_up_bias_2F)
        kernels.silu_mul(scratch.up_NU, scratch.activated_NF)
        kernels.linear(scratch.activated_NF, layer.down, scratch.x_ND, accumulate=True)
        _add(scratch.x_ND, layer.down_bias_D)


def load_mtp(
    folder: Path, config: MtpConfig, target: NormedTarget, room: Room
) -> tuple[MtpNet, ...]:
    """The blocks, each with memory of its own. Raises CheckpointError for tensors that are missing,
    of another shape or not numbers."""
    with Weights(folder) as weights:
        reader = WeightReader(weights, own_kernels(target), placement_of(target))
        indices = range(config.first_layer, config.first_layer + config.depth)
        blocks = [_read_block(reader, config.block, index) for index in indices]
        if config.first_layer == 0:
            weights.check_all_taken(ignored=(*DERIVED, *_COPIES))
    nets = tuple(MtpNet(config, block, target, room) for block in blocks)
    check_finite(folder, torch.stack([_probe(net, target) for net in nets]), "MTP block")
    return nets


def _read_block(reader: WeightReader, config: LlamaConfig, index: int) -> BlockWeights:
    prefix, size = f"model.layers.{index}.", config.hidden_size
    return BlockWeights(
        token_norm_D=reader.vector(f"{prefix}enorm.weight", size),
        state_norm_D=reader.vector(f"{prefix}hnorm.weight", size),
        join=reader.linear({f"{prefix}eh_proj": size}, 2 * size),
        layer=read_layer(reader, config, index),
        norm_D=reader.vector(f"{prefix}shared_head.norm.weight", size),
    )


def _probe(net: MtpNet, target: NormedTarget) -> Tensor:
    """Logits after two tokens, of shape V: no weight can stay out of them."""
    states_PD = torch.ones(2, target.spec.hidden_size, device=placement_of(target).device)
    net.state.open(0, ())
    try:
        row = StepRow.chain(0, (0, 0), logits_from=1)
        return net.step([row], states_PD).logits_MV[0].clone()
    finally:
        net.state.close(0)


def _add(x_NO: Tensor, bias_O: Tensor | None) -> None:
    if bias_O is not None:
        x_NO.add_(bias_O)
