"""The Llama line as one decoder, operator by operator: the families of family_table.py.

    x += out(attention(rope(qkv(norm(x)))))
    x += down(silu(gate(y)) * up(y))            y = norm(x)

where norm scales by the root mean square. Families differ by their config: in biases, in the
positions of norms, in attention, and in mixtures (layer_kinds.py). GPT-2 (Radford et al., "Language
Models are Unsupervised Multitask Learners", 2019) adds learned positions to the tokens, has layer
norms and biases everywhere, and no gate. Ranks sum the residual after
attention and after the FFN: rank 0 contributes the residual plus its summand, the others only their
summands. llama_weights.py reads tensors, decoder.py runs passes.

Shapes:  N = packed tokens, M = packed logits rows, V = vocabulary, D = hidden size, E = fused q, k
         and v, F = FFN size, T = positions, I = inputs, H = a head or all of a kind, A = heads x
         head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.errors import given
from outrider.core.protocols import DraftNeeds
from outrider.kernels.native.forward import Forward, ForwardParts, LayerWeights, NativeForward
from outrider.kernels.native.rounds import RoundModel
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedLinear, PackedPlan
from outrider.models.configs import GPT2Config, LayeredConfig, LlamaConfig
from outrider.models.decoder import (
    LayerKV,
    ModelCapacity,
    PassDecoder,
    Passes,
    Scratch,
    decoder_traits,
)
from outrider.models.ffn import gated, mix
from outrider.models.latent import fill_heads, values_of_heads
from outrider.models.layer_kinds import Gate, Norms
from outrider.models.llama_weights import (
    EMBEDDING,
    WHOLE,
    Alone,
    Comm,
    LogitParts,
    Share,
    Tables,
    family_names,
    mtp_prefixes,
    read_layer,
    read_norm,
    read_tables,
)
from outrider.models.rope import Turns, growth_of, still_turns, turns_of
from outrider.models.rope_config import Rope
from outrider.models.weights import VISION_PREFIXES, Placement, TextNames, WeightReader, Weights

ALONE = Alone()


@dataclass(frozen=True, slots=True)
class LayerOperators:
    """A layer operator by operator, in sizes of a rank's share, and the tables before and after all
    layers. The native call for a whole pass (kernels/native/forward.py) has the same bits. Other
    positions need other operators. `still` are tables of no rotation, for heads that are normed
    after it; `growth_T` are the factors of queries by position."""

    config: LayeredConfig
    turns: Turns
    comm: Comm = ALONE
    still: Turns | None = None
    growth_T: Tensor | None = None

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
            reads = self.normed(kernels, layer, layer.attention_norm_D, scratch)
        fed = reads
        if self.config.traits.norms is Norms.TWO_PARALLEL:
            fed = torch.empty_like(reads)
            self.norm(kernels, scratch.x_ND, given(layer.ffn_norm_D, "norm of the FFN"), fed)
        self.attend(kernels, layer, reads, plan, scratch, kv)
        self.feed(kernels, layer, fed, scratch)

    def embed(self, kernels: Kernels, tables: Tables, plan: PackedPlan, scratch: Scratch) -> None:
        """Write the embeddings of the plan's tokens to `scratch.x_ND`."""
        traits, x_ND = self.config.traits, scratch.x_ND
        if isinstance(tables.embedding, Tensor):
            torch.index_select(tables.embedding, 0, plan.tokens_N, out=scratch.rows_ND)
            x_ND.copy_(scratch.rows_ND)
        else:
            tables.embedding.read(plan.tokens_N, x_ND)
        if traits.embedding_scale != 1:
            x_ND.mul_(traits.embedding_scale)
        if traits.normed_embedding:
            ones_D = torch.ones_like(tables.norm_D)
            kernels.rms_norm(x_ND, ones_D, self.config.rms_norm_eps, x_ND)

    def head(
        self, kernels: Kernels, tables: Tables, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor
    ) -> None:
        """Write the logits of `x_MD`, or a rank's part of them."""
        traits = self.config.traits
        self.norm(kernels, x_MD, tables.norm_D, norm_MD)
        kernels.linear(norm_MD, tables.head, logits_MV)
        if tables.head_bias_V is not None:
            logits_MV.add_(tables.head_bias_V)
        if traits.logit_scale != 1:
            logits_MV.mul_(traits.logit_scale)
        if traits.logit_cap:
            kernels.soft_cap(logits_MV, traits.logit_cap)

    def norm(
        self, kernels: Kernels, x_ND: Tensor, weight_D: Tensor, out_ND: Tensor, eps: float = 0.0
    ) -> None:
        """Norm rows by `weight_D`, or by the weight and the bias that are its rows."""
        eps = eps or self.config.rms_norm_eps
        if self.config.traits.norm_bias:
            kernels.layer_norm(x_ND, weight_D[0], weight_D[1], eps, out_ND)
        elif self.config.traits.centred:
            kernels.layer_norm(x_ND, weight_D, torch.zeros_like(weight_D), eps, out_ND)
        else:
            kernels.rms_norm(x_ND, weight_D, eps, out_ND)

    def normed(
        self, kernels: Kernels, layer: LayerWeights, weight_D: Tensor | None, scratch: Scratch
    ) -> Tensor:
        """The normed residual, which a product reads. The router of a mixture reads float32."""
        if weight_D is None:
            return scratch.x_ND
        out_ND = scratch.normed if layer.mixture is None else scratch.norm_ND
        self.norm(kernels, scratch.x_ND, weight_D, out_ND)
        return out_ND

    def attend(
        self,
        kernels: Kernels,
        layer: LayerWeights,
        reads: Tensor,
        plan: PackedPlan,
        scratch: Scratch,
        kv: LayerKV,
    ) -> None:
        """Add the attention of `reads` to `scratch.x_ND`."""
        config, qkv_NE, attended_NA = self.config, scratch.qkv_NE, scratch.attended_NA
        scales = config.traits.scales
        reads = reads if scales.attention_in == 1 else reads * scales.attention_in
        if layer.latent is not None:
            fill_heads(kernels, layer, reads, qkv_NE)
        else:
            kernels.linear(reads, given(layer.qkv, "attention"), qkv_NE)
            if layer.qkv_bias_E is not None:
                qkv_NE.add_(layer.qkv_bias_E)
        if scales.key != 1:
            keys = config.num_kv_heads * config.head_dim
            qkv_NE[:, -2 * keys : -keys].mul_(scales.key)
        if config.traits.qkv_clip:
            qkv_NE.clamp_(-config.traits.qkv_clip, config.traits.qkv_clip)
        turns = self._before_rotation(kernels, layer, plan, qkv_NE, kv)
        kernels.rope_append(qkv_NE, *turns, plan, *kv)
        kernels.attention(qkv_NE, *kv, plan, layer.attention or config.scale, attended_NA)
        if layer.gate is not None:
            gate_NA = torch.empty_like(attended_NA)
            kernels.linear(reads, layer.gate, gate_NA)
            kernels.sigmoid_mul(gate_NA, attended_NA)
        if layer.latent is not None:
            attended_NA = values_of_heads(kernels, layer.latent, attended_NA)
        if scales.attended != 1:
            attended_NA.mul_(scales.attended)
        product = (attended_NA, given(layer.out, "attention"), layer.out_bias_D)
        self.add(kernels, scratch, product, layer.attended_norm_D)

    def _before_rotation(
        self,
        kernels: Kernels,
        layer: LayerWeights,
        plan: PackedPlan,
        qkv_NE: Tensor,
        kv: LayerKV,
    ) -> Turns:
        """Norm queries and keys, and scale queries by position. Returns the rotation that is left
        to do."""
        config, turns = self.config, self.turns
        if self.still is not None:
            # Rows of queries alone: an arena without key heads gets nothing.
            values, (k_GSD, v_GSD) = config.num_kv_heads * config.head_dim, kv
            turned_NE = qkv_NE[:, :-values].contiguous()
            kernels.rope_append(turned_NE, *turns, plan, k_GSD[:0], v_GSD[:0])
            qkv_NE[:, :-values] = turned_NE
            turns = self.still
        if layer.q_norm_H is not None and layer.k_norm_H is not None:
            self._norm_heads(kernels, layer.q_norm_H, layer.k_norm_H, qkv_NE)
        if self.growth_T is not None:
            queries = config.num_heads * config.head_dim
            qkv_NE[:, :queries].mul_(self.growth_T[plan.positions_N, None])
        return turns

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

    def feed(self, kernels: Kernels, layer: LayerWeights, reads: Tensor, scratch: Scratch) -> None:
        """Add the FFN to `scratch.x_ND`. It reads `reads` if attention does so at the same time."""
        if self.config.traits.norms not in (Norms.PARALLEL, Norms.TWO_PARALLEL):
            reads = self.normed(kernels, layer, layer.ffn_norm_D, scratch)
        if layer.mixture is not None:
            mixed_ND = mix(kernels, given(self.config.experts, "sizes"), layer.mixture, reads)
            self._add_to_residual(kernels, scratch, mixed_ND, layer.fed_norm_D)
            return
        kernels.linear(reads, given(layer.gate_up, "dense FFN"), scratch.up_NU)
        if layer.gate_up_bias_2F is not None:
            scratch.up_NU.add_(layer.gate_up_bias_2F)
        scales = self.config.traits.scales
        if scales.gate != 1:
            scratch.up_NU[:, : scratch.activated_NF.shape[1]].mul_(scales.gate)
        gated(kernels, self.config.traits.gate, scratch.up_NU, scratch.activated_NF, layer.curve)
        if scales.fed != 1:
            scratch.activated_NF.mul_(scales.fed)
        product = (scratch.activated_NF, given(layer.down, "dense FFN"), layer.down_bias_D)
        self.add(kernels, scratch, product, layer.fed_norm_D)

    def add(
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
            self.norm(kernels, given_ND, norm_D, given_ND, self.config.traits.after_eps)
        if self.config.traits.residual_scale != 1:
            given_ND.mul_(self.config.traits.residual_scale)
        scratch.x_ND.add_(given_ND)


@dataclass(frozen=True, slots=True)
class CheaperParts:
    """The parts that a cheaper model does not share: kernels, matrices, and the `depths` of the
    layers that it runs. `layers` has an entry for every layer; the others are never read."""

    kernels: Kernels
    head: PackedLinear
    layers: Sequence[LayerWeights]
    depths: Sequence[int]


class LlamaModel(PassDecoder):
    """CausalLM over a PagedKV that it owns. Reads every weight when built.

    With a `comm` of several ranks it holds one rank's share of weights and KV. Only rank 0 gets
    steps to run; the other ranks `follow`.
    """

    operators = LayerOperators

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        *,
        kernels: Kernels,
        placement: Placement,
        capacity: ModelCapacity,
        comm: Comm = ALONE,
    ) -> None:
        self.config, self.kernels = config, kernels
        share = Share(comm.rank, comm.size)
        self._comm, part = comm, share.part(config)
        if {one.name for one in kernels.choices} == {"triton"} and config.traits.gate is Gate.SILU:
            # Triton's linears round their inputs to the dtype of the weights anyway, so buffers in
            # that dtype give the same bits. A matrix always reads inputs of one dtype, and a head
            # float32, because a compiler may sum in another order for another dtype.
            placement = replace(placement, activations=placement.dtype)
        self._spec, self._placement = placement.spec(config), placement
        self._score_scale = config.scale
        names = family_names(weights, config.family)
        reader = WeightReader(weights, kernels, placement, text=names)
        self._tables = read_tables(reader, config, share)
        layers = range(config.num_layers)
        self._layers = [self.read_layer(reader, index, share) for index in layers]
        text = TextNames.of(weights)
        unread = [text.stored(prefix) for prefix in self.read_others(reader)]
        unread += VISION_PREFIXES if config.also_sees else ()
        weights.check_all_taken(unread=(*mtp_prefixes(weights, config), *unread))
        self._depths = frozenset(range(config.num_layers))
        self._operators = self._operators_of(config, part, capacity, placement.device, comm)
        self._hidden_layers = capacity.hidden_layers
        self._passes = Passes(
            placement.spec(part),
            up_size=part.traits.gate.num_up * part.ffn_size,
            placement=placement,
            capacity=capacity,
        )
        self._logit_parts = LogitParts(comm, config.vocab_size, self._passes.logits_MV)
        self._made_by, self._forward = kernels, self._make_forward()

    def read_layer(self, reader: WeightReader, index: int, share: Share = WHOLE) -> LayerWeights:
        """Read layer `index`, with the kernels of the reader."""
        return read_layer(reader, self.config, index, share)

    def read_others(self, reader: WeightReader) -> tuple[str, ...]:
        """Read tensors that belong to no layer. Returns prefixes of names that are never read."""
        del reader
        return ()

    def _operators_of(
        self,
        config: LlamaConfig,
        part: LlamaConfig,
        capacity: ModelCapacity,
        device: torch.device,
        comm: Comm = ALONE,
    ) -> list[LayerOperators]:
        """The operators of every layer, in the sizes of a rank's `part`."""
        turns = layer_turns(config, capacity, device)
        still = still_turns(turns[0]) if config.traits.turns_first else None
        growth = config.traits.query_growth if config.queries_grow else None
        growth_T = None if growth is None else growth_of(growth, turns[0][0])
        return [
            self.operators(part.at(n), one, comm, still, growth_T) for n, one in enumerate(turns)
        ]

    @property
    def logits(self) -> Tensor:
        """The buffer for the logits of one step, of shape [M, V]; every step overwrites it."""
        return self._passes.logits_MV

    @property
    def streamed(self) -> tuple[Tensor, ...]:
        """The weights that every pass reads completely: all linears but experts, and the head."""
        packed = [self._tables.head]
        for layer in self._layers:
            dense = (layer.gate_up, layer.down, layer.qkv, layer.out)
            packed += [one for one in dense if one is not None]
            packed += () if layer.mixture is None else layer.mixture.always_read
            packed += () if layer.latent is None else layer.latent.matrices
        return tuple(one.data for one in packed)

    def cheaper(self, parts: CheaperParts) -> LlamaModel:
        """A model over this one's memory that drafts for it, with other matrices or fewer layers,
        and buffers of its own. It stores no hidden states. Layers that it leaves out get no keys
        and values of the tokens fed to it."""
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

    def with_capacity(self, capacity: ModelCapacity) -> Self | None:
        """A model with the same weights and with memory and buffers of its own, for another engine;
        None if ranks share this one or its kernels have no twin."""
        if self._comm.size > 1 or self.kernels.twin is None:
            return None
        other, config, placement = copy(self), self.config, self._placement
        other.kernels = other._made_by = self.kernels.twin()
        other._operators = self._operators_of(config, config, capacity, placement.device)
        other._hidden_layers = capacity.hidden_layers
        other._passes = Passes(
            self._spec,
            up_size=config.traits.gate.num_up * config.ffn_size,
            placement=placement,
            capacity=capacity,
        )
        other._logit_parts = LogitParts(self._comm, config.vocab_size, other._passes.logits_MV)
        other._forward = other._make_forward()
        return other

    @property
    def tables(self) -> Tables:
        """Embedding, last norm and output head, for drafters that share them."""
        return self._tables

    @property
    def layers(self) -> Sequence[LayerWeights]:
        """The weights of every layer, for a model that drafts with some of them."""
        return self._layers

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        self._operators[0].embed(self.kernels, self._tables, plan, scratch)

    def layer(self, depth: int, plan: PackedPlan, scratch: Scratch, kv: LayerKV) -> None:
        if depth in self._depths:
            operators = self._operators[depth]
            operators.run(self.kernels, self._layers[depth], plan, scratch, kv)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        part_MV = self._logit_parts.own(logits_MV)
        self._operators[-1].head(self.kernels, self._tables, x_MD, norm_MD, part_MV)
        self._logit_parts.gather(part_MV, logits_MV)

    def forward(self) -> Forward | None:
        """The native call for a whole pass. None if the kernels have none, while other kernels
        replace those that it was made with, and for ranks without shared memory, which have to meet
        between layers."""
        return self._forward if self.kernels is self._made_by else None

    def lead(self, announce: Callable[[PackedPlan, Tensor], None]) -> None:
        """Call `announce` before a pass that is no native call; native calls notify other ranks."""
        self._passes.announce = announce

    def follow(self, plan: PackedPlan, wanted_M: Tensor) -> None:
        """Run this rank's share of a pass that rank 0 planned; for ranks other than 0."""
        self._passes.follow(self, plan, wanted_M)

    def copy_slots(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.state.copy_slots(source, target)

    @property
    def native_share(self) -> RoundModel | None:
        """This rank's part of passes that are one native call; None if passes are not."""
        forward = self._forward
        if not isinstance(forward, NativeForward):
            return None
        return RoundModel(forward, self.logits, self.state.page_size)

    def runs_native(self, needs: DraftNeeds) -> bool:
        """True if a step with these `needs` is one native call."""
        return self.forward() is not None and needs.hidden_layers in ((), self._hidden_layers)

    def _make_forward(self) -> Forward | None:
        memory = self._comm.memory
        if self.kernels.forward is None or (self._comm.size > 1 and memory is None):
            return None
        config, tables, depths = self.config, self._tables, sorted(self._depths)
        if config.traits.by_operator:
            return None
        frames, first = self._passes.kv.frames, self._operators[0]
        scratch, gates = self._passes.scratch, config.traits.gated or config.traits.gate_apart
        return self.kernels.forward(
            ForwardParts(
                embedding_VD=tables.embedding,
                final_norm_D=tables.norm_D,
                head=tables.head,
                head_bias_V=tables.head_bias_V,
                turns=[self._operators[depth].turns for depth in depths],
                layers=[self._layers[depth] for depth in depths],
                kv=[self._passes.kv.layers[depth] for depth in depths],
                buffers=scratch.for_native,
                eps=config.rms_norm_eps,
                scale=config.scale,
                ffn_size=first.config.ffn_size,
                hidden_SKD=self._passes.kv.hidden_SKD,
                hidden_layers=self._hidden_layers,
                frames_P=None if frames is None else frames.of_P,
                traits=decoder_traits(config),
                ranks=None if memory is None else memory.address,
                gated_NA=torch.empty_like(scratch.attended_NA) if gates else None,
                still=first.still,
                growth_T=first.growth_T,
            )
        )


def layer_turns(config: LlamaConfig, capacity: ModelCapacity, device: torch.device) -> list[Turns]:
    """Rotary tables of every layer. Layers with the same positions share them."""
    num_positions = capacity.num_positions(config.max_tokens, reach=config.reach)
    kinds = [
        (config.layer_kind(index).rope, config.at(index)) for index in range(config.num_layers)
    ]
    tables: dict[tuple[Rope | None, int], Turns] = {}
    for rope, sizes in kinds:
        if (rope, sizes.head_dim) in tables:
            continue
        turns = turns_of(replace(sizes, rope=rope or config.rope), num_positions, device)
        tables[rope, sizes.head_dim] = still_turns(turns) if rope is None else turns
    return [tables[rope, sizes.head_dim] for rope, sizes in kinds]


# Tensors of GPT-2 on the hub have this prefix or none. Old files also store the causal mask, which
# is no weight.
PREFIX = "transformer."
MASKS = (".attn.bias", ".attn.masked_bias")
# Names of modules in other families, and those of GPT-2.
_NAMES = {
    "model.embed_tokens.": "wte.",
    "model.wpe.": "wpe.",
    "model.norm.": "ln_f.",
    "model.layers.": "h.",
    "input_layernorm.": "ln_1.",
    "post_attention_layernorm.": "ln_2.",
    "self_attn.qkv_proj.": "attn.c_attn.",
    "self_attn.o_proj.": "attn.c_proj.",
    "mlp.up_proj.": "mlp.c_fc.",
    "mlp.down_proj.": "mlp.c_proj.",
}


@dataclass(frozen=True, slots=True)
class _Names(TextNames):
    """GPT-2's names, with the prefix `model`."""

    def stored(self, name: str) -> str:
        if not name.startswith("model."):
            return name
        for plain, own in _NAMES.items():
            name = name.replace(plain, own)
        return self.model + name


class GPT2Model(PassDecoder):
    """CausalLM over a PagedKV that it owns. Reads every weight when built."""

    def __init__(
        self,
        config: GPT2Config,
        weights: Weights,
        *,
        kernels: Kernels,
        placement: Placement,
        capacity: ModelCapacity,
    ) -> None:
        self.config, self.kernels = config, kernels
        self._spec, self._score_scale = placement.spec(config), config.scale
        names = _Names(PREFIX if f"{PREFIX}wte.weight" in weights else "")
        reader = WeightReader(weights, kernels, placement, text=names, transposed=True)
        hidden, length = config.hidden_size, capacity.num_positions(config.max_tokens)
        embedding_VD = reader.table(EMBEDDING, config.vocab_size, hidden)
        positions_TD = reader.vector("model.wpe.weight", config.max_tokens, hidden)
        # Only siblings of a tree that are never accepted have a position past the window.
        missing = max(0, length - config.max_tokens)
        self._positions_TD = functional.pad(positions_TD, (0, 0, 0, missing))
        self._tables = Tables(
            embedding=embedding_VD,
            norm_D=read_norm(reader, config, "model.norm", hidden),
            head=reader.head(embedding_VD, tied=config.tie_word_embeddings),
        )
        self._layers = [read_layer(reader, config, index) for index in range(config.num_layers)]
        weights.check_all_taken(ignored=MASKS)
        # Heads do not rotate.
        turns_TH = torch.empty(length, config.head_dim // 2, device=placement.device)
        self._operators = LayerOperators(config, still_turns((turns_TH, turns_TH)))
        self._passes = Passes(
            self._spec, up_size=config.ffn_size, placement=placement, capacity=capacity
        )

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        torch.index_select(self._tables.embeddings, 0, plan.tokens_N, out=scratch.rows_ND)
        torch.index_select(self._positions_TD, 0, plan.positions_N, out=scratch.x_ND)
        scratch.x_ND.add_(scratch.rows_ND)

    def layer(self, depth: int, plan: PackedPlan, scratch: Scratch, kv: LayerKV) -> None:
        self._operators.run(self.kernels, self._layers[depth], plan, scratch, kv)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        self._operators.head(self.kernels, self._tables, x_MD, norm_MD, logits_MV)

    def forward(self) -> None:
        """Return None: no native kernel has this family's order of operators."""
