"""One block of draft heads: decoder layers behind an entrance, as EAGLE and MTP have them.

The entrance (kernels/native/forward.py) makes a residual of a token and of the state of the token
before it. With native kernels a pass over Llama layers is one call; operator by operator, which is
the definition, it has the same bits. A pass costs the layers, mostly one, the entrance and the
output head, which is most of it for a small target.

Shapes:  P = tokens, N = packed tokens, M = packed logits rows, K = captured layers, V = vocabulary,
         W = ids that are drafted, D = hidden size, X = inputs of a product, A = heads x head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from outrider.core.errors import ContractError, given
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.drafters.heads import NOT_DRAFTED, NetOutput
from outrider.drafters.native import HeadPass, head_pass
from outrider.kernels.kinds import compile_ahead
from outrider.kernels.native.forward import Attends, Entrance, Forward, ForwardParts, LayerWeights
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedLinear, PackedPlan
from outrider.models.decoder import LayerKV, ModelCapacity, Passes, Scratch
from outrider.models.families import LlamaConfig
from outrider.models.heads import HeadMemory
from outrider.models.llama import LayerOperators
from outrider.models.qwen_hybrid import AttentionWeights, HybridLayer, HybridOperators
from outrider.models.qwen_hybrid_config import QwenHybridConfig
from outrider.models.rope import Turns
from outrider.models.weights import Placement


class BlockLayer(Protocol):
    """A decoder layer within a block."""

    def run(
        self,
        kernels: Kernels,
        plan: PackedPlan,
        scratch: Scratch,
        kv: LayerKV,
        reads: Tensor | None,
    ) -> None:
        """Add the layer to `scratch.x_ND`. Attention reads `reads`; None is the normed residual."""
        ...

    @property
    def turns(self) -> Turns: ...
    @property
    def native(self) -> LayerWeights | None:
        """The layer's weights for a native pass; None if it has no such pass."""
        ...


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """A BlockLayer of the Llama family."""

    operators: LayerOperators
    native: LayerWeights

    @property
    def turns(self) -> Turns:
        return self.operators.turns

    def run(
        self,
        kernels: Kernels,
        plan: PackedPlan,
        scratch: Scratch,
        kv: LayerKV,
        reads: Tensor | None,
    ) -> None:
        self.operators.run(kernels, self.native, plan, scratch, kv, reads)


