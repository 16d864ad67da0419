"""Kinds of decoder layers, their norms, windows, ropes and experts, and readers of a family's own.

A row of family_table.py combines these for a family; llama.py computes all of them. Defaults of
absent keys of a `config.json` are those of transformers. No tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from outrider.core.errors import CheckpointError
from outrider.models.json_object import CONTRADICTION, OTHER_CHECKPOINT, JsonObject
from outrider.models.rope_config import Rope, RopeRules, parse_rope


class Norms(Enum):
    """The norms of a layer: before attention and FFN, after them, before and after, or one norm
    before both, which then read the same tensor."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    PARALLEL = "parallel"


class Gate(Enum):
    """The formula of an FFN's gate g and `up` u: silu(g) * u; gelu(g) * u, with tanh; or gpt-oss's
    g * sigmoid(alpha * g) * (u + 1), with g and u clamped to a limit. Without a gate: gelu(u), or
    relu(u) squared."""

    SILU = "silu"
    GELU = "gelu"
    CLAMPED = "clamped"
    NONE = "none"
    SQUARED = "squared"

    @property
    def num_up(self) -> int:
        """Number of products of the FFN before the last one."""
        return 1 if self in (Gate.NONE, Gate.SQUARED) else 2


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

    `centred` norms are layer norms, without bias unless `norm_bias`. With `from_one`, files hold a
    norm's weight minus 1. With `whole_heads`, norms of queries and keys normalise all heads as one
    vector. If `gated`, each query head has a gate next to it in the files, whose sigmoid scales the
    head's output. Attention scores are multiplied by `attention_scale` (0: 1 / sqrt(head_dim)) and
    softly capped, as logits are; a cap of 0 means no cap. The outputs of attention and FFN are
    multiplied by `residual_scale` before they are added to the residual. With `interleaved`, rotary
    pairs are neighbours in a head. `sinks` are learnt scores without a value.
    """

    norms: Norms = Norms.BEFORE
    centred: bool = False
    norm_bias: bool = False
    from_one: bool = False
    whole_heads: bool = False
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


PLAIN_LAYERS = LayerTraits()
GATED_LAYERS = LayerTraits(from_one=True, gated=True)
BIASED_LAYERS = LayerTraits(centred=True, norm_bias=True, gate=Gate.NONE)


class ExpertNames(Enum):
    """The names and layout of a mixture in files: Qwen's, Mixtral's, DeepSeek's, Granite's, or
    gpt-oss's, whose experts are stacked as inputs by outputs, with the outputs of gate and up
    interleaved."""

    QWEN = "qwen"
    MIXTRAL = "mixtral"
    GPT_OSS = "gpt_oss"
    GRANITE = "granite"
    DEEPSEEK = "deepseek"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sizes of a mixture: each token goes through `num_chosen` of `num_experts`, and through a
    shared expert if that has a size, scaled by a gate of its own if `gates_shared`. Weights of
    experts are the softmax of their scores, or the sigmoid of each (`has_sigmoids`). With
    `normalise`, those of the chosen ones sum to 1; then they are multiplied by `scale`. With
    `has_choice_bias`, experts are chosen by their weights plus a bias. They come from the
    `top_groups` of `num_groups` groups whose `group_best` best experts have the largest sum. They
    read and write a projection of `latent_size`, if that is not 0."""

    num_experts: int
    num_chosen: int
    ffn_size: int
    shared_ffn_size: int = 0
    normalise: bool = True
    gates_shared: bool = True
    has_sigmoids: bool = False
    has_choice_bias: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    biased: bool = False
    gate: Gate = Gate.SILU
    alpha: float = 1.702
    limit: float = 7.0
    latent_size: int = 0
    names: ExpertNames = ExpertNames.QWEN

    def expert_parameters(self, hidden_size: int) -> int:
        """Parameters of all experts that the router chooses from."""
        biases = self.biased * (2 * self.ffn_size + hidden_size)
        width = self.latent_size or hidden_size
        return self.num_experts * ((self.gate.num_up + 1) * width * self.ffn_size + biases)

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of the whole mixture, with router, shared expert and its gate."""
        shared = bool(self.shared_ffn_size) * hidden_size
        shared *= (self.gate.num_up + 1) * self.shared_ffn_size + self.gates_shared
        shared += 2 * self.latent_size * hidden_size
        router = self.num_experts * (hidden_size + self.biased + self.has_choice_bias)
        return self.expert_parameters(hidden_size) + router + shared


def sparse_layers(raw: JsonObject, num_layers: int) -> tuple[int, ...]:
    """Layers whose FFN is a mixture."""
    every = raw.integer("decoder_sparse_step", raw.integer("moe_layer_interval", 1))
    first = raw.integer(
        "first_k_dense_replace", raw.integer("moe_layer_start_index", 0, least=0), least=0
    )
    end = raw.integer("moe_layer_end_index", num_layers, least=-1)
    dense = {*raw.integers("mlp_only_layers"), *range(first)}
    if kinds := raw.texts("mlp_layer_types"):
        dense = {index for index, kind in enumerate(kinds) if kind == "dense"}
    dense |= set[int]() if end < 0 else {*range(end + 1, num_layers)}
    return tuple(
        index for index in range(num_layers) if index not in dense and (index + 1) % every == 0
    )


def check_experts(where: str, experts: Experts) -> None:
    """Raise CheckpointError for a token that needs more experts than it may choose from."""
    size, rest = divmod(experts.num_experts, experts.num_groups)
    if rest or experts.top_groups > experts.num_groups:
        raise CheckpointError(
            f"{where}: {experts.num_experts} experts have no {experts.num_groups} groups (n_group) "
            f"of which a token chooses {experts.top_groups} (topk_group).",
            hint=CONTRADICTION,
        )
    if experts.num_chosen > experts.top_groups * size:
        raise CheckpointError(
            f"{where}: num_experts_per_tok {experts.num_chosen} is above num_experts "
            f"{experts.top_groups * size}.",
            hint=CONTRADICTION,
        )


_SLIDING, _FULL = "sliding_attention", "full_attention"
# Readers of a `config.json`'s layers, by family: windows, ropes, traits and experts.
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
        raise CheckpointError(
            f"{raw.where}: layer_types has {unknown[0]!r}, which is not supported.",
            hint=OTHER_CHECKPOINT,
        )
    if kinds and len(kinds) != num_layers:
        raise CheckpointError(
            f"{raw.where}: layer_types has {len(kinds)} entries for {num_layers} layers.",
            hint=CONTRADICTION,
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


def dots_windows(raw: JsonObject, num_layers: int) -> Sequence[int]:
    """Windows of dots.llm1: without `layer_types`, layers from `max_window_layers` on slide."""
    first = raw.integer("max_window_layers", least=0)
    return by_kinds(raw, num_layers, lambda index: raw.has("sliding_window") and index >= first)


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
        raise CheckpointError(
            f"{raw.where}: no_rope_layers has {len(listed)} entries for {num_layers} layers.",
            hint=CONTRADICTION,
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


def where_sliding(
    raw: JsonObject, rules: RopeRules, windows: Sequence[int]
) -> Sequence[Rope | None]:
    """Rotary positions for sliding layers only; layers that see the whole text have none."""
    rope = parse_rope(raw, rules)
    return [rope if window else None for window in windows]


def exaone_ropes(
    raw: JsonObject, rules: RopeRules, windows: Sequence[int]
) -> Sequence[Rope | None]:
    """Rotary positions as in `where_sliding` if the model has a window, else for all layers."""
    return (where_sliding if raw.has("sliding_window") else one_rope)(raw, rules, windows)


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


def minimax_rope(
    raw: JsonObject, rules: RopeRules, windows: Sequence[int]
) -> Sequence[Rope | None]:
    """One rope; `rotary_dim` dimensions of a head turn where no part of it is named."""
    part = raw.child("rope_parameters")
    named = raw.has("partial_rotary_factor") or (part and part.has("partial_rotary_factor"))
    if raw.has("rotary_dim") and not named:
        share = raw.integer("rotary_dim") / raw.integer("head_dim")
        raw = JsonObject(raw.where, {**raw.values, "partial_rotary_factor": share})
    return one_rope(raw, rules, windows)


def gpt_oss_rope(
    raw: JsonObject, rules: RopeRules, windows: Sequence[int]
) -> Sequence[Rope | None]:
    """Rotary positions of gpt-oss, which are stretched even if the file has no scaling."""
    if not any(raw.has(key) for key in _ROPE_KEYS):
        yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
        stretched = {**yarn, "original_max_position_embeddings": 4096}
        raw = JsonObject(raw.where, {**raw.values, "rope_parameters": stretched})
    return named_or_one(raw, rules, windows)


def _named_by_kind(
    raw: JsonObject, rules: RopeRules, windows: Sequence[int]
) -> Sequence[Rope | None] | None:
    part = raw.child("rope_parameters")
    if part is None or not (part.has(_FULL) or part.has(_SLIDING)):
        return None
    whole, local = (_of_kind(raw, part, kind, rules) for kind in (_FULL, _SLIDING))
    return [local if window else whole for window in windows]


_ROPE_KEYS = ("rope_parameters", "rope_scaling")


def _of_kind(raw: JsonObject, parts: JsonObject, kind: str, rules: RopeRules) -> Rope:
    plain = {key: value for key, value in raw.values.items() if key not in _ROPE_KEYS}
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
        raise CheckpointError(
            f"{raw.where}: use_bidirectional_attention is not supported: such a model writes no "
            "text.",
            hint=OTHER_CHECKPOINT,
        )
    return LayerTraits(
        norms=Norms.AROUND,
        from_one=True,
        gate=Gate.GELU,
        attention_scale=raw.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_cap=_cap(raw, "attn_logit_softcapping"),
        embedding_scale=math.sqrt(raw.integer("hidden_size")),
        logit_cap=_cap(raw, "final_logit_softcapping"),
    )


def gemma1_traits(raw: JsonObject) -> LayerTraits:
    return LayerTraits(
        from_one=True, gate=Gate.GELU, embedding_scale=math.sqrt(raw.integer("hidden_size"))
    )


def _cap(raw: JsonObject, key: str) -> float:
    return raw.number(key) if raw.has(key) else 0.0


def cohere_traits(raw: JsonObject) -> LayerTraits:
    if raw.flag("use_qk_norm", default=False):
        raise CheckpointError(f"{raw.where}: use_qk_norm is not supported.", hint=OTHER_CHECKPOINT)
    return LayerTraits(
        norms=Norms.PARALLEL,
        centred=True,
        interleaved=True,
        logit_scale=raw.number("logit_scale", 0.0625),
    )


def stablelm_traits(raw: JsonObject) -> LayerTraits:
    for key in ("use_parallel_residual", "qk_layernorm"):
        if raw.flag(key, default=False):
            raise CheckpointError(
                f"{raw.where}: {key} is not supported for model_type 'stablelm'.",
                hint=OTHER_CHECKPOINT,
            )
    return LayerTraits(centred=True, norm_bias=True)


def granite_traits(raw: JsonObject) -> LayerTraits:
    return LayerTraits(
        attention_scale=raw.number("attention_multiplier", 1.0),
        embedding_scale=raw.number("embedding_multiplier", 1.0),
        residual_scale=raw.number("residual_multiplier", 1.0),
        logit_scale=1.0 / raw.number("logits_scaling", 1.0),
    )


def gated_traits(raw: JsonObject) -> LayerTraits:
    if raw.flag("attention_bias", default=False):
        raise CheckpointError(
            f"{raw.where}: attention_bias is not supported for model_type "
            f"{raw.text('model_type')!r}.",
            hint=OTHER_CHECKPOINT,
        )
    return GATED_LAYERS


Mixture = Callable[[JsonObject], Experts | None]


def qwen_experts(raw: JsonObject) -> Experts | None:
    if not _count(raw, least=0):
        return None
    return Experts(
        num_experts=_count(raw),
        num_chosen=raw.integer("num_experts_per_tok"),
        ffn_size=raw.integer("moe_intermediate_size"),
        shared_ffn_size=raw.integer("shared_expert_intermediate_size", 0, least=0),
        normalise=raw.flag("norm_topk_prob", default=False),
    )


def _count(raw: JsonObject, *, least: int = 1) -> int:
    """Number of experts, under its newer key or its older one."""
    key = "num_local_experts" if raw.has("num_local_experts") else "num_experts"
    return raw.integer(key, least=least)


def mixtral_experts(raw: JsonObject) -> Experts:
    return Experts(
        num_experts=_count(raw),
        num_chosen=raw.integer("num_experts_per_tok"),
        ffn_size=raw.integer("intermediate_size"),
        names=ExpertNames.MIXTRAL,
    )


def olmoe_experts(raw: JsonObject) -> Experts:
    return Experts(
        num_experts=_count(raw),
        num_chosen=raw.integer("num_experts_per_tok"),
        ffn_size=raw.integer("intermediate_size"),
        normalise=raw.flag("norm_topk_prob", default=False),
    )


def granite_experts(raw: JsonObject) -> Experts | None:
    if not _count(raw, least=0):
        return None
    return replace(
        olmoe_experts(raw),
        normalise=True,
        shared_ffn_size=raw.integer("shared_intermediate_size", 0, least=0),
        gates_shared=False,
        names=ExpertNames.GRANITE,
    )


def deepseek_experts(raw: JsonObject) -> Experts:
    """A mixture with the keys of DeepSeek's."""
    num_groups = raw.integer("n_group", 1)
    ffn_size = raw.integer("moe_intermediate_size")
    return Experts(
        num_experts=raw.integer("n_routed_experts"),
        num_chosen=raw.integer("num_experts_per_tok"),
        ffn_size=ffn_size,
        shared_ffn_size=raw.integer(
            "shared_expert_intermediate_size",
            raw.integer("n_shared_experts", 0, least=0) * ffn_size,
            least=0,
        ),
        normalise=raw.flag("norm_topk_prob", default=True),
        gates_shared=False,
        has_sigmoids=raw.text("scoring_func", "sigmoid") == "sigmoid",
        has_choice_bias=raw.flag("has_choice_bias", default=True),
        scale=raw.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        top_groups=raw.integer("topk_group", num_groups),
        names=ExpertNames.DEEPSEEK,
    )


