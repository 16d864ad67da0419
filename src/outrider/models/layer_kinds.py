"""Kinds of decoder layers, their norms, windows and ropes, and readers of a family's own.

A row of family_table.py combines these for a family; llama.py computes all of them. Defaults of
absent keys of a `config.json` are those of transformers. No tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from outrider.models.json_object import JsonObject, contradictory, unsupported
from outrider.models.rope_config import Rope, RopeRules, parse_rope


class Norms(Enum):
    """The norms of a layer: before attention and FFN, after them, before and after, or one norm
    before both, which then read the same tensor. With two parallel norms, attention and FFN read
    norms of one residual, too."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    PARALLEL = "parallel"
    TWO_PARALLEL = "two_parallel"


class Gate(Enum):
    """The formula of an FFN's gate g and `up` u: silu(g) * u; gelu(g) * u, with tanh; or gpt-oss's
    g * sigmoid(alpha * g) * (u + 1), with g and u clamped to a limit. Without a gate: gelu(u), with
    tanh or exactly (`ERF`), relu(u) squared, or xIELU (ffn.py)."""

    SILU = "silu"
    GELU = "gelu"
    CLAMPED = "clamped"
    NONE = "none"
    SQUARED = "squared"
    ERF = "erf"
    XIELU = "xielu"

    @property
    def num_up(self) -> int:
        """Number of products of the FFN before the last one."""
        return 2 if self in (Gate.SILU, Gate.GELU, Gate.CLAMPED) else 1


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The window and positions of a layer. A token sees the last `window` tokens, itself included;
    0 means all. If `rope` is None, heads do not rotate with positions."""

    window: int = 0
    rope: Rope | None = field(default_factory=Rope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Factors of Falcon H1: of the input of attention, of keys, of the output of attention, of the
    FFN's gate and of its output."""

    attention_in: float = 1.0
    key: float = 1.0
    attended: float = 1.0
    gate: float = 1.0
    fed: float = 1.0


PLAIN_SCALES = Scales()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTraits:
    """Traits of all layers of a family, and of its embedding and head; the defaults are a Llama's.

    `centred` norms are layer norms, without bias unless `norm_bias`; `bare` ones have no weight
    either. With `from_one`, files hold a norm's weight minus 1. With `whole_heads`, norms of
    queries and keys normalise all heads as one vector; with `turns_first`, they follow the
    rotation. A fused matrix is `by_group` if it has the queries of a key head, its key and its
    value together. Queries, keys and values are clamped to `qkv_clip`, unless that is 0. If
    `gated`, each query head has a gate next to it in the files, whose sigmoid scales the head's
    output. Attention scores are multiplied by `attention_scale` (0: 1 / sqrt(head_dim)) and softly
    capped, as logits are; a cap of 0 means no cap. The outputs of attention and FFN are multiplied
    by `residual_scale` before they are added to the residual. With `interleaved`, rotary pairs are
    neighbours in a head. `sinks` are learnt scores without a value. The output head has a bias if
    `head_bias`. If `bare_heads` is not 0, files may lack the norms of queries and keys, whose
    weights are then this number and 1. With `gate_apart`, the gate of heads is a matrix of its own.
    Norms of the outputs of attention and FFN have the epsilon `after_eps`, unless that is 0. With
    `normed_embedding`, embeddings are normed without weights. If `from_zero_last`, the last norm is
    stored as it is, despite `from_one`. `curves` has the numbers of xIELU for each layer
    (ffn.py), if settings say them. In texts longer than the step of `query_growth`, queries
    are scaled by their positions.
    """

    norms: Norms = Norms.BEFORE
    centred: bool = False
    norm_bias: bool = False
    bare: bool = False
    from_one: bool = False
    whole_heads: bool = False
    turns_first: bool = False
    by_group: bool = False
    qkv_clip: float = 0.0
    gated: bool = False
    gate: Gate = Gate.SILU
    attention_scale: float = 0.0
    attention_cap: float = 0.0
    sinks: bool = False
    interleaved: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    scales: Scales = PLAIN_SCALES
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    head_bias: bool = False
    bare_heads: float = 0.0
    gate_apart: bool = False
    after_eps: float = 0.0
    normed_embedding: bool = False
    from_zero_last: bool = False
    curves: tuple[tuple[float, ...], ...] = ()
    query_growth: tuple[float, int] | None = None

    @property
    def by_operator(self) -> bool:
        """True if the native call for all layers lacks one of these traits."""
        return self.norms is Norms.TWO_PARALLEL or self.gate in (Gate.ERF, Gate.XIELU)


PLAIN_LAYERS = LayerTraits()
GATED_LAYERS = LayerTraits(from_one=True, gated=True)
BIASED_LAYERS = LayerTraits(centred=True, norm_bias=True, gate=Gate.NONE)


