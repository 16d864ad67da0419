"""Models that are built in the device's memory: inflated ones (tier B) and random ones (tier C).

An 8B model on disk would take longer to write than everything else here takes together, so tensors
are made where they are needed, one layer at a time, by the same rules as `outrider models inflate`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from gpu_check.setting import Setting
from safetensors.torch import load_file
from torch import Tensor

from outrider.core.spec import StateShape
from outrider.kernels.operators import Kernels, tried
from outrider.kernels.plan import PackedLinear
from outrider.kernels.registry import choose
from outrider.models.configs import HybridConfig, LlamaConfig
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.families import read_native_config
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model, resolve
from outrider.models.rope_config import Rope
from outrider.models.weights import HEAD, Placement, Weights
from outrider.plugins.hybrids.model import HybridModel
from outrider_lab.models.inflate import Inflation, ModelShape, inflated_config

TARGET, DRAFT = "outrider/embedded", "outrider/embedded-draft"
PAGE = 32


def let_go() -> None:
    """Free what nobody names any more: engines and their programs hold each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def room_for(
    batch: int, length: int, *, rows: int, logits: int | None = None, page_size: int = PAGE
) -> ModelCapacity:
    """Room for `batch` sequences of `length` tokens, in passes of at most `rows`."""
    pages = -(-length // page_size) + 1
    return ModelCapacity(
        num_slots=batch * pages * page_size,
        page_size=page_size,
        max_rows=max(rows, 128),
        max_logits=logits or rows,
    )


def small_config() -> LlamaConfig:
    config = read_native_config(resolve(TARGET))
    assert isinstance(config, LlamaConfig)
    return config


def embedded(name: str, setting: Setting, capacity: ModelCapacity) -> LlamaModel:
    """The embedded target or draft, as `LLM` would load it."""
    dtype = str(setting.dtype).removeprefix("torch.")
    options = LoadOptions(
        capacity=capacity,
        dtype=dtype,
        device=setting.device.type,
        force_reference=not setting.on_cuda,
    )
    model = load_model(resolve(name), options, name=name)
    assert isinstance(model, LlamaModel)
    return model


def inflated(shape: ModelShape, setting: Setting, capacity: ModelCapacity) -> LlamaModel:
    """Tier B: the embedded target at the cost of `shape`."""
    tensors = load_file(resolve(TARGET) / "model.safetensors")
    moved = cast("Weights", _Moved(tensors, setting.device))
    with torch.device(setting.device):
        inflation = _DeviceInflation(small_config(), moved, shape, setting.dtype)
    source = cast("Weights", _Shards(inflation.shards(), setting.device))
    return _built(inflation.config, source, setting, capacity)


def random_model(
    shape: ModelShape,
    setting: Setting,
    capacity: ModelCapacity,
    quantise: str = "none",
    *,
    vocab_size: int | None = None,
    window: int | None = None,
) -> LlamaModel:
    """Tier C: the true shape with random weights."""
    size = vocab_size or setting.vocabulary
    config = replace(inflated_config(small_config(), shape), vocab_size=size)
    config = replace(config, max_tokens=window or config.max_tokens)
    source = cast("Weights", RandomWeights(setting.device, setting.dtype))
    return _built(config, source, setting, capacity, quantise)


def kernels_of(setting: Setting, quantise: str = "none") -> Kernels:
    return choose(
        device=setting.device,
        dtype=setting.dtype,
        force_reference=not setting.on_cuda,
        quantise=quantise,
    )


def _built(
    config: LlamaConfig,
    weights: Weights,
    setting: Setting,
    capacity: ModelCapacity,
    quantise: str = "none",
) -> LlamaModel:
    placement = Placement("inflated", setting.dtype, setting.device, quantise)
    kernels = kernels_of(setting, quantise)
    model = LlamaModel(config, weights, kernels=kernels, placement=placement, capacity=capacity)
    model.kernels = tried(kernels, config)
    return model


class _DeviceInflation(Inflation):
    """The numbers that meet only zeros, made by the device: others, but of the same spread."""

    def _random(self, name: str, *shape: int) -> Tensor:
        del name
        return torch.randn(shape, dtype=self._dtype).mul_(0.02)


class _Moved:
    """The small model's tensors, where the others are made."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device

    def take(self, name: str, *shape: int, **_: Any) -> Tensor:
        assert tuple(self._tensors[name].shape) == shape
        return self._tensors[name].to(self._device)


class _Shards:
    """Reads tensors in the order in which the shards bring them; holds one shard."""

    def __init__(self, shards: Iterator[dict[str, Tensor]], device: torch.device) -> None:
        self._shards, self._device = shards, device
        self._shard: dict[str, Tensor] = {}
        self._advance()

    def _advance(self) -> None:
        with torch.device(self._device):
            self._shard = next(self._shards)

    def __contains__(self, name: str) -> bool:
        return name in self._shard

    def take(self, name: str, *shape: int, **_: Any) -> Tensor:
        while name not in self._shard:
            self._advance()
        tensor = self._shard.pop(name)
        assert tuple(tensor.shape) == shape
        return tensor

    def check_all_taken(self, **_: Any) -> None:
        assert not self._shard


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
RANDOM_HYBRID = HybridSize(hidden_size=1024, ffn_size=3072, num_layers=12, num_heads=16)
QUICK_HYBRID = HybridSize(hidden_size=64, ffn_size=96, num_layers=4, num_heads=4, head_dim=16)


def config_of(size: HybridSize) -> HybridConfig:
    attending = tuple(range(3, size.num_layers, 4))
    key_heads = size.num_heads // 2
    return HybridConfig(
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
    size: HybridSize, kernels: Kernels, placement: Placement, capacity: ModelCapacity
) -> tuple[HybridModel, tuple[Tensor, ...]]:
    """The model, and the matrices that each pass reads."""
    streamed: list[Tensor] = []

    def pack(weight_OI: Tensor) -> PackedLinear:
        packed = kernels.pack(weight_OI)
        streamed.append(packed.data)
        return packed

    source = cast("Weights", RandomWeights(placement.device))
    noting = replace(kernels, pack=pack)
    model = HybridModel(
        config_of(size), source, kernels=noting, placement=placement, capacity=capacity
    )
    model.kernels = kernels
    return model, tuple(streamed)


class RandomWeights:
    """Tensors of any name and shape, the same in every run that asks in the same order."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._place = {"device": device, "dtype": dtype}
        self._rng = torch.Generator(device).manual_seed(11)

    def __contains__(self, name: str) -> bool:
        return name.endswith(("embed_tokens.weight", HEAD))

    def take(self, name: str, *shape: int, **_: Any) -> Tensor:
        drawn = torch.randn(shape, generator=self._rng, **self._place)
        if name.endswith("conv1d.weight"):
            return drawn.mul_(0.5)
        return drawn.mul_(0.1 if len(shape) == 1 else shape[-1] ** -0.5)

    def check_all_taken(self, **_: Any) -> None:
        """There is no end to random numbers."""
