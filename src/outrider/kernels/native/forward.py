"""Forward pass of a Llama-shaped decoder as one native call, over pointers set at loading.

See csrc/forward.cpp: operators, order and buffers are those of the decoder's own layers, so the
bits are the same. Draft heads are decoders with an entrance, which joins a token with the hidden
state of the token before it.

Shapes:  V = vocabulary, D = hidden size, T = positions, H = half of a head or a head, G = KV heads,
         S = slots, M = logits rows, E = fused q, k and v, F = FFN size, K = captured layers,
         N = tokens, X = scores of a router; others as in models/decoder.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from outrider.core.errors import ContractError, MachineError, given
from outrider.kernels.native.layers import (
    LatentWeights,
    MixtureWeights,
    NativeDelta,
    described_layer,
)
from outrider.kernels.native.ops import (
    SUFFIXES,
    LinearStruct,
    LookStruct,
    NativeOps,
    PassStruct,
    function,
    pointer,
    struct_fields,
)
from outrider.kernels.plan import AttentionKind, PackedLinear, PackedPlan, PackedTable
from outrider.kernels.reference.delta import Cells, DeltaWeights, TokenRun

# Names of gates, in the order of `FfnGate` in csrc/forward.cpp.
_FFN_GATES = ("silu", "gelu", "none", "squared")
# Names of recurrences, in the order of `Mechanism` there.
_MECHANISMS = ("delta", "mamba", "convolution")


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The recurrent part of a layer: its first product, the weights of the operator `delta`, the
    norm of that operator's output, if any, and the last product. Columns of the first product are
    multiplied by `scale_P` after its bias is added (plugins/hybrids/model.py)."""

    first: PackedLinear
    delta: DeltaWeights
    out: PackedLinear
    norm_V: Tensor | None = None
    first_bias_P: Tensor | None = None
    scale_P: Tensor | None = None
    out_bias_D: Tensor | None = None


@dataclass(frozen=True, slots=True)
class InputNet:
    """The matrices by which a layer of Gemma 4 reads its own input and adds to the residual, and
    the norm of their output."""

    into: PackedLinear
    back: PackedLinear
    norm_D: Tensor


