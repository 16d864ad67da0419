"""Configs of our decoders: sizes and options of a model as families.py reads them; and the class
of a family, whose rows are in family_table.py and in the modules `families` of plugins. No tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self

from outrider.core.spec import DecoderConfig, LatentShape, ModelSpec, RopeScaling, StateShape
from outrider.models import expert_kinds
from outrider.models import layer_kinds as kinds
from outrider.models.expert_kinds import Experts
from outrider.models.json_object import JsonObject
from outrider.models.layer_kinds import (
    BIASED_LAYERS,
    GATED_LAYERS,
    GROWING,
    PLAIN_LAYERS,
    LayerKind,
    LayerTraits,
    Norms,
)
from outrider.models.rope_config import COMMON_ROPE, Rope, RopeRules, rope_scaled

LONG_FACTORS = "the long factors of longrope"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredConfig(DecoderConfig):
    """Sizes and options of a decoder whose family is a row of family_table.py.

    `qk_norm` normalises every query and key head before its rotation. With `fused_tensors` the
    files hold q, k and v as one matrix, and gate and up as one. `layers` has an entry for each
    layer; it is empty if all layers see the whole text and rotate by `rope`. With a `latent`, heads
    attend to rows of the compressed cache, which count as one key head. The FFNs of `sparse_layers`
    are mixtures of `experts`. With its long rotary factors (`for_context`) the
    model has a window of `longest_tokens`, as it has with queries that grow; 0 if it has neither.
    With `also_sees`, files and settings belong to a model that also has a part for pictures.
    """

    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused_tensors: bool = False
    layers: tuple[LayerKind, ...] = ()
    traits: LayerTraits = PLAIN_LAYERS
    latent: LatentShape | None = None
    experts: Experts | None = None
    sparse_layers: tuple[int, ...] = ()
    longest_tokens: int = 0
    also_sees: bool = False

    def layer_kind(self, index: int) -> LayerKind:
        return self.layers[index] if self.layers else LayerKind(rope=self.rope)

    def at(self, index: int) -> Self:
        """The config with the sizes of layer `index`."""
        del index
        return self

    def feeds(self, index: int) -> bool:
        """True if layer `index` has an FFN."""
        del index
        return True

    @property
    def delta_rule(self) -> StateShape | None:
        """The shape of the states of gated delta rules; None without such layers."""
        return None

    @property
    def scale(self) -> float:
        """The factor of attention scores."""
        return (self.traits.attention_scale or self.head_dim**-0.5) * self.rope.score_factor

    @property
    def whole_tokens(self) -> int:
        """The longest text, in tokens, that every layer sees as a whole."""
        windows = (kind.window for kind in self.layers if kind.window)
        return min((self.max_tokens, *windows))

    @property
    def attends_otherwise(self) -> bool:
        """True if some layer's attention is more than a softmax over all keys."""
        traits = self.traits
        return traits.sinks or traits.attention_cap > 0 or self.whole_tokens < self.max_tokens

    @property
    def queries_grow(self) -> bool:
        """True if the window is so long that positions scale queries."""
        growth = self.traits.query_growth
        return growth is not None and self.max_tokens > growth[1]

    def for_context(self, num_tokens: int) -> Self:
        if num_tokens <= self.max_tokens or not self.longest_tokens:
            return self

        def with_long_factors(rope: Rope) -> Rope:
            return replace(rope, is_long=rope.kind == "longrope")

        reason = LONG_FACTORS if self.rope.long_factors else GROWING
        notes = tuple(note for note in self.notes if not note.startswith(reason))
        layers = tuple(
            replace(kind, rope=None if kind.rope is None else with_long_factors(kind.rope))
            for kind in self.layers
        )
        if self.rope.long_factors:
            note = f"{LONG_FACTORS} hold for texts of any length, as the context was made longer"
            notes += (note,)
        return replace(
            self,
            max_tokens=self.longest_tokens,
            rope=with_long_factors(self.rope),
            layers=layers,
            notes=notes,
        )

    def stretched(self, scaling: RopeScaling) -> Self:
        """The config with rotary positions as requested. Where some layers see the whole text,
        those with a window stay as they are, as in llama.cpp. Raises ConfigError."""
        if scaling.kind == "auto":
            return self
        rope, max_tokens = rope_scaled(self.rope, self.max_tokens, scaling)
        mixed = any(not kind.window for kind in self.layers)
        stays = [kind.rope is None or (mixed and kind.window > 0) for kind in self.layers]
        layers = tuple(
            kind if stay else replace(kind, rope=rope)
            for kind, stay in zip(self.layers, stays, strict=True)
        )
        return replace(self, rope=rope, layers=layers, max_tokens=max_tokens, longest_tokens=0)

    def parameters(self, num_attending: int, num_fed: int | None = None) -> int:
        """Number of parameters if `num_attending` layers attend and `num_fed` have an FFN (None:
        all), without other kinds of layers'."""
        num_fed = self.num_layers if num_fed is None else num_fed
        traits, hidden, heads = self.traits, self.hidden_size, self.num_heads * self.head_dim
        attention = hidden * (self.qkv_size + heads * (1 + (traits.gated or traits.gate_apart)))
        attention += self.qkv_bias * self.qkv_size + self.out_bias * hidden
        kv = self.num_kv_heads * self.head_dim
        attention += self.qk_norm * (heads + kv if traits.whole_heads else 2 * self.head_dim)
        attention += traits.sinks * self.num_heads
        if (latent := self.latent) is not None:
            attention = latent.num_parameters(hidden) + self.out_bias * hidden
            attention += self.qkv_bias * (latent.query_rank + latent.row_size)
        num_up = traits.gate.num_up
        ffn = (num_up + 1) * hidden * self.ffn_size
        ffn += self.mlp_bias * (num_up * self.ffn_size + hidden)
        num_sparse = len(self.sparse_layers)
        ffns = (num_fed - num_sparse) * ffn
        if self.experts is not None:
            ffns += num_sparse * self.experts.num_parameters(hidden)
        num_norms = {Norms.AROUND: 4, Norms.PARALLEL: 1}.get(traits.norms, 2)
        ffns += traits.head_bias * self.vocab_size
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size * hidden
        norms = (self.num_layers * num_norms + 1) * hidden * (1 + traits.norm_bias)
        norms *= not traits.bare
        return num_attending * attention + ffns + norms + tables

    def spec(self, name: str, *, bytes_per_weight: int, bytes_per_kv: int) -> ModelSpec:
        sizes = {"bytes_per_weight": bytes_per_weight, "bytes_per_kv": bytes_per_kv}
        plain = DecoderConfig.spec(self, name, **sizes)
        plain = replace(plain, values_in_keys=self.latent is not None)
        if self.experts is None:
            return plain
        of_layer = self.experts.expert_parameters(self.hidden_size)
        return replace(
            plain,
            num_experts=self.experts.num_experts,
            num_active_experts=self.experts.num_chosen,
            expert_parameters=len(self.sparse_layers) * of_layer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(LayeredConfig):
    """Sizes and options of a decoder of the Llama line, in which all layers attend."""

    @property
    def reach(self) -> int:
        """The largest window of any layer, in tokens; 0 if some layer sees the whole text."""
        windows = [self.layer_kind(index).window for index in range(self.num_layers)]
        return max(windows) if all(windows) else 0

    @property
    def local_layers(self) -> tuple[int, ...]:
        """Layers with a window, if they all have the same one and the others see the whole text."""
        windows = [self.layer_kind(index).window for index in range(self.num_layers)]
        mixed = len(set(windows)) == 2 and 0 in windows
        return tuple(index for index, window in enumerate(windows) if window) if mixed else ()

    @property
    def attends_otherwise(self) -> bool:
        """True if some layer's attention is more than a softmax over all keys."""
        traits = self.traits
        differs = traits.sinks or traits.attention_cap > 0 or self.latent is not None
        return differs or self.whole_tokens < self.max_tokens

    @property
    def extras(self) -> tuple[str, ...]:
        """Features that the layers of Llama, Mistral, Qwen2, Qwen3 and Phi-3 do not have."""
        ropes = {self.layer_kind(index).rope for index in range(self.num_layers)}
        found = {
            "mixtures of experts": bool(self.sparse_layers),
            "attention sinks": self.traits.sinks,
            "a compressed cache": self.latent is not None,
            "positions by layer": ropes != {self.rope},
            "norms and scales of its own": replace(self.traits, sinks=False) != PLAIN_LAYERS,
            "a part for pictures": self.also_sees,
        }
        return tuple(name for name, there in found.items() if there)

    @property
    def num_parameters(self) -> int:
        return self.parameters(self.num_layers)

    def spec(self, name: str, *, bytes_per_weight: int, bytes_per_kv: int) -> ModelSpec:
        sizes = {"bytes_per_weight": bytes_per_weight, "bytes_per_kv": bytes_per_kv}
        plain = LayeredConfig.spec(self, name, **sizes)
        if self.whole_tokens == self.max_tokens:
            return plain
        seen = {"window": self.whole_tokens, "reach": self.reach}
        return replace(plain, **seen, local_layers=self.local_layers)


class Mechanism(Enum):
    """The recurrence of a family: a gated delta rule, Mamba-2, or a convolution alone."""

    DELTA = "delta"
    MAMBA = "mamba"
    CONVOLUTION = "convolution"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerTraits:
    """Traits of recurrent layers besides their sizes. The first product, the convolution and the
    last product may have biases. Mamba-2's output is normed in groups if it `has_norm`, before it
    is gated if `norm_first`. Its input is multiplied by `in_scale`, the parts of its first product
    (z, x, B, C and the steps) by `part_scales`, its output by `out_scale`."""

    in_bias: bool = False
    conv_bias: bool = False
    out_bias: bool = False
    has_norm: bool = True
    norm_first: bool = False
    in_scale: float = 1.0
    part_scales: tuple[float, ...] = ()
    out_scale: float = 1.0


PLAIN_MIXERS = MixerTraits()


def value_size(delta: StateShape) -> int:
    """Size of the output of a recurrence: all value heads together, or all channels."""
    return delta.num_heads * delta.value_dim if delta.num_heads else delta.num_channels


def first_size(mechanism: Mechanism, delta: StateShape) -> int:
    """Number of outputs of a recurrent layer's first product."""
    if mechanism is Mechanism.CONVOLUTION:
        return 3 * delta.num_channels
    gates = 2 if mechanism is Mechanism.DELTA else 1
    return delta.num_channels + value_size(delta) + gates * delta.num_heads


def layer_parameters(
    mechanism: Mechanism, delta: StateShape, mixers: MixerTraits, hidden_size: int
) -> int:
    """Number of parameters of the recurrence of one layer."""
    first, values = first_size(mechanism, delta), value_size(delta)
    found = (first + values) * hidden_size + mixers.in_bias * first + mixers.out_bias * hidden_size
    found += delta.num_channels * (delta.num_taps + mixers.conv_bias)
    found += delta.num_heads * (2 if mechanism is Mechanism.DELTA else 3)
    norms = {Mechanism.DELTA: delta.value_dim, Mechanism.MAMBA: values}
    return found + mixers.has_norm * norms.get(mechanism, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(LayeredConfig):
    """Sizes and options of a hybrid: `attention_layers` attend, the others have recurrences of one
    `mechanism`, whose states have the shape `delta`. If `parallel`, every layer has both. Layers
    are of one kind each if there are `ffn_layers`, which are FFNs alone; others have no FFN then.
    With `tiled_values`, z and the input of a delta rule's last product have the value heads in the
    order of GGUF files: one of each group after another."""

    attention_layers: tuple[int, ...]
    delta: StateShape
    mechanism: Mechanism = Mechanism.DELTA
    mixers: MixerTraits = PLAIN_MIXERS
    parallel: bool = False
    ffn_layers: tuple[int, ...] | None = None
    tiled_values: bool = False
    qk_norm: bool = True
    traits: LayerTraits = GATED_LAYERS

    def recurs(self, index: int) -> bool:
        """True if layer `index` has a recurrence."""
        alone = index in self.attention_layers or index in (self.ffn_layers or ())
        return self.parallel or not alone

    def feeds(self, index: int) -> bool:
        return self.ffn_layers is None or index in self.ffn_layers

    @property
    def delta_rule(self) -> StateShape | None:
        return self.delta if self.mechanism is Mechanism.DELTA else None

    @property
    def by_operator(self) -> bool:
        """True if the native call for all layers lacks a trait of these."""
        mixers, alone = self.mixers, self.ffn_layers is not None
        scaled = mixers.part_scales or (mixers.in_scale, mixers.out_scale) != (1, 1)
        return bool(self.parallel or alone or scaled or (mixers.norm_first and mixers.has_norm))

    @property
    def value_size(self) -> int:
        """Size of the output of a recurrence: all value heads together, or all channels."""
        return value_size(self.delta)

    @property
    def first_size(self) -> int:
        """Number of outputs of a recurrent layer's first product."""
        return first_size(self.mechanism, self.delta)

    @property
    def num_parameters(self) -> int:
        num_fed = None if self.ffn_layers is None else len(self.ffn_layers)
        plain = self.parameters(len(self.attention_layers), num_fed)
        recurrent = layer_parameters(self.mechanism, self.delta, self.mixers, self.hidden_size)
        return plain + self.delta.num_layers * recurrent

    def spec(self, name: str, *, bytes_per_weight: int, bytes_per_kv: int) -> ModelSpec:
        sizes = {"bytes_per_weight": bytes_per_weight, "bytes_per_kv": bytes_per_kv}
        return replace(
            LayeredConfig.spec(self, name, **sizes),
            num_kv_layers=len(self.attention_layers),
            state_bytes=self.delta.state_bytes,
            input_bytes=self.delta.input_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config(LayeredConfig):
    """Sizes and options of GPT-2 and DistilGPT2. `max_tokens` positions have an embedding."""

    family: str = "gpt2"
    rms_norm_eps: float = 1e-5
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    fused_tensors: bool = True
    traits: LayerTraits = BIASED_LAYERS
    tie_word_embeddings: bool = True

    def stretched(self, scaling: RopeScaling) -> Self:
        return super(LayeredConfig, self).stretched(scaling)

    @property
    def num_parameters(self) -> int:
        return self.parameters(self.num_layers) + self.max_tokens * self.hidden_size


@dataclass(frozen=True, slots=True)
class FamilyFile:
    """A file of a family: the settings of the text model, those of generation, and the fields of
    LayeredConfig that were read from them."""

    raw: JsonObject
    family: Family
    generation: JsonObject | None
    fields: Mapping[str, Any]


# Fields of HybridConfig that are about its recurrent layers.
Recurrences = Callable[[JsonObject, int], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a family: `defaults` of absent keys, `fixed` values of keys that it never
    reads, and its kinds of layers. `activations` are the names of its gate under `activation_key`;
    the first is the default. `qk_norm_key` names the switch of norms of queries and keys,
    `norm_key` the epsilon of its norms. Heads attend over latents if there is `latent`, which
    returns their sizes. `reach` returns the number of tokens up to which llama.py computes the
    family's own logits, and the reason. Families with `recurrences` are hybrids; null counts as
    absent in their files, which `has_mtp` if they may have MTP blocks next to their layers.
    `derived` returns settings under the usual keys that follow from the family's own keys. In
    `names` are parts of names of tensors, and what folders of the family have instead. `config`
    makes a config that is no LlamaConfig from the fields of LayeredConfig; `decoder` returns a
    decoder of a plugin.
    """

    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    fixed: Mapping[str, object] = field(default_factory=dict[str, object])
    windows: kinds.Windows = kinds.whole
    rope: RopeRules = COMMON_ROPE
    ropes: kinds.Ropes = kinds.one_rope
    traits: kinds.Traits = kinds.plain_traits
    experts: expert_kinds.Mixture = kinds.nothing
    recurrences: Recurrences | None = None
    has_mtp: bool = False
    config: Callable[[FamilyFile], LayeredConfig] | None = None
    decoder: Callable[[], Callable[..., Any]] | None = None
    derived: Callable[[JsonObject], Mapping[str, object]] | None = None
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_key: str = ""
    bias_key: str = ""
    qkv_bias_key: str = "attention_bias"
    fused_tensors: bool = False
    latent: Callable[[JsonObject], LatentShape] | None = None
    activation_key: str = "hidden_act"
    activations: tuple[str, ...] = ("silu", "swish")
    norm_key: str = "rms_norm_eps"
    reach: Callable[[JsonObject], tuple[int, str] | None] = kinds.nothing
