"""What a model is, in plain numbers: enough to plan memory and time without loading it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder. `max_tokens` is its window; `stop_ids` end a text it writes."""

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

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.bytes_per_weight