@dataclass(frozen=True, slots=True)
class GatedLayer:
    """A BlockLayer of Qwen3-Next and Qwen3.5, whose attention always reads the normed residual."""

    operators: HybridOperators
    weights: HybridLayer
    native: LayerWeights | None

    @property
    def turns(self) -> Turns:
        return self.operators.turns

    def run(
        self,
        kernels: Kernels,
        plan: PackedPlan,
        scratch: Scratch,
        kv: LayerKV,
        reads: Tensor | None,
    ) -> None:
        del reads
        mixer = self.weights.mixer
        if not isinstance(mixer, AttentionWeights):
            raise ContractError("mixer is no AttentionWeights")
        self.operators.norm(kernels, self.weights.mixer_norm_D, scratch)
        gate_NA = torch.empty_like(scratch.attended_NA)
        self.operators.attend(kernels, mixer, plan, scratch, gate_NA, kv)
        self.operators.feed(kernels, self.weights, scratch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStates:
    """The target's states that a block reads: those of `layers`, concatenated. `norms` scale them,
    one for each of as many equal parts, with their eps; then `join` makes one state of them. Both
    may be missing."""

    layers: tuple[int, ...]
    norms: tuple[Tensor, ...] = ()
    eps: float = 0.0
    join: PackedLinear | None = None
    join_bias_D: Tensor | None = None

    @torch.inference_mode()
    def fused(self, kernels: Kernels, hidden_PKD: Tensor) -> Tensor:
        """Return states_PD that the block reads instead of the target's."""
        states_PX = hidden_PKD.float().flatten(1).contiguous()
        if self.norms:
            parts = states_PX.chunk(len(self.norms), dim=1)
            pairs = zip(parts, self.norms, strict=True)
            scaled = [normed(kernels, x.contiguous(), norm, self.eps) for x, norm in pairs]
            states_PX = torch.cat(scaled, dim=1)
        if self.join is None:
            return states_PX
        out_PD = states_PX.new_empty(len(states_PX), self.join.num_out)
        kernels.linear(states_PX, self.join, out_PD)
        return out_PD if self.join_bias_D is None else out_PD.add_(self.join_bias_D)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBlock:
    """A block's weights; norms are float32. The output head, `head`, reads the residual after
    `norm_D`, if there is one, and knows the `ids_W`, None for all. `embedding_VD` and `head` may be
    the target's."""

    config: LlamaConfig | QwenHybridConfig
    layers: tuple[BlockLayer, ...]
    entrance: Entrance
    states: TargetStates
    embedding_VD: Tensor
    head: PackedLinear
    norm_D: Tensor | None
    ids_W: Tensor | None = None


class EntranceBuffers(TypedDict):
    """Memory of an entrance."""

    states_ND: Tensor
    pair_N2D: Tensor
    own_ND: Tensor


def entrance_buffers(capacity: ModelCapacity, size: int, device: torch.device) -> EntranceBuffers:
    """Allocate buffers for as many packed tokens as the capacity allows."""
    states_ND, own_ND = (torch.empty(capacity.max_rows, size, device=device) for _ in range(2))
    pair_N2D = torch.empty(capacity.max_rows, 2 * size, device=device)
    return {"states_ND": states_ND, "pair_N2D": pair_N2D, "own_ND": own_ND}


class EntranceNet:
    """A HeadNet of one block with KV of its own, and the stack that its passes run. Logits are over
    the target's ids: an id that is not drafted has almost no probability. If there is a `native`
    pass, it runs."""

    def __init__(
        self, block: HeadBlock, kernels: Kernels, place: Placement, capacity: ModelCapacity
    ) -> None:
        self._block, self._kernels = block, kernels
        # Each block has memory of its own, with the keys and values of its layers.
        self._config = config = replace(block.config, num_layers=len(block.layers))
        # The residual after the last layer, of every token.
        self._own_states = DraftNeeds(hidden_layers=(len(block.layers),))
        self._passes = Passes(
            place.spec(config),
            up_size=2 * config.ffn_size,
            placement=place,
            capacity=replace(capacity, hidden_layers=()),
        )
        self.hidden_layers = block.states.layers
        self.native = self._native()
        compile_ahead(kernels, config.vocab_size, self.state, self._rehearse)

    def _rehearse(self, row: StepRow) -> None:
        states_ND = self._block.entrance.states_ND
        self.step([row], torch.zeros_like(states_ND[: len(row.tokens)]))

    @property
    def state(self) -> HeadMemory:
        return self._passes.kv

    def fuse(self, hidden_PKD: Tensor) -> Tensor:
        return self._block.states.fused(self._kernels, hidden_PKD)

    def step(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        if self.native is not None:
            return self.native.step(rows, hidden_ND)
        return self._by_operators(rows, hidden_ND)

    @torch.inference_mode()
    def _by_operators(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        block = self._block
        block.entrance.states_ND[: len(hidden_ND)].copy_(hidden_ND)
        out = self._passes.step(self, rows, self._own_states)
        own_ND = given(out.hidden_NKD, "hidden state")[:, 0].contiguous()
        if block.entrance.gives_normed and block.norm_D is not None:
            own_ND = normed(self._kernels, own_ND, block.norm_D, self._config.rms_norm_eps)
        return NetOutput(out.logits_MV, own_ND)

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        block, entrance, size = self._block, self._block.entrance, self._config.hidden_size
        pair_N2D = entrance.pair_N2D[: plan.num_tokens]
        torch.index_select(block.embedding_VD, 0, plan.tokens_N, out=scratch.rows_ND)
        scratch.x_ND.copy_(scratch.rows_ND)
        self._enter(scratch, entrance.token_norm_D, pair_N2D[:, :size])
        scratch.x_ND.copy_(entrance.states_ND[: plan.num_tokens])
        self._enter(scratch, entrance.state_norm_D, pair_N2D[:, size:])
        if entrance.join is not None:
            self._kernels.linear(pair_N2D, entrance.join, scratch.x_ND)
            if entrance.join_bias_D is not None:
                scratch.x_ND.add_(entrance.join_bias_D)
        elif entrance.keeps_norm:
            scratch.x_ND.copy_(pair_N2D[:, size:])

    def _enter(self, scratch: Scratch, norm_D: Tensor | None, half_ND: Tensor) -> None:
        """Fill one half of the pairs."""
        given_ND = scratch.x_ND
        if norm_D is not None:
            self._kernels.rms_norm(given_ND, norm_D, self._config.rms_norm_eps, scratch.norm_ND)
            given_ND = scratch.norm_ND
        half_ND.copy_(given_ND)

    def layer(self, depth: int, plan: PackedPlan, scratch: Scratch, kv: LayerKV) -> None:
        entrance, reads = self._block.entrance, None
        if depth == 0 and entrance.attends is Attends.PAIR:
            reads = entrance.pair_N2D[: plan.num_tokens]
        elif depth == 0 and entrance.attends is Attends.RESIDUAL:
            reads = scratch.x_ND
        self._block.layers[depth].run(self._kernels, plan, scratch, kv, reads)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        block, kernels = self._block, self._kernels
        if block.norm_D is not None:
            kernels.rms_norm(x_MD, block.norm_D, self._config.rms_norm_eps, norm_MD)
            x_MD = norm_MD
        if block.ids_W is None:
            kernels.linear(x_MD, block.head, logits_MV)
            return
        logits_MW = x_MD.new_empty(len(x_MD), block.head.num_out)
        kernels.linear(x_MD, block.head, logits_MW)
        logits_MV.fill_(NOT_DRAFTED).index_copy_(1, block.ids_W, logits_MW)

    def forward(self) -> Forward | None:
        return None

    def _native(self) -> HeadPass | None:
        """Return the native pass; None without native kernels or for mixture layers."""
        config, block = self._config, self._block
        weights = [layer.native for layer in block.layers if layer.native is not None]
        if len(weights) < len(block.layers):
            return None
        parts = ForwardParts(
            embedding_VD=block.embedding_VD,
            final_norm_D=block.norm_D,
            head=block.head,
            turns=[layer.turns for layer in block.layers],
            layers=weights,
            kv=self.state.layers,
            buffers=self._passes.scratch.for_native,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            ffn_size=config.ffn_size,
            hidden_SKD=block.embedding_VD.new_empty(0),
            entrance=block.entrance,
        )
        return head_pass(self._kernels, parts, self.state, self._passes.logits_MV, block.ids_W)


def normed(kernels: Kernels, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the normed rows in new memory."""
    out_ND = torch.empty_like(x_ND)
    kernels.rms_norm(x_ND, weight_D, eps, out_ND)
    return out_ND
