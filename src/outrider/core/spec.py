"""Model sizes in plain numbers, without tensors: enough to plan memory and time before loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# Bytes a weight; of int4, each group of 32 has a scale of two bytes.
_QUANTISED_BYTES = {"int8": 1.0, "int4": 0.5625}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder. `max_tokens` is its window; `stop_ids` end a text it writes.

    `quantise`, int8 or int4, says how its matrices are held; the table of tokens is not one of
    them. Every parameter counts once, though a tied output head is held apart from the table. Of a
    hybrid `num_kv_layers` attend; the states of the others take `state_bytes` a sequence, and what
    one token does to them `input_bytes`. Of a mixture each token uses `num_active_experts` of
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
    num_kv_layers: int | None = None
    state_bytes: int = 0
    input_bytes: int = 0
    num_experts: int = 0
    num_active_experts: int = 0
    expert_parameters: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        num_layers = self.num_layers if self.num_kv_layers is None else self.num_kv_layers
        return 2 * num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv

    @property
    def weight_bytes(self) -> int:
        if self.quantise == "none":
            return self.num_parameters * self.bytes_per_weight
        table = self.vocab_size * self.hidden_size
        matrices = (self.num_parameters - table) * _QUANTISED_BYTES[self.quantise]
        return table * self.bytes_per_weight + int(matrices)


class ConfigSizes(Protocol):
    """What the config of every family knows."""

    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...


def spec_of(
    sizes: ConfigSizes, name: str, *, bytes_per_weight: int, bytes_per_kv: int
) -> ModelSpec:
    """The spec of a model of these sizes; `name` is what reports call it."""
    return ModelSpec(
        name=name,
        family=sizes.family,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        ffn_size=sizes.ffn_size,
        max_tokens=sizes.max_tokens,
        num_parameters=sizes.num_parameters,
        bytes_per_weight=bytes_per_weight,
        bytes_per_kv=bytes_per_kv,
        stop_ids=sizes.stop_ids,
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