def ernie_experts(raw: JsonObject) -> Experts:
    """Ernie's mixture: its own keys, or those of GGUF files, which are DeepSeek's."""
    if raw.has("n_routed_experts"):
        return deepseek_experts(raw)
    own = {
        "n_routed_experts": raw.integer("moe_num_experts"),
        "num_experts_per_tok": raw.integer("moe_k"),
        "n_shared_experts": raw.integer("moe_num_shared_experts", 0, least=0),
        "scoring_func": "softmax",
    }
    return deepseek_experts(JsonObject(raw.where, {**raw.values, **own}))


def minimax_experts(raw: JsonObject) -> Experts:
    """MiniMax's mixture: its own keys, or those of GGUF files, which are DeepSeek's."""
    if raw.has("n_routed_experts"):
        return deepseek_experts(raw)
    return replace(
        mixtral_experts(raw), has_sigmoids=True, has_choice_bias=True, names=ExpertNames.MIXTRAL
    )


def gpt_oss_experts(raw: JsonObject) -> Experts:
    return replace(
        mixtral_experts(raw),
        biased=True,
        gate=Gate.CLAMPED,
        alpha=raw.number("swiglu_alpha", 1.702),
        limit=raw.number("swiglu_limit", 7.0),
        names=ExpertNames.GPT_OSS,
    )


def ministral3_reach(raw: JsonObject) -> tuple[int, str] | None:
    """The number of tokens up to which queries are not scaled, and the reason: Ministral 3 scales
    queries by position, in steps of its original window."""
    rope = raw.child("rope_parameters")
    if rope is None or not rope.has("llama_4_scaling_beta"):
        return None
    original = rope.integer("original_max_position_embeddings")
    return original, "queries that grow with the position are not supported"