@dataclass(frozen=True, slots=True)
class RoutedNorms:
    """Norms of a layer with a mixture and a dense net: of the inputs of router and experts, and of
    the outputs of dense net and experts."""

    router_D: Tensor
    experts_D: Tensor
    dense_D: Tensor
    mixed_D: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of a layer. Norms and biases are float32; None if the family lacks them.
    `attended_norm_D` and `fed_norm_D` norm the outputs of attention and FFN. Norms of queries and
    keys have the size of one head, or of all heads as one vector. If `attention` is None, a token
    sees all keys. The sigmoid of `gate` scales the outputs of heads. With a `latent`, `qkv` gives
    queries, or the vector that they come from, the latent and its key. The FFN is a `mixture`, or
    the dense net of `gate_up` and `down`, whose function has the numbers `curve`, if any; with
    `norms` it is both. Layers of hybrids may lack attention or FFN. A layer may add what `inputs`
    make of an input of its own; its output is then multiplied by `scale`. Without `k_norm_H` such a
    layer reads the keys of an earlier one."""

    qkv: PackedLinear | None = None
    out: PackedLinear | None = None
    attention_norm_D: Tensor | None = None
    qkv_bias_E: Tensor | None = None
    q_norm_H: Tensor | None = None
    k_norm_H: Tensor | None = None
    out_bias_D: Tensor | None = None
    ffn_norm_D: Tensor | None = None
    gate_up: PackedLinear | None = None
    gate_up_bias_2F: Tensor | None = None
    down: PackedLinear | None = None
    down_bias_D: Tensor | None = None
    attended_norm_D: Tensor | None = None
    fed_norm_D: Tensor | None = None
    attention: AttentionKind | None = None
    mixture: MixtureWeights | None = None
    gate: PackedLinear | None = None
    recurrence: Recurrence | None = None
    latent: LatentWeights | None = None
    curve: tuple[float, ...] = ()
    inputs: InputNet | None = None
    norms: RoutedNorms | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class RuleBuffers:
    """Contiguous float32 buffers of layers with a recurrence, which is `mechanism` (a name of
    models/configs.py): of their first products, their outputs, and these next to their gates.
    `tiled` says in which order the last product reads value heads (plugins/hybrids/model.py)."""

    first_NP: Tensor
    out_NO: Tensor
    gated_N2O: Tensor
    mechanism: str
    tiled: bool


@dataclass(frozen=True, slots=True)
class ForwardBuffers:
    """Contiguous float32 buffers of one step, with a row for every packed token."""

    x_ND: Tensor
    norm_ND: Tensor
    qkv_NE: Tensor
    attended_NA: Tensor
    up_NU: Tensor
    activated_NF: Tensor


class Attends(IntEnum):
    """The input of the first layer's attention: normed residual, entrance's pair, or residual."""

    NORMED = 0
    PAIR = 1
    RESIDUAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """The step before the first layer of heads. The embedding of a token and the state of the token
    before it, each normed if there is a norm, form a pair. `join` computes the residual from the
    pair; without one the residual is the state, normed if `keeps_norm`. `attends` applies to the
    first layer; later layers read the normed residual.

    A pass reads `states_ND` and writes the residuals after the last layer to `own_ND`, after the
    final norm if `gives_normed`. These and `pair_N2D` are contiguous float32.
    """

    token_norm_D: Tensor | None
    state_norm_D: Tensor | None
    states_ND: Tensor
    pair_N2D: Tensor
    own_ND: Tensor
    join: PackedLinear | None = None
    join_bias_D: Tensor | None = None
    attends: Attends = Attends.NORMED
    keeps_norm: bool = False
    gives_normed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTraits:
    """Traits of a decoder, by default a Llama's. The outputs of attention and FFN are multiplied by
    `residual_scale`, logits by `logit_scale` and then softly capped at `logit_cap`, if not 0.
    `centred` norms are layer norms without bias. If `parallel`, attention and FFN read the same
    norm; if `whole_heads`, norms of queries and keys take all heads as one vector. With
    `norm_bias`, the bias of a norm follows its weight in memory. `gate` is the FFN's. Norms of the
    outputs of attention and FFN have the epsilon `after_eps`, unless it is 0. Queries, keys and
    values are clamped to `qkv_clip`, unless it is 0. With `normed_embedding`, embeddings are normed
    without weights."""

    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    centred: bool = False
    parallel: bool = False
    whole_heads: bool = False
    norm_bias: bool = False
    gate: str = "silu"
    after_eps: float = 0.0
    qkv_clip: float = 0.0
    normed_embedding: bool = False


PLAIN_DECODER = DecoderTraits()


@dataclass(frozen=True, slots=True)
class ForwardParts:
    """The parts of a decoder. The tensors must live, unmoved, as long as the forward does. Every
    pass writes the residuals after `hidden_layers` to `hidden_SKD`, in the dtype of the weights. If
    `final_norm_D` is None, the output head reads the last residual itself. `turns` are the tables
    of cos and sin of each layer, of shape TH. If `frames_P` (int32) is not None, it maps the pages
    of layers with a window to frames of an arena of their own. A rank's share has the address of
    its `ranks` (ranks.py), and no frames. Layers with a gate need `gated_NA`, a float32 buffer. If
    norms of queries and keys follow the rotation, `still` are tables of none; queries are
    multiplied by `growth_T` at their positions. Layers with a recurrence need the buffers `rules`.
    """

    embedding_VD: Tensor | PackedTable
    final_norm_D: Tensor | None
    head: PackedLinear
    turns: Sequence[tuple[Tensor, Tensor]]
    layers: Sequence[LayerWeights]
    kv: Sequence[tuple[Tensor, Tensor]]
    buffers: ForwardBuffers
    eps: float
    scale: float
    ffn_size: int
    hidden_SKD: Tensor
    hidden_layers: Sequence[int] = ()
    frames_P: Tensor | None = None
    entrance: Entrance | None = None
    traits: DecoderTraits = PLAIN_DECODER
    ranks: int | None = None
    head_bias_V: Tensor | None = None
    gated_NA: Tensor | None = None
    still: tuple[Tensor, Tensor] | None = None
    growth_T: Tensor | None = None
    rules: RuleBuffers | None = None


class Forward(Protocol):
    def __call__(self, plan: PackedPlan, wanted_M: Tensor, logits_MV: Tensor) -> None:
        """Run `plan`; write the logits of the packed tokens `wanted_M` (int32) to `logits_MV`.

        Raises IndexError for a token outside the vocabulary, before anything is written, and
        MachineError when another rank of the model is gone.
        """
        ...


class _Rule(Structure):
    _fields_ = struct_fields(
        (LinearStruct, "first out"),
        (c_void_p, "sizes norm rows found gated"),
        (c_int32, "row_size index tiled mechanism"),
    )


class _Layer(Structure):
    _fields_ = struct_fields(
        (c_void_p, "attention_norm"),
        (LinearStruct, "qkv"),
        (c_void_p, "q_norm k_norm"),
        (LinearStruct, "gate"),
        (c_void_p, "gated"),
        (LinearStruct, "out"),
        (c_void_p, "attended_norm ffn_norm"),
        (LinearStruct, "gate_up down"),
        (c_void_p, "fed_norm cos sin"),
        (LookStruct, "look"),
        (c_void_p, "keys values mixture latent rule"),
    )


class _Entrance(Structure):
    _fields_ = struct_fields(
        (c_void_p, "token_norm state_norm"),
        (LinearStruct, "join"),
        (c_void_p, "states pair own"),
        (c_int32, "attends keeps_norm gives_normed"),
    )


class _Decoder(Structure):
    _fields_ = struct_fields(
        (c_void_p, "team rope_append attention embedding lookup final_norm"),
        (LinearStruct, "head"),
        (c_void_p, "layers x norm qkv attended up activated hidden captured entrance no_bias"),
        (c_void_p, "ranks frames"),
        (c_int64, "local_stride"),
        (c_void_p, "embedding_norm still_cos still_sin growth"),
        (c_float, "eps after_eps qkv_clip embedding_scale residual_scale logit_scale logit_cap"),
        (c_int32, "num_layers hidden_size ffn_size vocab_size dtype num_captured"),
        (c_int32, "parallel whole_heads gate norm_bias head_size"),
        (c_void_p, "runs"),
    )


_RANKS_ENDED = -2


class NativeForward:
    """One decoder's pass. Holds every tensor that native code points to."""

    def __init__(self, ops: NativeOps, library: ctypes.CDLL, parts: ForwardParts) -> None:
        self.library = library
        self._ops, self._parts = ops, parts
        rules, self._rules = _rules(parts)
        layers = (_Layer * len(parts.layers))(
            *(
                _layer(parts, *each)
                for each in zip(parts.layers, parts.kv, parts.turns, rules, strict=True)
            )
        )
        self._layers = layers
        # Layers with a window and layers without one have arenas of different lengths.
        keys = {bool(layer.look.window): k for layer, (k, _) in zip(layers, parts.kv, strict=True)}
        self._k_GSD = keys.get(False, parts.kv[0][0])
        vocab_size, hidden_size = parts.embedding_VD.shape
        if parts.hidden_SKD.dtype != parts.embedding_VD.dtype:
            raise ContractError("hidden states have another dtype than the weights")
        embedding, lookup = _embedding(parts.embedding_VD)
        self._captured = (c_int32 * len(parts.hidden_layers))(*parts.hidden_layers)
        self._entrance = None if parts.entrance is None else _entrance(parts.entrance)
        traits = parts.traits
        self._no_bias_D = parts.buffers.x_ND.new_zeros(hidden_size) if traits.centred else None
        self._ones_D = parts.buffers.x_ND.new_ones(hidden_size)
        self._decoder = _Decoder(
            ops.team,
            *ops.functions(self._k_GSD.dtype),
            embedding,
            lookup,
            pointer(parts.final_norm_D),
            LinearStruct.of(parts.head, parts.head_bias_V),
            ctypes.addressof(layers),
            *(getattr(parts.buffers, item.name).data_ptr() for item in fields(parts.buffers)),
            parts.hidden_SKD.data_ptr(),
            ctypes.addressof(self._captured),
            None if self._entrance is None else ctypes.addressof(self._entrance),
            pointer(self._no_bias_D),
            parts.ranks,
            pointer(parts.frames_P),
            keys.get(True, self._k_GSD).stride(0),
            pointer(self._ones_D if traits.normed_embedding else None),
            *((None, None) if parts.still is None else map(pointer, parts.still)),
            pointer(parts.growth_T),
            parts.eps,
            traits.after_eps or parts.eps,
            traits.qkv_clip,
            traits.embedding_scale,
            traits.residual_scale,
            traits.logit_scale,
            traits.logit_cap,
            len(parts.layers),
            hidden_size,
            parts.ffn_size,
            vocab_size,
            list(SUFFIXES).index(parts.embedding_VD.dtype),
            len(parts.hidden_layers),
            traits.parallel,
            traits.whole_heads,
            _FFN_GATES.index(traits.gate),
            traits.norm_bias,
            parts.head.num_out,
        )
        self.address = ctypes.addressof(self._decoder)
        self._run = function(library, "forward")

    def follow(self, delta: NativeDelta, runs: Sequence[TokenRun], cells: Cells) -> None:
        """Set the runs of the next pass of a hybrid, which hold until `delta` describes others."""
        self._decoder.runs = delta.described(runs, cells)

    @property
    def team(self) -> int:
        """The address of the team of threads that runs passes."""
        return self._ops.team

    @property
    def entrance(self) -> Entrance | None:
        return self._parts.entrance

    @property
    def num_logits(self) -> int:
        """The number of logits that the output head gives of a token."""
        return self._parts.head.num_out

    @property
    def max_tokens(self) -> int:
        """The number of packed tokens that the buffers can hold."""
        return self._parts.buffers.x_ND.shape[0]

    def blank_pass(self, page_size: int) -> PassStruct:
        return self._ops.blank(self._parts.buffers.qkv_NE.shape[1], self._k_GSD, page_size)

    def __call__(self, plan: PackedPlan, wanted_M: Tensor, logits_MV: Tensor) -> None:
        parts = self._parts
        described = self._ops.describe(plan, parts.buffers.qkv_NE.shape[1], self._k_GSD)
        foreign = self._run(
            self.address,
            described,
            plan.tokens_N.data_ptr(),
            wanted_M.data_ptr(),
            wanted_M.shape[0],
            logits_MV.data_ptr(),
        )
        if foreign == _RANKS_ENDED:
            raise MachineError("another rank of the model is gone")
        if foreign >= 0:
            raise IndexError(f"token {int(plan.tokens_N[foreign])} is not in the vocabulary")


