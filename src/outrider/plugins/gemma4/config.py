"""Settings of Gemma 4 in a `config.json`: layers of two sizes, some of which share keys and values.

Layers with a window have heads of one size, and layers that see the whole text those of another.
The last `num_kv_shared_layers` read the keys and values of the last layer before them of their
kind. In E2B and E4B each layer also reads an input of its own (per-layer embeddings). No tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from outrider.core.spec import LayerKeys, ModelSpec
from outrider.models import layer_kinds as kinds
from outrider.models.configs import Family, FamilyFile, LlamaConfig
from outrider.models.expert_kinds import ExpertNames, Experts
from outrider.models.json_object import JsonObject, contradictory, unsupported
from outrider.models.layer_kinds import Gate
from outrider.models.rope_config import COMMON_ROPE, PROPORTIONAL_ROPE, Rope, RopeRules, parse_rope

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(LlamaConfig):
    """Sizes and options of Gemma 4; `head_dim`, `num_kv_heads` and `ffn_size` are the largest.

    `keys` and `ffn_sizes` are those of each layer. In the layers `values_from_keys` the values are
    the product of the keys, normed without weights. If `input_size` is not 0, each layer reads an
    input of so many numbers, from a table of `input_tokens` tokens and a projection of the
    embedding. The model never writes the tokens `suppressed`.
    """

    keys: tuple[LayerKeys, ...]
    ffn_sizes: tuple[int, ...]
    values_from_keys: frozenset[int] = frozenset()
    input_size: int = 0
    input_tokens: int = 0
    suppressed: tuple[int, ...] = ()

    def at(self, index: int) -> Self:
        keys = self.keys[index]
        return replace(
            self,
            num_kv_heads=keys.num_heads,
            head_dim=keys.head_dim,
            ffn_size=self.ffn_sizes[index],
        )

    def stores(self, index: int) -> bool:
        """True if layer `index` has keys and values of its own."""
        return self.keys[index].source == index

    @property
    def head_dims(self) -> frozenset[int]:
        return frozenset(one.head_dim for one in self.keys)

    @property
    def num_parameters(self) -> int:
        hidden, inputs = self.hidden_size, self.num_layers * self.input_size
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size * hidden
        tables += inputs * (self.input_tokens + hidden) + self.input_size
        return tables + hidden + sum(map(self._parameters, range(self.num_layers)))

    def _parameters(self, index: int) -> int:
        hidden, keys, stores = self.hidden_size, self.keys[index], self.stores(index)
        queries = self.num_heads * keys.head_dim
        rows = keys.num_heads * keys.head_dim * stores * (2 - (index in self.values_from_keys))
        attention = hidden * (2 * queries + rows) + keys.head_dim * (1 + stores)
        attention += self.qkv_bias * (queries + rows) + self.out_bias * hidden
        ffn = 3 * hidden * self.ffn_sizes[index]
        own_input = hidden * (2 * self.input_size + bool(self.input_size))
        mixture = 0
        if self.experts is not None:
            mixture = self.experts.num_parameters(hidden) + 3 * hidden
        return attention + ffn + own_input + mixture + 4 * hidden

    def spec(self, name: str, *, bytes_per_weight: int, bytes_per_kv: int) -> ModelSpec:
        sizes = {"bytes_per_weight": bytes_per_weight, "bytes_per_kv": bytes_per_kv}
        inputs = self.input_tokens * self.num_layers * self.input_size
        return replace(LlamaConfig.spec(self, name, **sizes), kv_layers=self.keys, looked_up=inputs)


def gemma4_windows(raw: JsonObject, num_layers: int) -> Sequence[int]:
    """Windows of layers; the last one sees the whole text, whatever the file says."""
    found = kinds.by_kinds(raw, num_layers, lambda index: (index + 1) % _PATTERN > 0)
    return [*found[:-1], 0]


def gemma4_ropes(
    raw: JsonObject, rules: RopeRules, windows: Sequence[int]
) -> Sequence[Rope | None]:
    """Positions of each kind of layers. In the way `proportional`, frequencies are those of a
    whole head, and a part of its pairs turns."""
    del rules
    usual: Mapping[str, Mapping[str, object]] = {
        _SLIDING: {"rope_theta": 10000.0},
        _FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    }
    part = raw.child("rope_parameters") or JsonObject(raw.where, usual)

    def of_kind(kind: str) -> Rope:
        found = part.child(kind)
        if found is None:
            raise contradictory(part.where, f"rope_parameters has no settings of {kind}")
        values, way = dict(found.values), found.text("rope_type", "default")
        if way == "default":
            values.pop("partial_rotary_factor", None)  # which is not read then
        own = {"rope_parameters": values, "max_position_embeddings": raw.values.get(_POSITIONS)}
        is_proportional = way == "proportional"
        return parse_rope(
            JsonObject(raw.where, own), PROPORTIONAL_ROPE if is_proportional else COMMON_ROPE
        )

    used = {kind: of_kind(kind) for kind in {_SLIDING if window else _FULL for window in windows}}
    return [used[_SLIDING if window else _FULL] for window in windows]


_POSITIONS = "max_position_embeddings"


def gemma4_traits(raw: JsonObject) -> kinds.LayerTraits:
    """Norms multiply by their weights as stored, and scores have the factor 1."""
    if raw.values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise unsupported(
            raw.where,
            f"use_bidirectional_attention "
            f"{raw.values['use_bidirectional_attention']!r} is not supported: such a model writes "
            "no text",
        )
    cap = "final_logit_softcapping"
    return kinds.LayerTraits(
        norms=kinds.Norms.AROUND,
        gate=kinds.Gate.GELU,
        attention_scale=1.0,
        embedding_scale=math.sqrt(raw.integer("hidden_size")),
        logit_cap=raw.number(cap) if raw.has(cap) else 0.0,
    )


def gemma4_config(file: FamilyFile) -> GemmaConfig:
    """The config of Gemma 4. Raises CheckpointError, naming the key, for a contradiction."""
    config = assistant_config(file)
    _check_sources(file.raw.where, config)
    return config


def assistant_config(file: FamilyFile) -> GemmaConfig:
    """The config of a model whose layers may read keys and values of another one."""
    return GemmaConfig(**{**file.fields, **_sizes(file.raw, file.family, file.generation)})


def _sizes(raw: JsonObject, family: Family, generation: JsonObject | None) -> dict[str, Any]:
    """Fields of GemmaConfig. Raises CheckpointError, naming the key, for a contradiction."""
    num_layers = raw.integer("num_hidden_layers")
    slides = [window > 0 for window in family.windows(raw, num_layers)]
    shapes = _shapes(raw, slides)
    shared = raw.integer("num_kv_shared_layers", 0, least=0)
    sources = [_source(slides, num_layers - shared, index) for index in range(num_layers)]
    keys = tuple(LayerKeys(*shape, source) for shape, source in zip(shapes, sources, strict=True))
    ffn, wide = raw.integer("intermediate_size"), raw.flag("use_double_wide_mlp", default=False)
    ffn_sizes = tuple(
        ffn * (2 if wide and source != index else 1) for index, source in enumerate(sources)
    )
    equal = raw.flag("attention_k_eq_v", default=False)
    input_size = raw.integer("hidden_size_per_layer_input", 0, least=0)
    return {
        "keys": keys,
        "ffn_sizes": ffn_sizes,
        "head_dim": max(one.head_dim for one in keys),
        "num_kv_heads": max(one.num_heads for one in keys),
        "ffn_size": max(ffn_sizes),
        "values_from_keys": frozenset(
            index for index, slide in enumerate(slides) if equal and not slide
        ),
        "input_size": input_size,
        "input_tokens": _input_tokens(raw) if input_size else 0,
        "suppressed": _suppressed(raw, generation),
    }


def _suppressed(raw: JsonObject, generation: JsonObject | None) -> tuple[int, ...]:
    key, vocab_size = "suppress_tokens", raw.integer("vocab_size")
    found = generation.integers(key) if generation is not None else ()
    if generation is not None and any(not 0 <= token < vocab_size for token in found):
        raise contradictory(
            generation.where, f"{key} has a token outside the vocabulary of {vocab_size}"
        )
    return found


def _shapes(raw: JsonObject, slides: Sequence[bool]) -> list[tuple[int, int]]:
    """Number and size of the key heads of every layer. Newer files list the layers that differ."""
    own = raw.integer("num_key_value_heads"), raw.integer("head_dim")
    if (listed := raw.child("per_layer_config")) is None:
        num_heads = own[0]
        if raw.flag("attention_k_eq_v", default=False):
            num_heads = raw.integer("num_global_key_value_heads", num_heads)
        whole = num_heads, raw.integer("global_head_dim", 512)
        return [own if slide else whole for slide in slides]
    found: list[tuple[int, int]] = []
    for index in range(len(slides)):
        part = listed.child(str(index)) or JsonObject(listed.where, {})
        if unknown := sorted(part.values.keys() - {"num_key_value_heads", "head_dim"}):
            raise unsupported(listed.where, f"per_layer_config with {unknown[0]} is not supported")
        sizes = part.integer("num_key_value_heads", own[0]), part.integer("head_dim", own[1])
        found.append(sizes)
    if len({*zip(slides, found, strict=True)}) > len({*slides}):
        raise unsupported(
            raw.where,
            "per_layer_config has layers of one kind with heads of different sizes, "
            "which is not supported",
        )
    return found


# The source of keys and values that are another model's.
_ELSEWHERE = -1


def _source(slides: Sequence[bool], first_shared: int, index: int) -> int:
    """The layer whose keys and values layer `index` reads."""
    if index < first_shared:
        return index
    before = [depth for depth in range(first_shared) if slides[depth] == slides[index]]
    return before[-1] if before else _ELSEWHERE


def _check_sources(where: str, config: GemmaConfig) -> None:
    """Raise CheckpointError for a layer whose keys and values no layer stores."""
    for index, one in enumerate(config.keys):
        if one.source == _ELSEWHERE:
            kind = _SLIDING if config.layer_kind(index).window else _FULL
            raise contradictory(
                where,
                f"num_kv_shared_layers leaves no layer of {kind} whose keys and values "
                f"layer {index} could read",
            )


def _input_tokens(raw: JsonObject) -> int:
    found, vocab_size = raw.integer("vocab_size_per_layer_input"), raw.integer("vocab_size")
    if found < vocab_size:
        raise contradictory(
            raw.where,
            f"vocab_size_per_layer_input {found} is below vocab_size {vocab_size}: "
            "some tokens would have no input of layers",
        )
    return found


def gemma4_experts(raw: JsonObject) -> Experts | None:
    if not raw.flag("enable_moe_block", default=False):
        return None
    return Experts(
        num_experts=raw.integer("num_experts"),
        num_chosen=raw.integer("top_k_experts"),
        ffn_size=raw.integer("moe_intermediate_size"),
        gates_shared=False,
        gate=Gate.GELU,
        names=ExpertNames.GEMMA,
    )
