"""GPT-2 and DistilGPT2: positions are learned and added to the tokens, and norms are centred.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. A layer is
x += out(attention(qkv(norm(x))))  and then  x += down(gelu(up(norm(x)))), where norm is LayerNorm
and every product has a bias. How passes run is decoder.py's affair.

Shapes:  N = packed tokens, M = packed logits rows, V = vocabulary, D = hidden size, T = positions,
         E = fused q, k and v, A = heads x head size, U = F = FFN size, I = inputs, O = outputs,
         H = half of a head, G = heads, S = slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from outrider.cache.compaction import Keep
from outrider.cache.paged_kv import PagedKV
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.kernels.plan import PackedPlan
from outrider.kernels.registry import Kernels
from outrider.models.compacting import compact
from outrider.models.decoder import Passes, Room, Scratch
from outrider.models.gpt2_config import GPT2Config
from outrider.models.gpt2_weights import MASKS, GPT2Reader, Layer, Linear, Norm
from outrider.models.weight_reader import Placement, WeightReader
from outrider.models.weights import Weights


class GPT2Model:
    """CausalLM over a PagedKV that it owns. Reads every weight when built."""

    def __init__(
        self,
        config: GPT2Config,
        weights: Weights,
        *,
        kernels: Kernels,
        place: Placement,
        room: Room,
    ) -> None:
        self.config, self.kernels = config, kernels
        self._spec = place.spec(config)
        reader = GPT2Reader(WeightReader(weights, kernels, place), config)
        length = room.num_positions(config.max_tokens)
        self._tables = reader.tables(num_positions=length)
        self._layers = [reader.layer(index) for index in range(config.num_layers)]
        weights.check_all_taken(ignored=MASKS)
        # Nothing turns: heads go to the arena by the way that rotates them, with tables of (1, 0).
        self._cos_TH = torch.ones(length, config.head_dim // 2, device=place.device)
        self._sin_TH = torch.zeros_like(self._cos_TH)
        self._scale = config.head_dim**-0.5
        self._passes = Passes(self._spec, up_size=config.ffn_size, place=place, room=room)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def state(self) -> PagedKV:
        return self._passes.kv

    @property
    def scratch(self) -> Scratch:
        """The buffers of a step; rounds that have buffers of their own make them alike."""
        return self._passes.scratch

    def twin(self) -> GPT2Model | None:
        if self.kernels.twin is None:
            return None
        other = copy(self)
        other.kernels, other._passes = self.kernels.twin(), self._passes.twin()
        return other

    def compact(self, seq_id: int, keep: Keep) -> None:
        """Drop keys of the text that `seq_id` has committed (compacting.py)."""
        compact(self, self.state, self._passes.view(keep.window), seq_id, keep)

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        """At most `max_rows` tokens. Hidden layer i is the residual after i layers, 0 to L."""
        return self._passes.step(self, rows, needs)

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        tables = self._tables
        torch.index_select(tables.embedding_VD, 0, plan.tokens_N, out=scratch.rows_ND)
        torch.index_select(tables.positions_TD, 0, plan.positions_N, out=scratch.x_ND)
        scratch.x_ND.add_(scratch.rows_ND)

    def layer(
        self, depth: int, plan: PackedPlan, scratch: Scratch, kv: tuple[Tensor, Tensor]
    ) -> None:
        self._attend(self._layers[depth], plan, scratch, kv)
        self._feed(self._layers[depth], scratch)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        self._norm(x_MD, self._tables.norm, norm_MD)
        self.kernels.linear(norm_MD, self._tables.head, logits_MV)

    def forward(self) -> None:
        """No kernel knows this family's order of operators."""

    def _attend(
        self, layer: Layer, plan: PackedPlan, scratch: Scratch, kv: tuple[Tensor, Tensor]
    ) -> None:
        kernels, qkv_NE, attended_NA = self.kernels, scratch.qkv_NE, scratch.attended_NA
        k_GSD, v_GSD = kv
        self._norm(scratch.x_ND, layer.attention_norm, scratch.norm_ND)
        self._multiply(scratch.norm_ND, layer.qkv, qkv_NE)
        kernels.rope_append(qkv_NE, self._cos_TH, self._sin_TH, plan, k_GSD, v_GSD)
        kernels.attention(qkv_NE, k_GSD, v_GSD, plan, self._scale, attended_NA)
        self._multiply(attended_NA, layer.out, scratch.x_ND, accumulate=True)

    def _feed(self, layer: Layer, scratch: Scratch) -> None:
        self._norm(scratch.x_ND, layer.ffn_norm, scratch.norm_ND)
        self._multiply(scratch.norm_ND, layer.up, scratch.up_NU)
        self.kernels.gelu(scratch.up_NU, scratch.activated_NF)
        self._multiply(scratch.activated_NF, layer.down, scratch.x_ND, accumulate=True)

    def _norm(self, x_ND: Tensor, norm: Norm, out_ND: Tensor) -> None:
        eps = self.config.layer_norm_eps
        self.kernels.layer_norm(x_ND, norm.weight_D, norm.bias_D, eps, out_ND)

    def _multiply(
        self, x_NI: Tensor, linear: Linear, out_NO: Tensor, *, accumulate: bool = False
    ) -> None:
        self.kernels.linear(x_NI, linear.packed, out_NO, accumulate=accumulate)
        out_NO.add_(linear.bias_O)