def _embedding(embedding_VD: Tensor | PackedTable) -> tuple[int, int | None]:
    """The address of an embedding, and of the function that reads it; None if it is a tensor."""
    if isinstance(embedding_VD, Tensor):
        return embedding_VD.data_ptr(), None
    return embedding_VD.packed.pointer, embedding_VD.lookup


def _layer(
    parts: ForwardParts,
    layer: LayerWeights,
    kv: tuple[Tensor, Tensor],
    turns: tuple[Tensor, Tensor],
    rule: int | None,
) -> _Layer:
    mixture, dense, gate = layer.mixture, (LinearStruct(), LinearStruct()), layer.gate
    latent, qkv, out = layer.latent, LinearStruct(), LinearStruct()
    if rule is None:
        qkv = LinearStruct.of(given(layer.qkv, "attention"), layer.qkv_bias_E)
        out = LinearStruct.of(given(layer.out, "attention"), layer.out_bias_D)
    if mixture is None:
        dense = (
            LinearStruct.of(given(layer.gate_up, "dense FFN"), layer.gate_up_bias_2F),
            LinearStruct.of(given(layer.down, "dense FFN"), layer.down_bias_D),
        )
    return _Layer(
        pointer(layer.attention_norm_D),
        qkv,
        pointer(layer.q_norm_H),
        pointer(layer.k_norm_H),
        LinearStruct() if gate is None else LinearStruct.of(gate, None),
        None if gate is None else given(parts.gated_NA, "buffer for gates").data_ptr(),
        out,
        pointer(layer.attended_norm_D),
        pointer(layer.ffn_norm_D),
        *dense,
        pointer(layer.fed_norm_D),
        turns[0].data_ptr(),
        turns[1].data_ptr(),
        LookStruct.of(layer.attention or parts.scale),
        kv[0].data_ptr(),
        kv[1].data_ptr(),
        None if mixture is None else given(mixture.native, "native mixture").address,
        None if latent is None else given(latent.native, "native latent").address,
        rule,
    )


