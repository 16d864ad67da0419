"""The Llama family as one decoder: Llama 2 and 3, Mistral, Qwen2, Qwen3, Phi-3, SmolLM.

    x += out(attention(rope(qkv(norm(x)))))
    x += down(silu(gate(y)) * up(y))            y = norm(x)

where norm scales by the root mean square. Families differ in options of the config: biases, norms
of query and key heads, rotary positions. decoder.py runs the passes. q, k and v become one matrix,
and so do gate and up, unless the files hold them so (Phi-3). A rank reads its share of each
(parallel/shard.py). Ranks sum the residual after attention and after the FFN: rank 0 adds its
summand to the residual, the others give theirs alone.

Shapes:  N = packed tokens, M = packed logits rows, V = vocabulary, D = hidden size, E = fused q, k
         and v, F = FFN size, G = KV heads, S = slots, T = positions, H = half of a head or head
         size.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Self

import torch
from torch import Tensor

from outrider.core.errors import ContractError
from outrider.kernels.native.forward import Forward, ForwardParts, LayerWeights
from outrider.kernels.plan import PackedLinear, PackedPlan, PackedTable
from outrider.kernels.registry import Kernels
from outrider.models.decoder import LayerKV, PassDecoder, Passes, Room, Scratch
from outrider.models.families import LlamaConfig
from outrider.models.parallel.comm import Alone, Comm
from outrider.models.parallel.shard import WHOLE, LogitParts, Share
from outrider.models.rope import Turns, turning_order, turns_of
from outrider.models.weights import Placement, WeightReader, Weights

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Tables:
    embedding: Tensor | PackedTable
    norm_D: Tensor
    head: PackedLinear

    @property
    def embeddings(self) -> Tensor:
        """Those of all tokens as numbers, [V, D]."""
        return self.embedding if isinstance(self.embedding, Tensor) else self.embedding.kept


def read_tables(reader: WeightReader, config: LlamaConfig, share: Share = WHOLE) -> Tables:
    embedding = reader.tokens(EMBEDDING, config.vocab_size, config.hidden_size)
    return Tables(
        embedding=embedding,
        norm_D=reader.vector("model.norm.weight", config.hidden_size),
        head=reader.head(
            embedding, tied=config.tie_word_embeddings, rows=share.cut(config.vocab_size)
        ),
    )


def mtp_prefixes(weights: Weights, config: LlamaConfig) -> tuple[str, ...]:
    """Of blocks for multi-token prediction that lie behind the last layer; a drafter reads them."""
    behind = (f"model.layers.{index}." for index in count(config.num_layers))
    return tuple(takewhile(lambda prefix: f"{prefix}enorm.weight" in weights, behind))


def read_layer(
    reader: WeightReader, config: LlamaConfig, index: int, share: Share = WHOLE
) -> LayerWeights:
    prefix = f"model.layers.{index}."
    hidden, ffn, head = config.hidden_size, config.ffn_size, config.head_dim
    attended = config.num_heads * head
    qkv, gate_up = _fused_names(prefix, config)
    out = {f"{prefix}self_attn.o_proj": hidden}
    down = {f"{prefix}mlp.down_proj": hidden}
    order_E, order_2F = _qkv_order(config, share), _gate_up_order(config, share)

    def head_norm(name: str) -> Tensor | None:
        return reader.vector(f"{prefix}self_attn.{name}.weight", head) if config.qk_norm else None

    def summed_bias(outputs: dict[str, int], *, present: bool) -> Tensor | None:
        """Ranks add up what such a linear gives, so one of them has its bias."""
        bias_D = reader.bias(outputs, present=present)
        return bias_D if share.rank == 0 else None

    return LayerWeights(
        attention_norm_D=reader.vector(f"{prefix}input_layernorm.weight", hidden),
        qkv=reader.linear(qkv, hidden, order_E),
        qkv_bias_E=reader.bias(qkv, present=config.qkv_bias, order_O=order_E),
        q_norm_H=head_norm("q_norm"),
        k_norm_H=head_norm("k_norm"),
        out=reader.linear(out, attended, columns=share.cut(attended)),
        out_bias_D=summed_bias(out, present=config.out_bias),
        ffn_norm_D=reader.vector(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=reader.linear(gate_up, hidden, order_2F),
        gate_up_bias_2F=reader.bias(gate_up, present=config.mlp_bias, order_O=order_2F),
        down=reader.linear(down, ffn, columns=share.cut(ffn)),
        down_bias_D=summed_bias(down, present=config.mlp_bias),
    )


def _fused_names(prefix: str, config: LlamaConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Names and outputs of what becomes one matrix: q, k and v; gate and up."""
    ffn, kv = config.ffn_size, config.num_kv_heads * config.head_dim
    if config.fused_tensors:
        return {f"{prefix}self_attn.qkv_proj": config.qkv_size}, {
            f"{prefix}mlp.gate_up_proj": 2 * ffn
        }
    qkv = {
        f"{prefix}self_attn.q_proj": config.num_heads * config.head_dim,
        f"{prefix}self_attn.k_proj": kv,
        f"{prefix}self_attn.v_proj": kv,
    }
    return qkv, {f"{prefix}mlp.gate_proj": ffn, f"{prefix}mlp.up_proj": ffn}


