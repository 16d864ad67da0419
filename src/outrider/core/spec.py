"""What a model is, in plain numbers: enough to plan memory and time without loading it."""

from __future__ import annotations

from dataclasses import dataclass

# Bytes a weight; of int4, each group of 32 has a scale of two bytes.
_QUANTISED_BYTES = {"int8": 1.0, "int4": 0.5625}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder. `max_tokens` is its window; `stop_ids` end a text it writes.

    `quantise`, int8 or int4, says how its matrices are held; the table of tokens is not one of
    them. Every parameter counts once, though a tied output head is held apart from the table.
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

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv

    @property
    def weight_bytes(self) -> int:
        if self.quantise == "none":
            return self.num_parameters * self.bytes_per_weight
        table = self.vocab_size * self.hidden_size
        matrices = (self.num_parameters - table) * _QUANTISED_BYTES[self.quantise]
        return table * self.bytes_per_weight + int(matrices)