def _rules(parts: ForwardParts) -> tuple[list[int | None], list[Structure]]:
    """The address of each layer's recurrence, None for layers without one; and what lies there."""
    addresses: list[int | None] = []
    structs: list[Structure] = []
    for layer in parts.layers:
        if layer.recurrence is None:
            addresses.append(None)
            continue
        buffers = given(parts.rules, "buffers of recurrences")
        sizes = described_layer(layer.recurrence.delta)
        rule = _rule(layer.recurrence, ctypes.addressof(sizes), buffers, len(structs) // 2)
        structs += [rule, sizes]
        addresses.append(ctypes.addressof(rule))
    return addresses, structs


def _rule(recurrence: Recurrence, sizes: int, buffers: RuleBuffers, index: int) -> _Rule:
    return _Rule(
        LinearStruct.of(recurrence.first, recurrence.first_bias_P),
        LinearStruct.of(recurrence.out, recurrence.out_bias_D),
        sizes,
        pointer(recurrence.norm_V),
        buffers.first_NP.data_ptr(),
        buffers.out_NO.data_ptr(),
        buffers.gated_N2O.data_ptr(),
        buffers.first_NP.shape[1],
        index,
        buffers.tiled,
        _MECHANISMS.index(buffers.mechanism),
    )


def _entrance(entrance: Entrance) -> _Entrance:
    join = entrance.join
    return _Entrance(
        pointer(entrance.token_norm_D),
        pointer(entrance.state_norm_D),
        LinearStruct() if join is None else LinearStruct.of(join, entrance.join_bias_D),
        entrance.states_ND.data_ptr(),
        entrance.pair_N2D.data_ptr(),
        entrance.own_ND.data_ptr(),
        entrance.attends,
        entrance.keeps_norm,
        entrance.gives_normed,
    )
