"""Sizes of decoders that are run for their cost: published ones, and any that a user writes.

A machine that cannot hold a model may run some of its layers (layer-sampled: the time times
`factor` is that of all layers, exact up to what a pass does once) or all widths divided (scaled:
another ratio of memory to arithmetic). Published sizes are those of Touvron et al. 2023 (arXiv
2302.13971) and Dubey et al. 2024 (arXiv 2407.21783).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from outrider.core.errors import ConfigError, did_you_mean
from outrider.models.families import LlamaConfig

MAX_TOKENS = 1 << 16
# Without an output head a vocabulary is only what acceptance is decided over.
BARE_VOCABULARY = 4096
# Of Llama 3, where there is a head.
FULL_VOCABULARY = 128256

_CUSTOM = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)x(\d+)(x(\d+))?", re.ASCII)
_HINT = "write HIDDENxFFNxLAYERSxHEADSxKVHEADS[xHEADDIM], as in 1024x4096x24x16x8"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmShape:
    """`whole_layers` is the number of layers of the model that this is a part of, `divisor` what
    its widths were divided by."""

    name: str
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = BARE_VOCABULARY
    whole_layers: int
    divisor: int = 1

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"shape {self.name}: {self.num_heads} heads are no multiple of "
                f"{self.num_kv_heads} key heads.",
                hint=_HINT,
            )

    @property
    def factor(self) -> float:
        """Seconds of these layers times this are those of all."""
        return self.whole_layers / self.num_layers

    @property
    def is_whole(self) -> bool:
        return self.num_layers == self.whole_layers and self.divisor == 1

    @property
    def sampled(self) -> str:
        """What of the model is missing, in words; "" for a whole one."""
        parts: list[str] = []
        if self.num_layers != self.whole_layers:
            parts.append(f"layer-sampled: {self.num_layers} of {self.whole_layers} layers")
        if self.divisor > 1:
            parts.append(f"scaled: widths over {self.divisor}")
        return "; ".join(parts)

    def with_layers(self, num_layers: int) -> GemmShape:
        """The same with so many of its layers. Raises ConfigError if it has fewer."""
        if not 1 <= num_layers <= self.num_layers:
            raise ConfigError(
                f"shape {self.name} has {self.num_layers} layers, not {num_layers}.",
                hint=f"take 1 to {self.num_layers}",
            )
        return replace(self, num_layers=num_layers)

    def scaled(self, divisor: int) -> GemmShape:
        """Widths over `divisor`, heads as large and fewer. Raises ConfigError if that is no whole
        number of heads, of which query heads per key head may become fewer."""
        if divisor < 1 or self.num_heads % divisor or self.ffn_size % divisor:
            raise ConfigError(
                f"shape {self.name}: widths cannot be divided by {divisor}.",
                hint=f"take a divisor of its {self.num_heads} heads",
            )
        num_heads = self.num_heads // divisor
        return replace(
            self,
            hidden_size=self.hidden_size // divisor,
            ffn_size=self.ffn_size // divisor,
            num_heads=num_heads,
            num_kv_heads=_divided(self.num_kv_heads, divisor, num_heads),
            divisor=self.divisor * divisor,
        )

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            family="gemm",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            ffn_size=self.ffn_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_tokens=MAX_TOKENS,
            tie_word_embeddings=True,
        )


def _known(name: str, sizes: tuple[int, int, int, int, int, int]) -> GemmShape:
    hidden, ffn, layers, heads, kv_heads, head_dim = sizes
    return GemmShape(
        name=name,
        hidden_size=hidden,
        ffn_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        whole_layers=layers,
    )


GEMM_SHAPES: Mapping[str, GemmShape] = {
    "llama-1b": _known("llama-1b", (2048, 8192, 16, 32, 8, 64)),
    "llama-8b": _known("llama-8b", (4096, 14336, 32, 32, 8, 128)),
    "llama-70b": _known("llama-70b", (8192, 28672, 80, 64, 8, 128)),
}


def gemm_shape(name: str) -> GemmShape:
    """A known shape, or one written as HIDDENxFFNxLAYERSxHEADSxKVHEADS[xHEADDIM]. Raises
    ConfigError."""
    if name in GEMM_SHAPES:
        return GEMM_SHAPES[name]
    match = _CUSTOM.fullmatch(name)
    if match is None:
        if "x" in name and name[:1].isdigit():
            raise ConfigError(f"{name!r} is no shape.", hint=_HINT)
        raise ConfigError(f"no shape {name!r}.", hint=did_you_mean(name, GEMM_SHAPES))
    hidden, ffn, layers, heads, kv_heads = (int(match[i]) for i in range(1, 6))
    if not all((hidden, ffn, layers, heads, kv_heads)) or match[7] in ("0", "00"):
        raise ConfigError(f"{name!r} has a size of 0.", hint=_HINT)
    head_dim = int(match[7] or hidden // heads)
    if not head_dim or head_dim % 2:
        raise ConfigError(f"{name!r}: heads of {head_dim} numbers cannot turn.", hint=_HINT)
    return _known(name, (hidden, ffn, layers, heads, kv_heads, head_dim))


def _divided(num_kv_heads: int, divisor: int, num_heads: int) -> int:
    """As many key heads as divide the heads evenly, near a `divisor`-th of them."""
    wanted = max(num_kv_heads // divisor, 1)
    return next(count for count in range(wanted, 0, -1) if num_heads % count == 0)
