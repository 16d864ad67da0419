"""Gated-delta hybrids of random weights, made in memory: what a pass costs needs no checkpoint.

Shapes:  O = outputs, I = inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from outrider.kernels.plan import PackedLinear
from outrider.kernels.reference.delta import StateShape
from outrider.kernels.registry import Kernels
from outrider.models.decoder import Room
from outrider.models.qwen_hybrid import QwenHybridModel
from outrider.models.qwen_hybrid_config import QwenHybridConfig
from outrider.models.rope_config import Rope
from outrider.models.weights import Placement, Weights


@dataclass(frozen=True, slots=True)
class HybridSize:
    """Every fourth of `num_layers` attends; the others have `num_heads` value heads, and half as
    many key heads, of size `head_dim`."""

    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    head_dim: int = 128
    vocab_size: int = 8192


# Of about 0.3 billion weights, so that they come from memory; and one to see that all runs.
SIZE = HybridSize(hidden_size=1024, ffn_size=3072, num_layers=12, num_heads=16)
QUICK = HybridSize(hidden_size=64, ffn_size=96, num_layers=4, num_heads=4, head_dim=16)


def config_of(size: HybridSize) -> QwenHybridConfig:
    attending = tuple(range(3, size.num_layers, 4))
    key_heads = size.num_heads // 2
    return QwenHybridConfig(
        family="qwen3_5_text",
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        ffn_size=size.ffn_size,
        num_layers=size.num_layers,
        num_heads=size.hidden_size // size.head_dim,
        num_kv_heads=max(1, size.hidden_size // size.head_dim // 4),
        head_dim=size.head_dim,
        max_tokens=4096,
        attention_layers=attending,
        delta=StateShape(
            num_layers=size.num_layers - len(attending),
            num_taps=4,
            num_channels=(2 * key_heads + size.num_heads) * size.head_dim,
            num_key_heads=key_heads,
            num_heads=size.num_heads,
            key_dim=size.head_dim,
            value_dim=size.head_dim,
        ),
        rope=Rope(),
        tie_word_embeddings=False,
    )


def random_hybrid(
    size: HybridSize, kernels: Kernels, place: Placement, room: Room
) -> tuple[QwenHybridModel, tuple[Tensor, ...]]:
    """The model, and the matrices that each pass reads."""
    streamed: list[Tensor] = []

    def pack(weight_OI: Tensor) -> PackedLinear:
        packed = kernels.pack(weight_OI)
        streamed.append(packed.data)
        return packed

    source = cast("Weights", RandomWeights(place.device))
    noting = replace(kernels, pack=pack)
    model = QwenHybridModel(config_of(size), source, kernels=noting, place=place, room=room)
    model.kernels = kernels
    return model, tuple(streamed)


class RandomWeights:
    """Tensors of any name and shape, the same in every run that asks in the same order."""

    def __init__(self, device: torch.device) -> None:
        self._rng = torch.Generator(device).manual_seed(11)
        self._device = device

    def __contains__(self, name: str) -> bool:
        return name.endswith(("embed_tokens.weight", "lm_head.weight"))

    def take(self, name: str, *shape: int) -> Tensor:
        drawn = torch.randn(shape, device=self._device, generator=self._rng)
        if name.endswith("conv1d.weight"):
            return drawn.mul_(0.5)
        return drawn.mul_(0.1 if len(shape) == 1 else shape[-1] ** -0.5)

    def check_all_taken(self, **_: Any) -> None:
        """There is no end to random numbers."""