def _qkv_order(config: LlamaConfig, share: Share) -> Tensor | None:
    """Where each row of the fused matrix lies in the checkpoint's; None if nothing moves."""
    order_H = turning_order(config.rope, config.head_dim)
    if order_H is None and share == WHOLE:
        return None
    heads = torch.arange(config.qkv_size).view(-1, config.head_dim)
    if order_H is not None:
        # Norms of heads would have to move as well; no family has both.
        if config.qk_norm:
            raise ContractError("norms of heads cannot be turned")
        turned = heads[: -config.num_kv_heads]
        turned.copy_(turned[:, order_H])
    kinds = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads])
    return torch.cat([kind[share.cut(len(kind))] for kind in kinds]).flatten()


def _gate_up_order(config: LlamaConfig, share: Share) -> Tensor | None:
    """The same of gate and up."""
    if share == WHOLE:
        return None
    rows = torch.arange(2 * config.ffn_size).view(2, config.ffn_size)
    return rows[:, share.cut(config.ffn_size)].flatten()


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class LayerOperators:
    """A layer operator by operator, in sizes of a rank's share. What native code does of it in one
    call (kernels/native/forward.py) has the same bits."""

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
        eps = self.config.rms_norm_eps
        if reads is None:
            kernels.rms_norm(scratch.x_ND, layer.attention_norm_D, eps, scratch.norm_ND)
            reads = scratch.norm_ND
        self._attend(kernels, layer, reads, plan, scratch, kv)
        kernels.rms_norm(scratch.x_ND, layer.ffn_norm_D, eps, scratch.norm_ND)
        self._feed(kernels, layer, scratch)

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
            kernels.head_norm(
                qkv_NE, layer.q_norm_H, layer.k_norm_H, config.num_kv_heads, config.rms_norm_eps
            )
        kernels.rope_append(qkv_NE, *self.turns, plan, *kv)
        kernels.attention(qkv_NE, *kv, plan, config.head_dim**-0.5, scratch.attended_NA)
        self._add(kernels, scratch, scratch.attended_NA, layer.out, layer.out_bias_D)

    def _feed(self, kernels: Kernels, layer: LayerWeights, scratch: Scratch) -> None:
        kernels.linear(scratch.norm_ND, layer.gate_up, scratch.up_NU)
        if layer.gate_up_bias_2F is not None:
            scratch.up_NU.add_(layer.gate_up_bias_2F)
        kernels.silu_mul(scratch.up_NU, scratch.activated_NF)
        self._add(kernels, scratch, scratch.activated_NF, layer.down, layer.down_bias_D)

    def _add(
        self,
        kernels: Kernels,
        scratch: Scratch,
        x_NI: Tensor,
        packed: PackedLinear,
        bias_D: Tensor | None,
    ) -> None:
        """Add a product to the residual, with what the other ranks have of it."""
        kernels.linear(x_NI, packed, scratch.x_ND, accumulate=self.comm.rank == 0)
        if bias_D is not None:
            scratch.x_ND.add_(bias_D)
        self.comm.all_reduce_(scratch.x_ND)


@dataclass(frozen=True, slots=True)
class CheaperParts:
    """What a cheaper model has of its own: operators, matrices, and which layers it runs. `layers`
    has an entry for every layer; those that are not run are never read."""

    kernels: Kernels
    head: PackedLinear
    layers: Sequence[LayerWeights]
    depths: Sequence[int]


