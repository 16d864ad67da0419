"""Model sizes in plain numbers, without tensors: enough to plan memory and time before loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol, Self

from outrider.core.errors import ConfigError

# Bytes a weight of matrices, and of the output head. In int4, each group of 32 has a scale and a
# minimum of two bytes each; the 8-bit head has only a scale.
QUANTISED_BYTES = {"int8": 1.0, "int4": 0.625}
HEAD_BYTES = {"int8": 1.0, "int4": 1.0625}
# Values of int8 keys and values that share a scale of two bytes.
KV_GROUP = 32


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A request to stretch rotary positions by `factor`. `kind` is linear or yarn, or auto for the
    checkpoint's own way; `original_tokens` is the window before it, 0 that of the checkpoint."""

    kind: str = "auto"
    factor: float = 1.0
    original_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LayerKeys:
    """Keys and values that a layer reads: `num_heads` heads of `head_dim` numbers each, which layer
    `source` stores: the layer itself or an earlier one."""

    num_heads: int
    head_dim: int
    source: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder. `max_tokens` is its window; `stop_ids` end a text it writes.

    `quantise`, int8 or int4, is the format of its matrices; the token table is not one of them, but
    the output head of int4 is the table too if they are `tied`. If all tensors stay as a quantised
    file has them, `stored_bytes` is their size. `kv_dtype` is auto, for keys and values of
    `bytes_per_kv` each, or int8 (kernels/plan.py). Every parameter counts once, even if a tied
    output head is held in addition to the table. Some layers see only the last `window` tokens, if
    that is not 0, and no layer sees more than the last `reach`, if that is not 0. `local_layers`
    are the layers that see `window` tokens while others see all.
    With `values_in_keys`, a token's value is its key, so a layer stores one row for both.
    If layers differ in keys and values, `kv_layers` has those of each one, and `num_kv_heads` and
    `head_dim` are the largest. In a hybrid `num_kv_layers` attend; the states of the other layers
    take `state_bytes` a sequence, and the change by one token `input_bytes`. In a mixture each
    token uses `num_active_experts` of `num_experts` in every layer that has them; all experts
    together are `expert_parameters`. Tables besides that of tokens whose rows are looked up have
    `looked_up` parameters together, which are never quantised.
    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_tokens: int
    num_parameters: int
    bytes_per_weight: int
    bytes_per_kv: int
    stop_ids: tuple[int, ...] = ()
    quantise: str = "none"
    kv_dtype: str = "auto"
    window: int = 0
    reach: int = 0
    local_layers: tuple[int, ...] = ()
    values_in_keys: bool = False
    kv_layers: tuple[LayerKeys, ...] = ()
    num_kv_layers: int | None = None
    state_bytes: int = 0
    input_bytes: int = 0
    num_experts: int = 0
    num_active_experts: int = 0
    expert_parameters: int = 0
    stored_bytes: int = 0
    looked_up: int = 0
    tied: bool = False

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(self._layer_bytes)

    @property
    def layer_keys(self) -> tuple[LayerKeys, ...]:
        """The keys and values of each layer that attends."""
        num_layers = self.num_layers if self.num_kv_layers is None else self.num_kv_layers
        alike = (LayerKeys(self.num_kv_heads, self.head_dim, depth) for depth in range(num_layers))
        return self.kv_layers or tuple(alike)

    @property
    def head_dims(self) -> frozenset[int]:
        """The sizes of heads, of all kinds of layers."""
        return frozenset(one.head_dim for one in self.kv_layers) or frozenset({self.head_dim})

    @property
    def _layer_bytes(self) -> list[int]:
        """Bytes of a token's keys and values in each layer; 0 if an earlier layer stores them."""

        def row(head_dim: int) -> int:
            if self.kv_dtype == "int8":
                return head_dim + 2 * head_dim // KV_GROUP
            return head_dim * self.bytes_per_kv

        return [
            self.rows_per_token * one.num_heads * row(one.head_dim) * (one.source == depth)
            for depth, one in enumerate(self.layer_keys)
        ]

    @property
    def rows_per_token(self) -> int:
        """Rows of the arena that a layer stores for each token and key head."""
        return 1 if self.values_in_keys else 2

    @property
    def local_bytes_per_token(self) -> int:
        """Part of `kv_bytes_per_token` that local layers take."""
        each = self._layer_bytes if self.local_layers else ()
        return sum(each[depth] for depth in self.local_layers)

    def arena_bytes(self, num_slots: int, num_local_slots: int) -> int:
        """Bytes of keys and values, with separate slot counts for local and other layers."""
        local = self.local_bytes_per_token
        return num_slots * (self.kv_bytes_per_token - local) + num_local_slots * local

    @property
    def weight_bytes(self) -> int:
        if self.quantise == "none":
            return self.stored_bytes or self.num_parameters * self.bytes_per_weight
        table = self.vocab_size * self.hidden_size
        if self.quantise == "int8":
            kept = table + self.looked_up
            return kept * self.bytes_per_weight + self.num_parameters - kept
        matrices = self.num_multiplied - (table if self.tied else 2 * table)
        held = matrices * QUANTISED_BYTES["int4"] + table * HEAD_BYTES["int4"]
        held += self.looked_up * self.bytes_per_weight
        return int(held) + (0 if self.tied else table * self.bytes_per_weight)

    @property
    def num_multiplied(self) -> int:
        """Number of parameters without those of tables that are only looked up."""
        return self.num_parameters - self.looked_up

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights that passes read whole: all but tables that are looked up."""
        if self.looked_up and self.quantise == "none":
            return self.weight_bytes * self.num_multiplied // self.num_parameters
        return self.weight_bytes - self.looked_up * self.bytes_per_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder that the configs of all families have.

    `max_tokens` is the window in which the decoder equals the original; `notes` are sentences for
    the user on the loader's decisions. `dtype` is the checkpoint's own, "" if unknown. With
    `tie_word_embeddings` the output head is the token table.
    """

    family: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    dtype: str = ""
    notes: tuple[str, ...] = ()
    tie_word_embeddings: bool = False

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def head_dims(self) -> frozenset[int]:
        """The sizes of heads, of all kinds of layers."""
        return frozenset({self.head_dim})

    @property
    def num_parameters(self) -> int:
        raise NotImplementedError

    def for_context(self, num_tokens: int) -> Self:
        """The config for sequences of up to so many tokens, for a family in which more than
        `max_tokens` makes another model; 0 requests nothing."""
        del num_tokens
        return self

    def stretched(self, scaling: RopeScaling) -> Self:
        """The config with rotary positions stretched as requested. Raises ConfigError if the
        family has none that Outrider computes."""
        if scaling.kind == "auto":
            return self
        raise ConfigError(
            f"rope_scaling={scaling.kind}: models of type {self.family} have no rotary positions "
            "that Outrider computes.",
            hint="leave --rope-scaling at auto",
        )

    def spec(self, name: str, *, bytes_per_weight: int, bytes_per_kv: int) -> ModelSpec:
        """The ModelSpec; `name` is the model's name in reports."""
        sizes = {key.name: getattr(self, key.name) for key in fields(DecoderConfig)}
        del sizes["dtype"], sizes["notes"], sizes["tie_word_embeddings"]
        return ModelSpec(
            name=name,
            tied=self.tie_word_embeddings,
            num_parameters=self.num_parameters,
            bytes_per_weight=bytes_per_weight,
            bytes_per_kv=bytes_per_kv,
            **sizes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Sizes of attention over a compressed cache (DeepSeek-V2, arXiv 2405.04434, 2.1).

    A token has one latent of `rank` numbers, from which matrices of each head compute its key and
    its value, and one key of `turning` numbers that rotates with positions and serves all heads.
    Keys of a head have `still` numbers that do not rotate, and values `value_dim`. Queries come
    from a vector of `query_rank` numbers, or from the residual if that is 0. Both vectors are
    normed with `eps`. Rotary pairs are neighbours if they are `interleaved`.
    """

    num_heads: int
    rank: int
    turning: int
    still: int
    value_dim: int
    query_rank: int = 0
    eps: float = 1e-6
    interleaved: bool = True

    @property
    def row_size(self) -> int:
        """Numbers of a token in the cache of a layer."""
        return self.rank + self.turning

    @property
    def query_size(self) -> int:
        """Numbers of the queries of all heads."""
        return self.num_heads * (self.still + self.turning)

    @property
    def first_size(self) -> int:
        """Outputs of the layer's first product: vector or queries, latent and rotated key."""
        return (self.query_rank or self.query_size) + self.row_size

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of attention, without biases."""
        queries = self.query_rank * (1 + self.query_size)
        heads = self.num_heads * self.rank * (self.still + self.value_dim)
        residual = hidden_size * (self.first_size + self.num_heads * self.value_dim)
        return residual + queries + self.rank + heads


# States of a sequence in addition to those of its round: the committed one, and those of page ends.
_RING_EXTRA = 3
# The same, and one for replayed inputs, and the one before a round's first input.
_REPLAY_STATES = 5


class StateSizes(Protocol):
    """Bytes of one recurrent state, and of one token's change to it; 0 without such layers."""

    @property
    def state_bytes(self) -> int: ...
    @property
    def input_bytes(self) -> int: ...


_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """Sizes of a model's recurrent state, all layers together (kernels/reference/delta.py)."""

    num_layers: int
    num_taps: int
    num_channels: int
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def state_bytes(self) -> int:
        """Bytes of the states after one token."""
        window = (self.num_taps - 1) * self.num_channels
        state = self.num_heads * self.key_dim * self.value_dim
        return _FLOAT_BYTES * self.num_layers * (window + state)

    @property
    def input_bytes(self) -> int:
        """Bytes of one token's change to the states."""
        vectors = self.num_key_heads * self.key_dim + self.num_heads * (self.value_dim + 1)
        return _FLOAT_BYTES * self.num_layers * (self.num_channels + vectors)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentCapacity:
    """Number of recurrent states for `num_sequences` at a time, each of which can return to
    `history` nodes of its round in addition to the pending token; `num_checkpoints` states are
    stored for texts with a common beginning."""

    rollback: str = "replay"
    history: int = 16
    num_sequences: int = 16
    num_checkpoints: int = 8

    @property
    def num_states(self) -> int:
        each = _REPLAY_STATES if self.rollback == "replay" else self.history + 1 + _RING_EXTRA
        return self.num_sequences * each + self.num_checkpoints

    @property
    def num_staged(self) -> int:
        """States of a sequence for nodes that are not committed."""
        return _REPLAY_STATES - 2 if self.rollback == "replay" else self.history + _RING_EXTRA

    @property
    def num_inputs(self) -> int:
        """Inputs of a round, and those of the round before that are still to be replayed."""
        if self.rollback == "ring":
            return 0
        return 2 * self.num_sequences * (self.history + 1)

    def num_bytes(self, sizes: StateSizes) -> int:
        """Bytes of the states of such a model when all cells are in use, without its arena."""
        return self.num_states * sizes.state_bytes + self.num_inputs * sizes.input_bytes


@dataclass(frozen=True, slots=True)
class DraftCapacity:
    """Memory that a draft model needs beyond that of chains: `num_rows` packed tokens and
    `num_logits` rows of logits in one pass, and `num_slots` KV positions of every sequence beyond
    its text."""

    num_rows: int = 0
    num_logits: int = 0
    num_slots: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The quantisation of a folder. Codes have one of the numbers of `bits`. `group_size` inputs
    share a scale (0: all of them), if the shapes of a layout do not show it. `zero_offset` is added
    to stored zeros (GPTQ's first version). `block` has the numbers of outputs and inputs that share
    a scale; None for other methods. With `has_blocks`, kernels may run on the codes
    (`Codes.blocks`): integers or floats, with inputs in order. `modules` are the modes and
    groups of MLX by module; "" is any other. `has_4_bit_floats`: some packed codes are floats."""

    where: str
    method: str
    bits: tuple[int, ...]
    group_size: int = 0
    zero_offset: int = 0
    block: tuple[int, int] | None = None
    has_blocks: bool = False
    has_4_bit_floats: bool = False
    modules: Mapping[str, Grouping] = field(default_factory=dict[str, "Grouping"])


@dataclass(frozen=True, slots=True)
class Grouping:
    """A module's quantisation in MLX: `mode` is affine, mxfp4, mxfp8 or nvfp4."""

    mode: str
    group_size: int
