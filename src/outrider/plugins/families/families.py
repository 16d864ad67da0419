"""Rows of further families, as models/family_table.py has those of the core.

Families with layer norms are in centred.py, those with latent attention in latent.py. No tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from outrider.models import expert_kinds
from outrider.models import layer_kinds as kinds
from outrider.models.configs import Family
from outrider.models.family_table import GRANITE_MOE, NO_BIAS, NO_MLP_BIAS, QWEN, QWEN3_MOE, TIED
from outrider.models.rope_config import MROPE, PARTIAL_ROPE
from outrider.plugins.families import kinds as own
from outrider.plugins.families.centred import CENTRED_TABLE
from outrider.plugins.families.latent import LATENT_TABLE

_QKV_BIAS_ALONE = {"mlp_bias": False, "attention_out_bias": False}


_AFTER = kinds.always(kinds.LayerTraits(norms=kinds.Norms.AFTER))


_OLMO = Family(
    {"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    NO_MLP_BIAS,
    traits=kinds.always(kinds.LayerTraits(norms=kinds.Norms.AFTER, whole_heads=True)),
    qk_norm=True,
)


_ROUTED = {"moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6}


_DEEPSEEK = Family(_ROUTED, NO_MLP_BIAS, experts=expert_kinds.deepseek_experts)


_GRANITE_SWA_DEFAULTS = {"sliding_window": 128, "rms_norm_eps": 1e-5}


_GRANITE_SWA = Family(
    {**_GRANITE_SWA_DEFAULTS, **TIED, "num_key_value_heads": 4},
    windows=own.granite_swa_windows,
    ropes=own.by_theta,
    traits=own.granite_swa_traits,
)


_HUNYUAN = Family(
    {"rms_norm_eps": 1e-5},
    NO_MLP_BIAS,
    ropes=own.hunyuan_rope,
    traits=kinds.always(kinds.LayerTraits(turns_first=True)),
    qk_norm=True,
    names={
        "self_attn.q_norm.": "self_attn.query_layernorm.",
        "self_attn.k_norm.": "self_attn.key_layernorm.",
        "mlp.gate.": "mlp.gate.wg.",
        "mlp.shared_experts.": "mlp.shared_mlp.",
    },
)


_GLM4 = Family(
    {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
    },
    _QKV_BIAS_ALONE,
    rope=PARTIAL_ROPE,
    traits=kinds.always(kinds.LayerTraits(norms=kinds.Norms.AROUND, interleaved=True)),
    fused_tensors=True,
)


FAMILIES: Mapping[str, Family] = {
    "olmo2": replace(_OLMO, defaults={**_OLMO.defaults, "rope_theta": 10000.0}),
    "olmo3": replace(
        _OLMO,
        defaults={**_OLMO.defaults, "rope_theta": 500000.0, "sliding_window": 4096},
        windows=kinds.all_but_every(4),
        ropes=kinds.by_kind("rope_theta", 500000.0),
    ),
    "exaone4": Family(
        {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "eos_token_id": 2},
        NO_BIAS,
        kinds.all_but_every(4),
        ropes=own.exaone_ropes,
        traits=_AFTER,
        qk_norm=True,
    ),
    "olmoe": Family(
        {
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 16,
        },
        NO_MLP_BIAS,
        traits=kinds.always(kinds.LayerTraits(whole_heads=True)),
        experts=expert_kinds.olmoe_experts,
        qk_norm=True,
    ),
    "granite_swa": _GRANITE_SWA,
    "granitemoe_swa": replace(
        _GRANITE_SWA,
        defaults={**_GRANITE_SWA_DEFAULTS, **GRANITE_MOE.defaults, "rms_norm_eps": 1e-6},
        experts=own.granite_swa_experts,
        names={
            "mlp.gate.": "block_sparse_moe.router.",
            "mlp.experts.": "block_sparse_moe.experts.",
        },
    ),
    "muse_glimmer_text": Family(
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 2048,
            "final_logit_softcapping": 20.0,
            "eos_token_id": 200001,
        },
        NO_MLP_BIAS,
        own.muse_windows,
        ropes=own.muse_rope,
        traits=own.muse_traits,
        activation_key="hidden_activation",
        qk_norm=True,
    ),
    "apertus": Family(
        {"rms_norm_eps": 1e-5, "rope_theta": 12e6},
        NO_MLP_BIAS,
        ropes=own.apertus_rope,
        traits=own.apertus_traits,
        activations=("xielu",),
        qk_norm=True,
        names={
            "input_layernorm.": "attention_layernorm.",
            "post_attention_layernorm.": "feedforward_layernorm.",
        },
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_vl_text": replace(_HUNYUAN, defaults={**_HUNYUAN.defaults, **TIED}),
    # Of GGUF files: transformers has no such family.
    "maincoder": replace(
        _HUNYUAN, traits=kinds.always(kinds.LayerTraits(turns_first=True, interleaved=True))
    ),
    "hunyuan_v1_moe": replace(_HUNYUAN, experts=own.hunyuan_experts),
    "exaone_moe": Family(
        {
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "eos_token_id": 53,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
        },
        NO_BIAS,
        kinds.all_but_every(4),
        ropes=own.exaone_ropes,
        experts=expert_kinds.deepseek_experts,
        derived=own.routed_settings,
        qk_norm=True,
    ),
    "afmoe": Family(
        {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "moe_intermediate_size": 1408,
            "num_dense_layers": 1,
        },
        NO_MLP_BIAS,
        kinds.all_but_every(4),
        ropes=own.where_sliding,
        traits=own.afmoe_traits,
        experts=expert_kinds.deepseek_experts,
        derived=own.routed_settings,
        qk_norm=True,
        names={
            "pre_feedforward_layernorm.": "pre_mlp_layernorm.",
            "post_feedforward_layernorm.": "post_mlp_layernorm.",
            "mlp.gate.weight": "mlp.router.gate.weight",
            "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        },
    ),
    # Of GGUF files: transformers has no such family.
    "bailing_moe_v2": replace(_DEEPSEEK, rope=PARTIAL_ROPE, qk_norm=True, fused_tensors=True),
    "hy_v3": Family(
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
            "first_k_dense_replace": 1,
        },
        experts=expert_kinds.deepseek_experts,
        derived=own.routed_settings,
        qk_norm=True,
        names={
            "mlp.gate.weight": "mlp.router.gate.weight",
            "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
            "mlp.shared_experts.": "mlp.shared_mlp.",
        },
    ),
    "seed_oss": Family(
        {
            "attention_bias": True,
            "attention_out_bias": False,
            "head_dim": 128,
            "num_key_value_heads": 8,
        }
    ),
    # Of GGUF files: transformers has no such family.
    "qwen": Family(fixed=NO_BIAS, qkv_bias=True, fused_tensors=True),
    "plamo": Family(traits=kinds.always(kinds.LayerTraits(norms=kinds.Norms.PARALLEL))),
    "deepseek": _DEEPSEEK,
    "arcee": Family(
        {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "head_dim": 80},
        traits=kinds.always(kinds.LayerTraits(gate=kinds.Gate.SQUARED)),
        activations=("relu2",),
    ),
    "glm4": _GLM4,
    "glm": replace(_GLM4, traits=kinds.always(kinds.LayerTraits(interleaved=True))),
    "paddleocr_vl_text": Family(
        {
            **TIED,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "head_dim": 128,
            "num_key_value_heads": 2,
        },
        rope=MROPE,
        bias_key="use_bias",
    ),
    "ernie4_5": Family(
        {
            **TIED,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "head_dim": 128,
            "num_key_value_heads": 2,
        },
        traits=kinds.always(kinds.LayerTraits(interleaved=True)),
        bias_key="use_bias",
    ),
    "ernie4_5_moe": Family(
        {
            **TIED,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "num_key_value_heads": 4,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1,
        },
        traits=kinds.always(kinds.LayerTraits(interleaved=True)),
        experts=own.ernie_experts,
        bias_key="use_bias",
    ),
    "dots1": replace(
        _DEEPSEEK,
        defaults={
            **_ROUTED,
            "num_key_value_heads": 32,
            "norm_topk_prob": False,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        windows=own.dots_windows,
        qk_norm=True,
    ),
    "glm4_moe": replace(
        _DEEPSEEK,
        defaults={
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
        },
        fixed=_QKV_BIAS_ALONE,
        rope=PARTIAL_ROPE,
        qk_norm_key="use_qk_norm",
    ),
    "minimax_m2": replace(
        _DEEPSEEK,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5e6,
        },
        ropes=own.minimax_rope,
        experts=own.minimax_experts,
        traits=kinds.always(kinds.LayerTraits(whole_heads=True)),
        rope=PARTIAL_ROPE,
        qk_norm=True,
    ),
    "mellum": replace(
        QWEN3_MOE,
        windows=kinds.all_but_every(4),
        ropes=kinds.named_or_one,
    ),
    "qwen2_5_vl_text": Family(
        {**QWEN, "max_window_layers": 80, "num_key_value_heads": 8, "rope_theta": 1e6},
        NO_BIAS,
        kinds.qwen_windows,
        MROPE,
        qkv_bias=True,
    ),
    "qwen3_vl_text": Family(
        {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0},
        NO_MLP_BIAS,
        rope=MROPE,
        qk_norm=True,
    ),
    "qwen3_vl_moe_text": replace(QWEN3_MOE, rope=MROPE, windows=kinds.whole),
    **LATENT_TABLE,
    **CENTRED_TABLE,
}
# Models that also see, by the family of the text model within; their keys are in `text_config`.
WRAPPERS: Mapping[str, str] = {
    "hunyuan_vl": "hunyuan_vl_text",
    "muse_glimmer": "muse_glimmer_text",
    "paddleocr_vl": "paddleocr_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