class LlamaModel(PassDecoder):
    """CausalLM over a PagedKV that it owns. Reads every weight when built.

    With a `comm` of several ranks it holds one rank's share of weights and KV, and every rank has
    to make the same calls; what `step` returns is of use on rank 0 alone.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        *,
        kernels: Kernels,
        place: Placement,
        room: Room,
        comm: Comm = ALONE,
    ) -> None:
        self.config, self.kernels = config, kernels
        share = Share(comm.rank, comm.size)
        self._comm, part = comm, share.part(config)
        self._spec, self._place = place.spec(config), place
        reader = WeightReader(weights, kernels, place)
        self._tables = read_tables(reader, config, share)
        self._layers = [
            read_layer(reader, config, index, share) for index in range(config.num_layers)
        ]
        weights.check_all_taken(beside=mtp_prefixes(weights, config))
        self._depths = frozenset(range(config.num_layers))
        turns = turns_of(config, room.num_positions(config.max_tokens), place.device)
        self._operators = LayerOperators(part, turns, comm)
        self._hidden_layers = room.hidden_layers
        self._passes = Passes(place.spec(part), up_size=2 * part.ffn_size, place=place, room=room)
        self._logit_parts = LogitParts(comm, config.vocab_size, self._passes.logits_MV)
        self._made_by, self._forward = kernels, self._make_forward()

    @property
    def logits(self) -> Tensor:
        """Room for the logits of one step, of shape [M, V]; every step writes over it."""
        return self._passes.logits_MV

    @property
    def streamed(self) -> tuple[Tensor, ...]:
        """The weights that every pass reads whole: all linears and the output head."""
        packed = [self._tables.head]
        packed += [p for w in self._layers for p in (w.qkv, w.out, w.gate_up, w.down)]
        return tuple(one.data for one in packed)

    def cheaper(self, parts: CheaperParts) -> LlamaModel:
        """A model over this one's memory that drafts for it, with other matrices or fewer layers,
        and buffers of its own. It keeps no hidden states. A layer that it leaves out has nothing in
        memory of what is fed to it."""
        other = copy(self)
        other.kernels = other._made_by = parts.kernels
        other._tables = replace(self._tables, head=parts.head)
        other._layers, other._depths = list(parts.layers), frozenset(parts.depths)
        other._hidden_layers, other._passes = (), self._passes.for_drafts()
        other._forward = other._make_forward()
        return other

    def twin(self) -> Self | None:
        other = super().twin()
        if other is not None:
            other._made_by, other._forward = other.kernels, other._make_forward()
        return other

    def beside(self, room: Room) -> Self | None:
        """The same weights with memory and buffers of its own, for another engine; None where ranks
        have a share each, or where kernels cannot be doubled."""
        if self._comm.size > 1 or self.kernels.twin is None:
            return None
        other, config, place = copy(self), self.config, self._place
        turns = turns_of(config, room.num_positions(config.max_tokens), place.device)
        other.kernels = other._made_by = self.kernels.twin()
        other._operators = replace(self._operators, turns=turns)
        other._hidden_layers = room.hidden_layers
        other._passes = Passes(self._spec, up_size=2 * config.ffn_size, place=place, room=room)
        other._logit_parts = LogitParts(self._comm, config.vocab_size, other._passes.logits_MV)
        other._forward = other._make_forward()
        return other

    @property
    def tables(self) -> Tables:
        """Embedding, last norm and output head, for drafters that share them."""
        return self._tables

    @property
    def layers(self) -> Sequence[LayerWeights]:
        """Of every layer, for a model that drafts with some of them."""
        return self._layers

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        embedding = self._tables.embedding
        if not isinstance(embedding, Tensor):
            embedding.read(plan.tokens_N, scratch.x_ND)
            return
        torch.index_select(embedding, 0, plan.tokens_N, out=scratch.rows_ND)
        scratch.x_ND.copy_(scratch.rows_ND)

    def layer(self, depth: int, plan: PackedPlan, scratch: Scratch, kv: LayerKV) -> None:
        if depth in self._depths:
            self._operators.run(self.kernels, self._layers[depth], plan, scratch, kv)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        self.kernels.rms_norm(x_MD, self._tables.norm_D, self.config.rms_norm_eps, norm_MD)
        part_MV = self._logit_parts.own(logits_MV)
        self.kernels.linear(norm_MD, self._tables.head, part_MV)
        self._logit_parts.gather(part_MV, logits_MV)

    def forward(self) -> Forward | None:
        """None also while the kernels that it was made of are exchanged for others, and where ranks
        have to meet between the layers."""
        return self._forward if self.kernels is self._made_by else None

    def _make_forward(self) -> Forward | None:
        if self.kernels.forward is None or self._comm.size > 1:
            return None
        config, tables, depths = self.config, self._tables, sorted(self._depths)
        cos_TH, sin_TH = self._operators.turns
        return self.kernels.forward(
            ForwardParts(
                embedding_VD=tables.embedding,
                final_norm_D=tables.norm_D,
                head=tables.head,
                cos_TH=cos_TH,
                sin_TH=sin_TH,
                layers=[self._layers[depth] for depth in depths],
                kv=[self._passes.kv.layers[depth] for depth in depths],
                buffers=self._passes.scratch.for_native,
                eps=config.rms_norm_eps,
                scale=config.head_dim**-0.5,
                ffn_size=config.ffn_size,
                hidden_SKD=self._passes.kv.hidden_SKD,
                hidden_layers=self._hidden_layers,
            )
        )
