"""Model sizes in plain numbers, without tensors: enough to plan memory and time before loading."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol, Self

# Bytes a weight of matrices, and of the output head; of int4, each group of 32 has a scale and a
# minimum of two bytes each, in a head of 8 bits a scale.
QUANTISED_BYTES = {"int8": 1.0, "int4": 0.625}
HEAD_BYTES = {"int8": 1.0, "int4": 1.0625}
# Keys and values of int8 that share a scale of two bytes.
KV_GROUP = 32


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder. `max_tokens` is its window; `stop_ids` end a text it writes.

    `quantise`, int8 or int4, says how its matrices are held; the table of tokens is not one of
    them, but the output head of int4 is the table too if they are `tied`. Where all are held as
    a quantised file has them, `stored_bytes` is what they take. `kv_dtype` is auto, of keys and
    values of `bytes_per_kv` each, or int8 (kernels/kv_rows.py). Every parameter counts once,
    though a tied output head is held apart from the table. Some layers see the last `window`
    tokens alone, if that is not 0, and no layer sees more than the last `reach`, if that is not 0.
    Where others see all, `local_layers` are those that see `window` tokens.
    Of a hybrid `num_kv_layers` attend; the states of the others take `state_bytes` a sequence, and
    what one token does to them `input_bytes`. Of a mixture each token uses `num_active_experts` of
    `num_experts` in every layer that has them; all experts together are `expert_parameters`.
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
    num_kv_layers: int | None = None
    state_bytes: int = 0
    input_bytes: int = 0
    num_experts: int = 0
    num_active_experts: int = 0
    expert_parameters: int = 0
    stored_bytes: int = 0
    tied: bool = False

    @property
    def kv_bytes_per_token(self) -> int:
        num_layers = self.num_layers if self.num_kv_layers is None else self.num_kv_layers
        row = self.head_dim * self.bytes_per_kv
        if self.kv_dtype == "int8":
            row = self.head_dim + 2 * self.head_dim // KV_GROUP
        return 2 * num_layers * self.num_kv_heads * row

    @property
    def local_bytes_per_token(self) -> int:
        """Of those, what local layers take."""
        return self.kv_bytes_per_token // self.num_layers * len(self.local_layers)

    def arena_bytes(self, num_slots: int, num_local_slots: int) -> int:
        """Of keys and values, with so many slots for a token in all layers but the local ones."""
        local = self.local_bytes_per_token
        return num_slots * (self.kv_bytes_per_token - local) + num_local_slots * local

    @property
    def weight_bytes(self) -> int:
        if self.quantise == "none":
            return self.stored_bytes or self.num_parameters * self.bytes_per_weight
        table = self.vocab_size * self.hidden_size
        if self.quantise == "int8":
            return table * self.bytes_per_weight + self.num_parameters - table
        matrices = self.num_parameters - (table if self.tied else 2 * table)
        held = matrices * QUANTISED_BYTES["int4"] + table * HEAD_BYTES["int4"]
        return int(held) + (0 if self.tied else table * self.bytes_per_weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What the configs of all families say of a decoder.

    `max_tokens` is the window in which the decoder equals the original; `notes` are sentences for
    the user on what the loader decided. `dtype` is the checkpoint's own, "" if unsaid. With
    `tie_word_embeddings` the output head is the table of tokens.
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
    def num_parameters(self) -> int:
        raise NotImplementedError

    def for_context(self, num_tokens: int) -> Self:
        """The same for sequences of up to so many tokens, where a wish for more than `max_tokens`
        makes another model of it; 0 is no wish."""
        del num_tokens
        return self

    def spec(self, name: str, *, bytes_per_weight: int, bytes_per_kv: int) -> ModelSpec:
        """`name` is what reports call the model."""
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


# States of a sequence beside those of its round: what is committed, and where pages end.
_RING_EXTRA = 3
# The same, and one that replayed inputs go to, and that before a round's first input.
_REPLAY_STATES = 5


class StateSizes(Protocol):
    """Bytes of one recurrent state, and of what one token does to it; 0 of a model without."""

    @property
    def state_bytes(self) -> int: ...
    @property
    def input_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentCapacity:
    """For `num_sequences` at a time, each of which can return to `history` nodes of its round
    besides the pending token; `num_checkpoints` states are kept for texts that begin alike."""

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
        """Of those of a sequence, the states of nodes that are not committed."""
        return _REPLAY_STATES - 2 if self.rollback == "replay" else self.history + _RING_EXTRA

    @property
    def num_inputs(self) -> int:
        """Those of a round, and those of the round before that are still to be replayed."""
        if self.rollback == "ring":
            return 0
        return 2 * self.num_sequences * (self.history + 1)

    def num_bytes(self, sizes: StateSizes) -> int:
        """What the states of such a model take when all cells are in use, beside its arena."""
        return self.num_states * sizes.state_bytes + self.num_inputs * sizes.input_bytes


@dataclass(frozen=True, slots=True)
class DraftCapacity:
    """Memory that a draft model needs beyond that of chains: `num_rows` packed tokens and
    `num_logits` rows of logits in one pass, and `num_slots` KV positions of every sequence beyond
    its text."""

    num_rows: int = 0
    num_logits: int = 0
    num_slots: int = 0
