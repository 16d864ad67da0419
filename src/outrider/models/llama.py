"""The Llama line as one decoder: the families of family_table.py.

llama_layers.py says what a layer does, llama_weights.py where its tensors come from; decoder.py
runs the passes.

Shapes:  N = packed tokens, M = packed logits rows, V = vocabulary, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from outrider.core.protocols import DraftNeeds
from outrider.kernels.native.forward import (
    DecoderTraits,
    Forward,
    ForwardParts,
    LayerWeights,
    NativeForward,
)
from outrider.kernels.native.rounds import RoundModel
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedLinear, PackedPlan
from outrider.models.decoder import LayerKV, ModelCapacity, PassDecoder, Passes, Scratch
from outrider.models.families import LlamaConfig
from outrider.models.layer_kinds import Gate, Norms
from outrider.models.llama_layers import ALONE, LayerOperators
from outrider.models.llama_weights import Tables, mtp_prefixes, read_layer, read_tables
from outrider.models.rope import Turns, still_turns, turns_of
from outrider.models.rope_config import Rope
from outrider.models.share import Comm, LogitParts, Share
from outrider.models.text_names import BESIDE_TEXT, TextNames
from outrider.models.weights import Placement, WeightReader, Weights


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

    With a `comm` of several ranks it holds one rank's share of weights and KV. Rank 0 alone is
    asked for passes, and the others `follow`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        *,
        kernels: Kernels,
        place: Placement,
        capacity: ModelCapacity,
        comm: Comm = ALONE,
    ) -> None:
        self.config, self.kernels = config, kernels
        share = Share(comm.rank, comm.size)
        self._comm, part = comm, share.part(config)
        if {one.name for one in kernels.choices} == {"triton"} and config.traits.gate is Gate.SILU:
            # Its linears round what they read to the dtype of a weight: to the same bits. A matrix
            # is always read in one dtype, a head in float32: compilers may sum in other orders.
            place = replace(place, activations=place.dtype)
        self._spec, self._place = place.spec(config), place
        reader = WeightReader(weights, kernels, place, text=TextNames.of(weights))
        self._tables = read_tables(reader, config, share)
        self._layers = [
            read_layer(reader, config, index, share) for index in range(config.num_layers)
        ]
        seeing = BESIDE_TEXT if config.also_sees else ()
        weights.check_all_taken(beside=(*mtp_prefixes(weights, config), *seeing))
        self._depths = frozenset(range(config.num_layers))
        self._operators = [
            LayerOperators(part, t, comm) for t in _turns(config, capacity, place.device)
        ]
        self._hidden_layers = capacity.hidden_layers
        self._passes = Passes(
            place.spec(part), up_size=2 * part.ffn_size, place=place, capacity=capacity
        )
        self._logit_parts = LogitParts(comm, config.vocab_size, self._passes.logits_MV)
        self._made_by, self._forward = kernels, self._make_forward()

    @property
    def logits(self) -> Tensor:
        """Room for the logits of one step, of shape [M, V]; every step writes over it."""
        return self._passes.logits_MV

    @property
    def streamed(self) -> tuple[Tensor, ...]:
        """The weights that every pass reads whole: all linears but experts, and the output head."""
        packed = [self._tables.head]
        for layer in self._layers:
            dense = (layer.gate_up, layer.down)
            packed += [layer.qkv, layer.out, *(one for one in dense if one is not None)]
            packed += () if layer.mixture is None else layer.mixture.always_read
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

    def beside(self, capacity: ModelCapacity) -> Self | None:
        """The same weights with memory and buffers of its own, for another engine; None where ranks
        have a share each, or where kernels cannot be doubled."""
        if self._comm.size > 1 or self.kernels.twin is None:
            return None
        other, config, place = copy(self), self.config, self._place
        turns = _turns(config, capacity, place.device)
        other.kernels = other._made_by = self.kernels.twin()
        other._operators = [LayerOperators(config, one) for one in turns]
        other._hidden_layers = capacity.hidden_layers
        other._passes = Passes(
            self._spec, up_size=2 * config.ffn_size, place=place, capacity=capacity
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
        """Of every layer, for a model that drafts with some of them."""
        return self._layers

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        embedding = self._tables.embedding
        if isinstance(embedding, Tensor):
            torch.index_select(embedding, 0, plan.tokens_N, out=scratch.rows_ND)
            scratch.x_ND.copy_(scratch.rows_ND)
        else:
            embedding.read(plan.tokens_N, scratch.x_ND)
        if self.config.traits.embedding_scale != 1:
            scratch.x_ND.mul_(self.config.traits.embedding_scale)

    def layer(self, depth: int, plan: PackedPlan, scratch: Scratch, kv: LayerKV) -> None:
        if depth in self._depths:
            operators = self._operators[depth]
            operators.run(self.kernels, self._layers[depth], plan, scratch, kv)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        traits = self.config.traits
        self._operators[-1].norm(self.kernels, x_MD, self._tables.norm_D, norm_MD)
        part_MV = self._logit_parts.own(logits_MV)
        self.kernels.linear(norm_MD, self._tables.head, part_MV)
        if traits.logit_scale != 1:
            part_MV.mul_(traits.logit_scale)
        if traits.logit_cap:
            self.kernels.soft_cap(part_MV, traits.logit_cap)
        self._logit_parts.gather(part_MV, logits_MV)

    def forward(self) -> Forward | None:
        """None also while the kernels that it was made of are exchanged for others, and where ranks
        that share no memory have to meet between the layers."""
        return self._forward if self.kernels is self._made_by else None

    def lead(self, announce: Callable[[PackedPlan, Tensor], None]) -> None:
        """Tell other ranks of passes that are no native call, which does so itself."""
        self._passes.announce = announce

    def follow(self, plan: PackedPlan, wanted_M: Tensor) -> None:
        """Run along, with the share of a rank but 0, a pass that rank 0 planned."""
        self._passes.follow(self, plan, wanted_M)

    def copy_slots(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.state.copy_slots(source, target)

    @property
    def native_share(self) -> RoundModel | None:
        """What runs along passes that are one native call; None where there are none."""
        forward = self._forward
        if not isinstance(forward, NativeForward):
            return None
        return RoundModel(forward, self.logits, self.state.page_size)

    def runs_native(self, needs: DraftNeeds) -> bool:
        """Whether a step is one native call."""
        return self.forward() is not None and needs.hidden_layers in ((), self._hidden_layers)

    def _make_forward(self) -> Forward | None:
        memory = self._comm.memory
        if self.kernels.forward is None or (self._comm.size > 1 and memory is None):
            return None
        config, tables, depths = self.config, self._tables, sorted(self._depths)
        frames = self._passes.kv.frames
        return self.kernels.forward(
            ForwardParts(
                embedding_VD=tables.embedding,
                final_norm_D=tables.norm_D,
                head=tables.head,
                turns=[self._operators[depth].turns for depth in depths],
                layers=[self._layers[depth] for depth in depths],
                kv=[self._passes.kv.layers[depth] for depth in depths],
                buffers=self._passes.scratch.for_native,
                eps=config.rms_norm_eps,
                scale=config.scale,
                ffn_size=self._operators[0].config.ffn_size,
                hidden_SKD=self._passes.kv.hidden_SKD,
                hidden_layers=self._hidden_layers,
                frames_P=None if frames is None else frames.of_P,
                traits=_decoder_traits(config),
                ranks=None if memory is None else memory.address,
            )
        )


def _decoder_traits(config: LlamaConfig) -> DecoderTraits:
    traits = config.traits
    return DecoderTraits(
        embedding_scale=traits.embedding_scale,
        residual_scale=traits.residual_scale,
        logit_scale=traits.logit_scale,
        logit_cap=traits.logit_cap,
        centred=traits.centred,
        parallel=traits.norms is Norms.PARALLEL,
        whole_heads=traits.whole_heads,
        gelu=traits.gate is Gate.GELU,
    )


def _turns(config: LlamaConfig, capacity: ModelCapacity, device: torch.device) -> list[Turns]:
    """Tables of every layer. Layers that turn alike share them."""
    num_positions = capacity.num_positions(config.max_tokens, reach=config.reach)
    plain = turns_of(config, num_positions, device)
    ropes = [config.layer_kind(index).rope for index in range(config.num_layers)]
    tables: dict[Rope | None, Turns] = {config.rope: plain}
    for rope in set(ropes) - {config.rope}:
        tables[rope] = (
            still_turns(plain)
            if rope is None
            else turns_of(replace(config, rope=rope), num_positions, device)
        )
    return [tables[rope] for rope in ropes]