_SLIDING, _FULL = "sliding_attention", "full_attention"
# Readers of a `config.json`'s layers, by family: windows, ropes and traits.
Windows = Callable[[JsonObject, int], Sequence[int]]


def whole(raw: JsonObject, num_layers: int) -> Sequence[int]:
    del raw
    return [0] * num_layers


def _window(raw: JsonObject) -> int:
    return raw.integer("sliding_window") if raw.has("sliding_window") else 0


def in_all_layers(raw: JsonObject, num_layers: int) -> Sequence[int]:
    return [_window(raw)] * num_layers


def by_switch(raw: JsonObject, num_layers: int) -> Sequence[int]:
    slides = raw.flag("use_sliding_window", default=False)
    return in_all_layers(raw, num_layers) if slides else whole(raw, num_layers)


def of_kinds(
    raw: JsonObject,
    num_layers: int,
    others: Sequence[str],
    names: Sequence[str],
    usual: Callable[[int], bool],
) -> list[bool]:
    """True for each layer whose kind has one of `names`, and not one of `others`, by `layer_types`
    or, if it is absent, by `usual`."""
    kinds = raw.texts("layer_types")
    if unknown := sorted(set(kinds) - {*names, *others}):
        raise unsupported(raw.where, f"layer_types has {unknown[0]!r}, which is not supported")
    if kinds and len(kinds) != num_layers:
        raise contradictory(
            raw.where, f"layer_types has {len(kinds)} entries for {num_layers} layers"
        )
    return [one in names for one in kinds] or [usual(index) for index in range(num_layers)]


def by_kinds(raw: JsonObject, num_layers: int, slides: Callable[[int], bool]) -> Sequence[int]:
    """Windows of layers: those that slide by `layer_types` or, if it is absent, by `slides`."""
    sliding = of_kinds(raw, num_layers, (_FULL,), (_SLIDING,), slides)
    if not any(sliding):
        return whole(raw, num_layers)
    window = raw.integer("sliding_window") if raw.texts("layer_types") else _window(raw)
    return [window if slide else 0 for slide in sliding]


def qwen_windows(raw: JsonObject, num_layers: int) -> Sequence[int]:
    """Windows of Qwen's layers; without `layer_types`, those from `max_window_layers` on slide."""
    first = raw.integer("max_window_layers", least=0)
    switched = raw.flag("use_sliding_window", default=False)
    return by_kinds(raw, num_layers, lambda index: switched and index >= first)


def qwen2_moe_windows(raw: JsonObject, num_layers: int) -> Sequence[int]:
    """Windows of Qwen2-MoE: without `layer_types`, every other one up to `max_window_layers`."""
    end = raw.integer("max_window_layers", least=0)
    switched = raw.flag("use_sliding_window", default=False)
    return by_kinds(raw, num_layers, lambda index: switched and index < end and index % 2 == 0)


def all_but_every(default: int) -> Windows:
    """A reader of windows: every `default`-th layer sees the whole text, the others slide.
    `sliding_window_pattern` may have another number, or a letter for each layer: L slides."""

    def windows(raw: JsonObject, num_layers: int) -> Sequence[int]:
        key = "sliding_window_pattern"
        if isinstance(raw.values.get(key), str):
            letters = raw.text(key)
            return by_kinds(raw, num_layers, lambda i: letters[i % len(letters) :][:1] == "L")
        every = raw.integer(key, default, least=0)
        return by_kinds(raw, num_layers, lambda i: every > 0 and (i + 1) % every > 0)

    return windows


def smollm3_windows(raw: JsonObject, num_layers: int) -> Sequence[int]:
    switched = raw.flag("use_sliding_window", default=False)
    turns = _turning(raw, num_layers)
    return by_kinds(raw, num_layers, lambda index: switched and not turns[index])


def _turning(raw: JsonObject, num_layers: int) -> Sequence[bool]:
    """True for each layer whose heads rotate with positions; SmolLM3's list has a 1 for it."""
    listed = raw.integers("no_rope_layers")
    if listed and len(listed) != num_layers:
        raise contradictory(
            raw.where, f"no_rope_layers has {len(listed)} entries for {num_layers} layers"
        )
    every = raw.integer("no_rope_layer_interval", 4)
    return [bool(one) for one in listed] or [(i + 1) % every > 0 for i in range(num_layers)]


Ropes = Callable[[JsonObject, RopeRules, Sequence[int]], Sequence[Rope | None]]


def one_rope(raw: JsonObject, rules: RopeRules, windows: Sequence[int]) -> Sequence[Rope | None]:
    return [parse_rope(raw, rules)] * len(windows)


def where_listed(
    raw: JsonObject, rules: RopeRules, windows: Sequence[int]
) -> Sequence[Rope | None]:
    rope = parse_rope(raw, rules)
    return [rope if turns else None for turns in _turning(raw, len(windows))]


