"""Settings of latent attention (MLA) in a `config.json`: sizes, traits, positions and mixtures.

The families of DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437) and those that follow them.
No tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from outrider.core.spec import LatentShape
from outrider.models.configs import Family
from outrider.models.expert_kinds import Experts, deepseek_experts
from outrider.models.json_object import JsonObject, contradictory
from outrider.models.layer_kinds import LayerTraits, one_rope, query_growth, query_reach
from outrider.models.rope_config import LATENT_ROPE, Rope, RopeRules

# The norms of both latents, whose epsilon no config.json has.
_NORM_EPS = 1e-6


def latent_shape(raw: JsonObject) -> LatentShape:
    """The sizes of attention. Raises CheckpointError, naming the key, for an odd one."""
    shape = LatentShape(
        num_heads=raw.integer("num_attention_heads"),
        rank=raw.integer("kv_lora_rank"),
        turning=raw.integer("qk_rope_head_dim"),
        still=raw.integer("qk_nope_head_dim"),
        value_dim=raw.integer("v_head_dim"),
        query_rank=raw.integer("q_lora_rank", 0, least=0),
        eps=raw.number("latent_norm_eps", _NORM_EPS),
        interleaved=raw.flag("rope_interleave", default=True),
    )
    for key, value in (("kv_lora_rank", shape.rank), ("qk_rope_head_dim", shape.turning)):
        if value % 2:
            raise contradictory(raw.where, f"{key} must be even, got {value}")
    return shape


def latent_traits(raw: JsonObject) -> LayerTraits:
    """Scores are scaled by the size of a whole key, not of a row of the cache."""
    size = raw.integer("qk_nope_head_dim") + raw.integer("qk_rope_head_dim")
    return LayerTraits(attention_scale=size**-0.5, query_growth=query_growth(raw))


def latent_rope(raw: JsonObject, rules: RopeRules, windows: Sequence[int]) -> Sequence[Rope | None]:
    """Positions of which a part of each row of the cache turns: the key that all heads share."""
    shape = latent_shape(raw)
    # Half a number more, so that a rounded share never gives one less.
    share = (shape.turning + 0.5) / shape.row_size
    ropes = one_rope(raw, rules, windows)
    return [None if one is None else replace(one, partial_rotary_factor=share) for one in ropes]


def mistral4_settings(raw: JsonObject) -> Mapping[str, object]:
    """Positions of Mistral 4, which are stretched even if the file has no scaling. The share of a
    key that turns follows from its sizes."""
    part = raw.child("rope_parameters")
    if part is None and raw.has("rope_scaling"):
        return {}
    usual = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    values = dict(usual if part is None else part.values)
    values.pop("partial_rotary_factor", None)
    return {"rope_parameters": values}


def no_experts(raw: JsonObject) -> None:
    """A dense model's mixture: none."""
    del raw


def v2_experts(raw: JsonObject) -> Experts:
    """DeepSeek-V2's mixture, whose experts come from the best groups only by `topk_method`; a group
    is as good as its best expert."""
    if raw.text("topk_method", "greedy") == "greedy":
        raw = JsonObject(raw.where, {**raw.values, "n_group": 1, "topk_group": 1})
    return replace(deepseek_experts(raw), group_best=1)


_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_DEEPSEEK_V3 = Family(
    {
        **_LATENT,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "eos_token_id": 1,
    },
    {"mlp_bias": False},
    rope=LATENT_ROPE,
    ropes=latent_rope,
    traits=latent_traits,
    experts=deepseek_experts,
    latent=latent_shape,
    reach=query_reach,
)
LATENT_TABLE: Mapping[str, Family] = {
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        defaults={
            **_LATENT,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1407,
            "scoring_func": "softmax",
            "norm_topk_prob": False,
        },
        # The heads of all its files turn neighbours.
        fixed={"mlp_bias": False, "rope_interleave": True, "has_choice_bias": False},
        experts=v2_experts,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    # Kimi K2's name for a DeepSeek V3.
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3,
        defaults={
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_shared_experts": 1,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 1,
        },
    ),
    "mistral4": replace(
        _DEEPSEEK_V3,
        defaults={
            **_LATENT,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 0,
        },
        fixed={"mlp_bias": False, "has_choice_bias": False, "scoring_func": "softmax"},
        derived=mistral4_settings,
    ),
    "youtu": replace(
        _DEEPSEEK_V3,
        defaults={**_LATENT, "tie_word_embeddings": True, "eos_token_id": 128001},
        experts=no_experts,
    ),
}
