"""Inflation: a small model at the cost of a bigger shape; the function stays, weights are added.

Every matrix of the small model becomes the corner of a bigger one; the rest is random numbers that
only ever meet zeros. The result is an ordinary Llama checkpoint that writes the small model's text
in any engine.

Shapes:  D = true channels, W = all channels, V = vocabulary, O = outputs, I = inputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError, ConfigError, did_you_mean
from outrider.models.configs import LlamaConfig
from outrider.models.llama_weights import EMBEDDING
from outrider.models.weights import HEAD, Weights

NORM = "model.norm.weight"
# The spread of the numbers that meet only zeros; what trained weights of such sizes have.
_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder; heads keep the small model's size."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int


# 1b and 8b have the sizes of Llama 3 of these names, with 64 numbers a head; 70b-layer has those of
# the 70B model and as many layers as the embedded target.
SHAPES: Mapping[str, ModelShape] = {
    "0.4b": ModelShape(1024, 24, 16, 8, 4096),
    "1b": ModelShape(2048, 16, 32, 8, 8192),
    "8b": ModelShape(4096, 32, 64, 16, 14336),
    "70b-layer": ModelShape(8192, 8, 128, 16, 28672),
}


@dataclass(frozen=True, slots=True)
class Channels:
    """Where the `size` channels of a residual lie among `width`: first, `copies` times, so that
    what is left of the ratio is a power of four. The others are zero.

    Such a residual's mean square is the small one's times `eps_scale`, whose root is `norm_scale`.
    """

    size: int
    width: int

    @property
    def copies(self) -> int:
        return _copies(self.width // self.size)

    @property
    def num_true(self) -> int:
        return self.size * self.copies

    @property
    def eps_scale(self) -> float:
        return self.num_true / self.width

    @property
    def norm_scale(self) -> float:
        return self.eps_scale**0.5

    def norm(self, part_D: Tensor) -> Tensor:
        """Weights of a norm, float32: those that make of the residual what `part_D` made."""
        weight_W = torch.ones(self.width, dtype=torch.float32)
        weight_W[: self.num_true] = (part_D.float() * self.norm_scale).repeat(self.copies)
        return weight_W

    def onto(self, part_DI: Tensor) -> Tensor:
        """A matrix onto the residual: the true channels, as often as they are held, and zeros."""
        rest = part_DI.new_zeros(self.width - self.num_true, *part_DI.shape[1:])
        return torch.cat([*[part_DI] * self.copies, rest])

    def over(self, name: str, part_OD: Tensor) -> Tensor:
        """A matrix over the residual, or over several side by side: the true channels once, then
        numbers that meet zeros."""
        num_parts = part_OD.shape[1] // self.size
        big_OW = meaningless(name, (part_OD.shape[0], num_parts * self.width), part_OD.dtype)
        for part in range(num_parts):
            start = part * self.width
            big_OW[:, start : start + self.num_true] = 0
            own = part_OD[:, part * self.size : (part + 1) * self.size]
            big_OW[:, start : start + self.size] = own
        return big_OW


def shape_called(name: str) -> ModelShape:
    if name not in SHAPES:
        raise ConfigError(f"no shape {name!r}.", hint=did_you_mean(name, SHAPES))
    return SHAPES[name]


def inflated_config(small: LlamaConfig, shape: ModelShape) -> LlamaConfig:
    """Raises ConfigError for a shape that cannot hold the small model, CheckpointError for a small
    model with biases, head norms or an output head that is not tied."""
    if small.qkv_bias or small.out_bias or small.mlp_bias or small.qk_norm:
        raise CheckpointError(
            f"a {small.family} model with biases or head norms cannot be inflated.",
            hint="inflate outrider/embedded",
        )
    for name in ("hidden_size", "num_layers", "num_kv_heads", "ffn_size"):
        if getattr(shape, name) < getattr(small, name):
            raise ConfigError(f"the shape's {name} is below the model's {getattr(small, name)}.")
    group = small.num_heads // small.num_kv_heads
    ratio, rest = divmod(shape.hidden_size, small.hidden_size)
    if rest or ratio & (ratio - 1) or shape.num_heads // shape.num_kv_heads < group:
        raise ConfigError(
            f"width {shape.hidden_size} is not the model's {small.hidden_size} times a power of "
            "two, or its key heads serve fewer query heads."
        )
    return replace(
        small,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        ffn_size=shape.ffn_size,
        max_tokens=small.whole_tokens,
        layers=(),
        rms_norm_eps=small.rms_norm_eps * Channels(small.hidden_size, shape.hidden_size).eps_scale,
        tie_word_embeddings=False,
    )


def _copies(ratio: int) -> int:
    """How often the true channels are held, so that what is left of `ratio` is a power of four."""
    return 1 if ratio.bit_length() % 2 else 2


class Inflation:
    """Makes the tensors of the bigger checkpoint, one at a time, in `dtype`.

    The residual's new channels stay zero. So columns that read them may hold anything, and so may
    all rows of new query heads, key heads and gates, and columns that read new value heads or
    feed-forward units. Zero must be: rows of new values and new `up` units where they would read a
    true channel, and rows of the output products that would write to a new channel. A layer that
    the small model lacks has no true value or unit, and adds exactly zero.

    The norm of a padded residual differs by the root of the width ratio, which the norm's weights
    take back, exactly where the ratio is a power of four. For other ratios the true channels are
    held twice.
    """

    def __init__(
        self, small: LlamaConfig, weights: Weights, shape: ModelShape, dtype: torch.dtype
    ) -> None:
        self.config = inflated_config(small, shape)
        self._small, self._weights, self._dtype = small, weights, dtype
        self._channels = Channels(small.hidden_size, shape.hidden_size)
        self._num_true = self._channels.num_true
        size, group = small.head_dim, small.num_heads // small.num_kv_heads
        wide = shape.num_heads // shape.num_kv_heads
        heads = [h // group * wide + h % group for h in range(small.num_heads)]
        self._queries = _rows_of(heads, size)
        self._shared = _rows_of(list(range(small.num_kv_heads * wide)), size)

    def shards(self) -> Iterator[dict[str, Tensor]]:
        """Tensors by name: the tables, then one layer after the other."""
        yield self._tables()
        for index in range(self.config.num_layers):
            yield self._layer(index)

    def _tables(self) -> dict[str, Tensor]:
        vocab, hidden = self._small.vocab_size, self._small.hidden_size
        table_VD = self._weights.take(EMBEDDING, vocab, hidden).to(self._dtype)
        return {
            EMBEDDING: self._channels.onto(table_VD.T).T.contiguous(),
            HEAD: self._channels.over(HEAD, table_VD),
            NORM: self._norm(NORM),
        }

    def _layer(self, index: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{index}."
        true = index < self._small.num_layers
        made: dict[str, Tensor] = {}
        for part in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            where = "self_attn" if part[0] in "qkvo" else "mlp"
            make = self._writing if part in ("o_proj", "down_proj") else self._reading
            name = f"{prefix}{where}.{part}.weight"
            made[name] = make(name, true)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"{prefix}{norm}.weight"
            made[name] = self._norm(name, true)
        return made

    def _reading(self, name: str, true: bool) -> Tensor:
        """A matrix over the residual. New rows of values and `up` must give zero, others may not
        matter: they weigh values that are zero."""
        small, config = self._sizes(name)
        big_OW = self._random(name, config, self.config.hidden_size)
        if "v_proj" in name or "up_proj" in name:
            big_OW[:, : self._num_true] = 0
        if true:
            rows = self._places(name)
            part_OD = self._weights.take(name, small, self._small.hidden_size).to(self._dtype)
            big_OW[rows, : self._num_true] = 0
            big_OW[rows, : self._small.hidden_size] = part_OD
        return big_OW

    def _writing(self, name: str, true: bool) -> Tensor:
        """A matrix onto the residual. Columns that read what may not be zero write true channels
        only; the others read zeros."""
        small, config = self._sizes(name)
        big_WI = self._random(name, self.config.hidden_size, config)
        if true:
            columns = self._places(name)
            live = self._shared if "o_proj" in name else columns
            big_WI[:, live] = 0
            part_DI = self._weights.take(name, self._small.hidden_size, small).to(self._dtype)
            big_WI[: self._num_true, columns] = part_DI.repeat(self._channels.copies, 1)
        return big_WI

    def _sizes(self, name: str) -> tuple[int, int]:
        """Outputs of a reading matrix, inputs of a writing one: of the small model and of ours."""
        small, big = self._small, self.config
        if "mlp" in name:
            return small.ffn_size, big.ffn_size
        if "k_proj" in name or "v_proj" in name:
            return small.num_kv_heads * small.head_dim, big.num_kv_heads * big.head_dim
        return small.num_heads * small.head_dim, big.num_heads * big.head_dim

    def _places(self, name: str) -> Tensor:
        if "q_proj" in name or "o_proj" in name:
            return self._queries
        return torch.arange(self._sizes(name)[0])

    def _norm(self, name: str, true: bool = True) -> Tensor:
        if not true:
            return torch.ones(self.config.hidden_size, dtype=self._dtype)
        part_D = self._weights.take(name, self._small.hidden_size)
        return self._channels.norm(part_D).to(self._dtype)

    def _random(self, name: str, *shape: int) -> Tensor:
        return meaningless(name, shape, self._dtype)


def meaningless(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers to be met by zeros alone: the same for a name whenever they are asked for."""
    rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=rng, dtype=torch.float32).mul_(_SPREAD).to(dtype)


def _rows_of(heads: list[int], size: int) -> Tensor:
    return (torch.tensor(heads)[:, None] * size + torch.arange(size)).flatten()