def by_kind(local_key: str, local_theta: float) -> Ropes:
    """A reader of rotary positions: sliding layers have their own, either those under their name or
    plain ones with the base `local_key`. A scaling stretches only the layers that see the whole
    text."""

    def ropes(raw: JsonObject, rules: RopeRules, windows: Sequence[int]) -> Sequence[Rope | None]:
        found = _named_by_kind(raw, rules, windows)
        if found is None:
            local = Rope(theta=raw.number(local_key, local_theta))
            found = [local if window else parse_rope(raw, rules) for window in windows]
        return found

    return ropes


def named_or_one(
    raw: JsonObject, rules: RopeRules, windows: Sequence[int]
) -> Sequence[Rope | None]:
    """Rotary positions of each kind of layers under its name, or one for all layers."""
    return _named_by_kind(raw, rules, windows) or one_rope(raw, rules, windows)


def stretched_by(scaling: Mapping[str, object]) -> Ropes:
    """A reader of rotary positions that have this `scaling` if the file has none."""

    def ropes(raw: JsonObject, rules: RopeRules, windows: Sequence[int]) -> Sequence[Rope | None]:
        if not any(raw.has(key) for key in ROPE_KEYS):
            raw = JsonObject(raw.where, {**raw.values, "rope_parameters": dict(scaling)})
        return named_or_one(raw, rules, windows)

    return ropes


gpt_oss_rope = stretched_by(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)


def _named_by_kind(
    raw: JsonObject, rules: RopeRules, windows: Sequence[int]
) -> Sequence[Rope | None] | None:
    part = raw.child("rope_parameters")
    if part is None or not (part.has(_FULL) or part.has(_SLIDING)):
        return None
    whole, local = (_of_kind(raw, part, kind, rules) for kind in (_FULL, _SLIDING))
    return [local if window else whole for window in windows]


ROPE_KEYS = ("rope_parameters", "rope_scaling")


def _of_kind(raw: JsonObject, parts: JsonObject, kind: str, rules: RopeRules) -> Rope:
    plain = {key: value for key, value in raw.values.items() if key not in ROPE_KEYS}
    if kind == _SLIDING and "rope_local_base_freq" in plain:
        plain["rope_theta"] = plain["rope_local_base_freq"]
    child = parts.child(kind)
    return parse_rope(
        JsonObject(raw.where, {**plain, "rope_parameters": {} if child is None else child.values}),
        rules,
    )


Traits = Callable[[JsonObject], LayerTraits]


def nothing(_: JsonObject) -> None: ...


def plain_traits(_: JsonObject) -> LayerTraits:
    return PLAIN_LAYERS


def always(traits: LayerTraits) -> Traits:
    return lambda _: traits


def gemma_traits(raw: JsonObject) -> LayerTraits:
    if raw.flag("use_bidirectional_attention", default=False):
        raise unsupported(
            raw.where, "use_bidirectional_attention is not supported: such a model writes no text"
        )
    return LayerTraits(
        norms=Norms.AROUND,
        from_one=True,
        gate=Gate.GELU,
        attention_scale=raw.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_cap=capped(raw, "attn_logit_softcapping"),
        embedding_scale=math.sqrt(raw.integer("hidden_size")),
        logit_cap=capped(raw, "final_logit_softcapping"),
    )


def gemma1_traits(raw: JsonObject) -> LayerTraits:
    return LayerTraits(
        from_one=True, gate=Gate.GELU, embedding_scale=math.sqrt(raw.integer("hidden_size"))
    )


def capped(raw: JsonObject, key: str) -> float:
    return raw.number(key) if raw.has(key) else 0.0


def granite_traits(raw: JsonObject) -> LayerTraits:
    return LayerTraits(
        attention_scale=raw.number("attention_multiplier", 1.0),
        embedding_scale=raw.number("embedding_multiplier", 1.0),
        residual_scale=raw.number("residual_multiplier", 1.0),
        logit_scale=1.0 / raw.number("logits_scaling", 1.0),
    )


GROWING = "queries that grow with the position"


def query_growth(raw: JsonObject) -> tuple[float, int] | None:
    """The factor b and the step s by which Ministral 3 and Mistral 4 scale the queries of a
    position p, 1 + b log(1 + p // s); None if they do not. GGUF files have keys of their own."""
    rope = raw.child("rope_parameters") or JsonObject(raw.where, {})
    if rope.has("llama_4_scaling_beta"):
        step = rope.integer("original_max_position_embeddings")
        return rope.number("llama_4_scaling_beta"), step
    if not raw.has("query_reach"):
        return None
    return raw.number("query_growth"), raw.integer("query_reach")


def query_reach(raw: JsonObject) -> tuple[int, str] | None:
    """The number of tokens up to which queries are not scaled, and the reason."""
    growth = query_growth(raw)
    return None if growth is None else (growth[1], f"{GROWING} take a longer --context")


def growing_traits(raw: JsonObject) -> LayerTraits:
    return LayerTraits(query_growth=query_growth(raw))
