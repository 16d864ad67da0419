"""Settings of latent attention (MLA) in a `config.json`: sizes, traits, positions and mixtures.

The families of DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437) and those that follow them.
No tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from outrider.core.errors import CheckpointError
from outrider.core.spec import LatentShape
from outrider.models.expert_kinds import Experts, deepseek_experts
from outrider.models.json_object import CONTRADICTION, JsonObject
from outrider.models.layer_kinds import LayerTraits, one_rope
from outrider.models.rope_config import Rope, RopeRules

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
            raise CheckpointError(
                f"{raw.where}: {key} must be even, got {value}.", hint=CONTRADICTION
            )
    return shape


def latent_traits(raw: JsonObject) -> LayerTraits:
    """Scores are scaled by the size of a whole key, not of a row of the cache."""
    size = raw.integer("qk_nope_head_dim") + raw.integer("qk_rope_head_dim")
    return LayerTraits(attention_scale=size**-0.5)


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
