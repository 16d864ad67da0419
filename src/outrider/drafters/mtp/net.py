"""MTP block: one decoder layer over the target's embedding, hidden states and output head.

    x = W_eh [norm_e(embedding of the token), norm_h(state of the token before)]
    h = layer(x)        one decoder layer, with keys and values of its own
    logits = head(norm(h))

The state h, before the norm, is what the block reads when it drafts on. DeepSeek-V3 (arXiv
2412.19437), 2.2, equations 21 to 23. A round is one pass of the first block over the new text, and
one more for each later draft or level of a tree (drafters/hidden.py). A pass costs one layer, W_eh
and the output head, which is most of it for a small target.

Shapes:  P = tokens, N = packed tokens, M = packed logits rows, K = captured layers (1 here),
         V = vocabulary, D = hidden size, T = positions, H = half of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.errors import ContractError
from outrider.core.protocols import CausalLM, DraftNeeds, StepRow
from outrider.drafters.growth import DraftSampler
from outrider.drafters.heads import (
    NetOutput,
    NormedTarget,
    check_finite,
    normed_target,
    own_kernels,
    placement_of,
)
from outrider.drafters.hidden import HeadLimits, HiddenDrafter
from outrider.drafters.mtp.weights import BlockWeights, MtpConfig, read_blocks, read_mtp_config
from outrider.drafters.native import HeadBuffers, HeadPass, fused_head_drafts, head_pass
from outrider.kernels.native.forward import Entrance, Forward, ForwardBuffers, ForwardParts
from outrider.kernels.plan import PackedPlan
from outrider.models.decoder import Passes, Room, Scratch
from outrider.models.heads import HeadMemory, HeadsToLoad
from outrider.models.rope import rope_tables

# The residual after the block's one layer, of every token.
_OWN_STATES = DraftNeeds(hidden_layers=(1,))


class MtpNet:
    """HeadNet of one block, and the stack that its passes run."""

    def __init__(
        self, config: MtpConfig, weights: BlockWeights, target: NormedTarget, room: Room
    ) -> None:
        # Each block has memory of its own, with the keys and values of one layer.
        self._config, self._weights = replace(config.block, num_layers=1), weights
        self._target, self._kernels = target, own_kernels(target)
        self._reads_normed, self._gives_normed = config.reads_normed, config.gives_normed
        self.hidden_layers = (target.spec.num_layers,)
        place, block = placement_of(target), config.block
        cos_TH, sin_TH = rope_tables(
            block.rope, head_dim=block.head_dim, num_positions=room.num_positions(block.max_tokens)
        )
        self._turns = (cos_TH.to(place.device), sin_TH.to(place.device))
        self._passes = Passes(
            place.spec(self._config),
            up_size=2 * block.ffn_size,
            place=place,
            room=replace(room, hidden_layers=()),
        )
        self._pair_N2D = torch.zeros(room.max_rows, 2 * block.hidden_size, device=place.device)
        self._states_ND = torch.empty(0)
        self.native = self._native(room)

    @property
    def state(self) -> HeadMemory:
        return self._passes.kv

    @torch.inference_mode()
    def fuse(self, hidden_PKD: Tensor) -> Tensor:
        states_PD = hidden_PKD[:, 0].float().contiguous()
        if not self._reads_normed:
            return states_PD
        return self._normed(states_PD, self._target.tables.norm_D, self._target.config.rms_norm_eps)

    def step(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        if self.native is not None:
            return self.native.step(rows, hidden_ND)
        return self._by_operators(rows, hidden_ND)

    @torch.inference_mode()
    def _by_operators(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        self._states_ND = hidden_ND
        out = self._passes.step(self, rows, _OWN_STATES)
        if out.hidden_NKD is None:
            raise ContractError("the pass gave no hidden states")
        own_ND = out.hidden_NKD[:, 0].contiguous()
        if self._gives_normed:
            own_ND = self._normed(own_ND, self._weights.norm_D, self._config.rms_norm_eps)
        return NetOutput(out.logits_MV, own_ND)

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
        if depth != 0:
            raise ContractError("an MTP block has one layer")
        self._weights.layer.run(self._kernels, self._turns, plan, scratch, kv)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        kernels = self._kernels
        kernels.rms_norm(x_MD, self._weights.norm_D, self._config.rms_norm_eps, norm_MD)
        kernels.linear(norm_MD, self._target.tables.head, logits_MV)

    def forward(self) -> Forward | None:
        return None

    def _native(self, room: Room) -> HeadPass | None:
        """None without native kernels, and for a block whose layer or own states are a hybrid's."""
        config, tables, weights = self._config, self._target.tables, self._weights
        layer, scratch = weights.layer.native, self._passes.scratch
        if layer is None or self._gives_normed or self._kernels.forward is None:
            return None
        buffers = [getattr(scratch, buffer.name) for buffer in fields(ForwardBuffers)]
        own = HeadBuffers.of(room.max_rows, config.hidden_size)
        parts = ForwardParts(
            embedding_VD=tables.embedding_VD,
            final_norm_D=weights.norm_D,
            head=tables.head,
            cos_TH=self._turns[0],
            sin_TH=self._turns[1],
            layers=[layer],
            kv=self.state.layers,
            buffers=ForwardBuffers(*buffers),
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            ffn_size=config.ffn_size,
            hidden_SKD=tables.embedding_VD.new_empty(0),
            entrance=Entrance(
                token_norm_D=weights.token_norm_D,
                state_norm_D=weights.state_norm_D,
                states_ND=own.states_ND,
                pair_N2D=own.pair_N2D,
                own_ND=own.own_ND,
                join=weights.join,
            ),
        )
        return head_pass(self._kernels, parts, self.state, max_logits=room.max_logits)

    def _normed(self, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        out_ND = torch.empty_like(x_ND)
        self._kernels.rms_norm(x_ND, weight_D, eps, out_ND)
        return out_ND


def load_mtp(
    folder: Path, config: MtpConfig, target: NormedTarget, room: Room
) -> tuple[MtpNet, ...]:
    """The blocks, each with memory of its own. Raises CheckpointError for tensors that are missing,
    of another shape or not numbers."""
    blocks = read_blocks(folder, config, target)
    nets = tuple(MtpNet(config, block, target, room) for block in blocks)
    check_finite(folder, torch.stack([_probe(net, target) for net in nets]), "MTP block")
    return nets


def _probe(net: MtpNet, target: NormedTarget) -> Tensor:
    """Logits after two tokens, of shape V: no weight can stay out of them."""
    states_PD = torch.ones(2, target.spec.hidden_size, device=placement_of(target).device)
    net.state.open(0, ())
    try:
        row = StepRow.chain(0, (0, 0), logits_from=1)
        return net.step([row], states_PD).logits_MV[0].clone()
    finally:
        net.state.close(0)


_log = logging.getLogger(__name__)


def mtp_drafter(
    heads: HeadsToLoad, target: CausalLM, sampler: DraftSampler, *, chunk: int, batch_size: int
) -> HiddenDrafter:
    """Trees only where there is one block.

    Raises CheckpointError for a block that is damaged or another target's, ConfigError for a target
    that shares no tables.
    """
    host = normed_target(target)
    config = read_mtp_config(heads.folder, target.spec)
    nets = load_mtp(heads.folder, config, host, heads.room)
    window, wanted = config.block.max_tokens, target.spec.max_tokens
    if window < wanted:
        _log.warning(
            "The MTP block has %d positions and the target %d: nothing is drafted beyond.",
            window,
            wanted,
        )
    limits = HeadLimits(
        chunk=min(chunk, heads.room.max_rows),
        reach=max(heads.room.max_rows // batch_size, 1),
        window=min(window, wanted),
    )
    fused = None
    if len(nets) == 1:
        fused = fused_head_drafts(nets[0].native, nets[0].fuse, sampler, batch_size=batch_size)
    elif sampler.branches:
        _log.warning("%d MTP blocks take turns in a path: chains are drafted, no trees.", len(nets))
        sampler = replace(sampler, branches=False)
    return HiddenDrafter("mtp", nets, sampler, limits, fused)
