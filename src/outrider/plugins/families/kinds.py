"""Readers of layers and mixtures that only families of this folder have.

Defaults of absent keys of a `config.json` are those of transformers. No tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from outrider.models.expert_kinds import (
    ExpertNames,
    Experts,
    deepseek_experts,
    granite_experts,
    mixtral_experts,
    renamed,
)
from outrider.models.json_object import JsonObject, contradictory, unsupported
from outrider.models.layer_kinds import (
    ROPE_KEYS,
    Gate,
    LayerTraits,
    Norms,
    by_kinds,
    capped,
    granite_traits,
    one_rope,
    stretched_by,
)
from outrider.models.rope_config import Rope, RopeRules, parse_rope


def dots_windows(raw: JsonObject, num_layers: int) -> Sequence[int]:
    """Windows of dots.llm1: without `layer_types`, layers from `max_window_layers` on slide."""
    first = raw.integer("max_window_layers", least=0)
    return by_kinds(raw, num_layers, lambda index: raw.has("sliding_window") and index >= first)


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


def hunyuan_rope(
    raw: JsonObject, rules: RopeRules, windows: Sequence[int]
) -> Sequence[Rope | None]:
    """One rope; an `alpha` makes its base larger, which files call dynamic scaling."""
    key = next((key for key in ROPE_KEYS if raw.has(key)), ROPE_KEYS[0])
    part = raw.child(key)
    if part is None or not part.has("alpha"):
        return one_rope(raw, rules, windows)
    dim = raw.integer("head_dim", raw.integer("hidden_size") // raw.integer("num_attention_heads"))
    theta = part.number("rope_theta", raw.number("rope_theta", 10000.0))
    theta *= part.number("alpha") ** (dim / max(1, dim - 2))
    return [Rope(theta=theta)] * len(windows)


def by_theta(raw: JsonObject, rules: RopeRules, windows: Sequence[int]) -> Sequence[Rope | None]:
    """Rotary positions with a base for each layer; a base of 0 means none."""
    rope = parse_rope(raw, rules)
    if not raw.has("layer_rope_theta"):
        return [rope] * len(windows)
    bases = raw.numbers("layer_rope_theta", signed=True)
    if len(bases) != len(windows) or not all(base == 0 or base > 1 for base in bases):
        raise contradictory(
            raw.where,
            f"layer_rope_theta must have a base above 1, or 0, for each of {len(windows)} layers",
        )
    return [replace(rope, theta=base) if base else None for base in bases]


def cohere_traits(raw: JsonObject) -> LayerTraits:
    if raw.flag("use_qk_norm", default=False):
        raise unsupported(raw.where, "use_qk_norm is not supported")
    return LayerTraits(
        norms=Norms.PARALLEL,
        centred=True,
        interleaved=True,
        logit_scale=raw.number("logit_scale", 0.0625),
    )


apertus_rope = stretched_by(
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)


def _from_last(index: int, num_layers: int) -> bool:
    """True for every fourth layer, counted from the last one back."""
    return (num_layers - 1 - index) % 4 == 0


def muse_windows(raw: JsonObject, num_layers: int) -> Sequence[int]:
    return by_kinds(raw, num_layers, lambda index: not _from_last(index, num_layers))


def muse_rope(raw: JsonObject, rules: RopeRules, windows: Sequence[int]) -> Sequence[Rope | None]:
    """One rope for the layers whose base is not 0."""
    rope, num = parse_rope(raw, rules), len(windows)
    key = "layer_rope_theta"
    bases = raw.numbers(key, signed=True) if raw.has(key) else ()
    turns = [base != 0 for base in bases] or [not _from_last(index, num) for index in range(num)]
    if len(turns) != num:
        raise contradictory(raw.where, f"{key} has {len(turns)} entries for {num} layers")
    return [rope if turn else None for turn in turns]


def muse_traits(raw: JsonObject) -> LayerTraits:
    """Traits of Muse Glimmer; GGUF files have the weights of all norms as they are."""
    return LayerTraits(
        norms=Norms.AROUND,
        from_one=raw.flag("norms_from_one", default=True),
        from_zero_last=True,
        bare_heads=raw.number("qk_scale_factor", 3.87),
        gate_apart=True,
        interleaved=raw.flag("interleaved", default=False),
        after_eps=raw.number("post_norm_eps", 1e-8),
        normed_embedding=True,
        logit_scale=raw.number("output_multiplier", 0.19611613513818404),
        logit_cap=capped(raw, "final_logit_softcapping"),
    )


def afmoe_traits(raw: JsonObject) -> LayerTraits:
    is_scaled = raw.flag("mup_enabled", default=False)
    scale = math.sqrt(raw.integer("hidden_size")) if is_scaled else 1.0
    return LayerTraits(norms=Norms.AROUND, gate_apart=True, embedding_scale=scale)


def granite_swa_windows(raw: JsonObject, num_layers: int) -> Sequence[int]:
    """Windows of Granite's sliding models: without `layer_types`, every fourth layer from the first
    on sees the whole text."""
    return by_kinds(raw, num_layers, lambda index: index % 4 > 0)


def granite_swa_traits(raw: JsonObject) -> LayerTraits:
    return replace(granite_traits(raw), sinks=True)


def apertus_traits(raw: JsonObject) -> LayerTraits:
    """Traits of Apertus; GGUF files have the numbers of xIELU as settings."""
    keys = [f"xielu_{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")]
    if not raw.has(keys[0]):
        return LayerTraits(gate=Gate.XIELU)
    listed = [raw.numbers(key, signed=True) for key in keys]
    if {len(one) for one in listed} != {raw.integer("num_hidden_layers")}:
        raise contradictory(
            raw.where, f"{keys[0]} and others do not have one number for each layer"
        )
    return LayerTraits(gate=Gate.XIELU, curves=tuple(zip(*listed, strict=True)))


def granite_swa_experts(raw: JsonObject) -> Experts | None:
    """Granite's mixture, in the layout of Qwen's."""
    found = granite_experts(raw)
    return None if found is None else replace(found, names=ExpertNames.QWEN)


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


def hunyuan_experts(raw: JsonObject) -> Experts:
    """Hunyuan's mixture. Lists with a number for each layer must have one number only."""
    size = raw.integer("intermediate_size")
    return Experts(
        num_experts=_of_all_layers(raw, "num_local_experts", "num_experts"),
        num_chosen=_of_all_layers(raw, "num_experts_per_tok", "moe_topk"),
        ffn_size=size,
        shared_ffn_size=raw.integer("shared_expert_intermediate_size", size),
        gates_shared=False,
        names=ExpertNames.DEEPSEEK,
    )


def _of_all_layers(raw: JsonObject, usual: str, own: str) -> int:
    """The number under its usual key or the family's own."""
    key = usual if raw.has(usual) else own
    if not isinstance(raw.values.get(key), list):
        return raw.integer(key, 1)
    listed = raw.integers(key)
    if len(set(listed)) != 1:
        raise unsupported(
            raw.where, f"{key} has no one number for all layers, which is not supported"
        )
    return listed[0]


def routed_settings(raw: JsonObject) -> Mapping[str, object]:
    """DeepSeek's keys of a mixture from those of EXAONE, Hy3 and AFMoE, and AFMoE's of windows."""
    own = {
        "num_dense_layers": "first_k_dense_replace",
        "route_scale": "routed_scaling_factor",
        "global_attn_every_n_layers": "sliding_window_pattern",
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    }
    return renamed(raw, own)
