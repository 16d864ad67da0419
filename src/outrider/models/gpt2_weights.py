"""The tensors of a GPT-2 checkpoint, packed as the decoder multiplies by them.

Files on the hub name them with `transformer.` in front or without it. Old ones also store the
causal mask (`attn.bias`, `attn.masked_bias`), which is no weight.

Shapes:  D = hidden size, V = vocabulary, T = positions, E = fused q, k and v, F = FFN size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from outrider.kernels.plan import PackedLinear
from outrider.models.gpt2_config import GPT2Config
from outrider.models.weight_reader import WeightReader

PREFIX = "transformer."
MASKS = (".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True, slots=True)
class Norm:
    weight_D: Tensor
    bias_D: Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    packed: PackedLinear
    bias_O: Tensor


@dataclass(frozen=True, slots=True)
class Tables:
    """The embeddings of positions past the window are zeros, which nothing kept ever reads."""

    embedding_VD: Tensor
    positions_TD: Tensor
    norm: Norm
    head: PackedLinear


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm
    qkv: Linear
    out: Linear
    ffn_norm: Norm
    up: Linear
    down: Linear


class GPT2Reader:
    """Norms, biases and positions are float32."""

    def __init__(self, reader: WeightReader, config: GPT2Config) -> None:
        self._reader, self._config = reader, config
        self._prefix = PREFIX if f"{PREFIX}wte.weight" in reader else ""

    def tables(self, *, num_positions: int) -> Tables:
        config, reader = self._config, self._reader
        embedding_VD = reader.table(
            f"{self._prefix}wte.weight", config.vocab_size, config.hidden_size
        )
        positions_TD = reader.vector(
            f"{self._prefix}wpe.weight", config.max_tokens, config.hidden_size
        )
        missing = max(0, num_positions - config.max_tokens)
        return Tables(
            embedding_VD=embedding_VD,
            positions_TD=functional.pad(positions_TD, (0, 0, 0, missing)),
            norm=self._norm(f"{self._prefix}ln_f"),
            head=reader.head(embedding_VD, tied=config.tie_word_embeddings),
        )

    def layer(self, index: int) -> Layer:
        prefix = f"{self._prefix}h.{index}."
        hidden, ffn = self._config.hidden_size, self._config.ffn_size
        return Layer(
            attention_norm=self._norm(f"{prefix}ln_1"),
            qkv=self._linear(f"{prefix}attn.c_attn", hidden, 3 * hidden),
            out=self._linear(f"{prefix}attn.c_proj", hidden, hidden),
            ffn_norm=self._norm(f"{prefix}ln_2"),
            up=self._linear(f"{prefix}mlp.c_fc", hidden, ffn),
            down=self._linear(f"{prefix}mlp.c_proj", ffn, hidden),
        )

    def _norm(self, name: str) -> Norm:
        size = self._config.hidden_size
        return Norm(
            self._reader.vector(f"{name}.weight", size), self._reader.vector(f"{name}.bias", size)
        )

    def _linear(self, name: str, num_in: int, num_out: int) -> Linear:
        return Linear(
            self._reader.conv(name, num_in, num_out), self._reader.vector(f"{name}.bias", num_out)
        )
