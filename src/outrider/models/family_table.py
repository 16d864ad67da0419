"""The families of our decoders, with a row for each: the meaning of its config.json. Modules
`families` of plugins have further rows.

A row has the defaults of absent keys, the keys that are never read, and how the layers differ
(layer_kinds.py). Defaults are those of transformers. No tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.models import expert_kinds, gemma_kinds, latent_kinds
from outrider.models import layer_kinds as kinds
from outrider.models.centred_table import CENTRED_TABLE
from outrider.models.configs import Family
from outrider.models.rope_config import (
    MROPE,
    PARTIAL_ROPE,
    PHI3_ROPE,
)


def _gemma_model() -> type[Any]:
    from outrider.models.gemma4 import GemmaModel

    return GemmaModel


_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_NO_MLP_BIAS = {"mlp_bias": False}
_QKV_BIAS_ALONE = {"mlp_bias": False, "attention_out_bias": False}
_TIED = {"tie_word_embeddings": True}
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_QWEN3 = {**_QWEN, "head_dim": 128}
_GELU = ("gelu_pytorch_tanh", "gelu_new")
_AFTER = kinds.always(kinds.LayerTraits(norms=kinds.Norms.AFTER))
_OLMO = Family(
    {"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    _NO_MLP_BIAS,
    traits=kinds.always(kinds.LayerTraits(norms=kinds.Norms.AFTER, whole_heads=True)),
    qk_norm=True,
)
_GEMMA2 = Family(
    {
        **_TIED,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "eos_token_id": 1,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    _NO_MLP_BIAS,
    kinds.all_but_every(2),
    ropes=kinds.named_or_one,
    traits=kinds.gemma_traits,
    activation_key="hidden_activation",
    activations=_GELU,
)
_QWEN3_MOE = Family(
    {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    _NO_MLP_BIAS,
    kinds.by_switch,
    experts=expert_kinds.qwen_experts,
    qk_norm=True,
)
_ROUTED = {"moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6}
_DEEPSEEK = Family(_ROUTED, _NO_MLP_BIAS, experts=expert_kinds.deepseek_experts)
_GRANITE_MOE = Family(
    {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 32},
    traits=kinds.granite_traits,
    experts=expert_kinds.granite_experts,
)
_GRANITE_SWA_DEFAULTS = {"sliding_window": 128, "rms_norm_eps": 1e-5}
_GRANITE_SWA = Family(
    {**_GRANITE_SWA_DEFAULTS, **_TIED, "num_key_value_heads": 4},
    windows=kinds.granite_swa_windows,
    ropes=kinds.by_theta,
    traits=kinds.granite_swa_traits,
)
_HUNYUAN = Family(
    {"rms_norm_eps": 1e-5},
    _NO_MLP_BIAS,
    ropes=kinds.hunyuan_rope,
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
_GEMMA4 = Family(
    {
        **_TIED,
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "eos_token_id": 1,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
    },
    _NO_MLP_BIAS,
    gemma_kinds.gemma4_windows,
    ropes=gemma_kinds.gemma4_ropes,
    traits=gemma_kinds.gemma4_traits,
    experts=expert_kinds.gemma4_experts,
    activation_key="hidden_activation",
    activations=_GELU,
    qk_norm=True,
    config=gemma_kinds.gemma4_config,
    decoder=_gemma_model,
)
FAMILY_TABLE: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(
        {"num_key_value_heads": 8, "sliding_window": 4096}, _NO_BIAS, kinds.in_all_layers
    ),
    "ministral": Family(
        {"num_key_value_heads": 8, "sliding_window": 4096},
        _NO_BIAS,
        lambda raw, num_layers: kinds.by_kinds(
            raw, num_layers, lambda _: raw.has("sliding_window")
        ),
    ),
    "ministral3": Family(
        {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        _NO_BIAS,
        kinds.in_all_layers,
        traits=kinds.growing_traits,
        reach=kinds.query_reach,
    ),
    "qwen2": Family(_QWEN, _NO_BIAS, kinds.qwen_windows, qkv_bias=True),
    "qwen3": Family(_QWEN3, _NO_MLP_BIAS, kinds.qwen_windows, qk_norm=True),
    "phi3": Family(
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "eos_token_id": 32000},
        _NO_BIAS,
        kinds.in_all_layers,
        PHI3_ROPE,
        fused_tensors=True,
    ),
    "qwen2_moe": Family(
        {
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
        },
        _NO_BIAS,
        kinds.qwen2_moe_windows,
        experts=expert_kinds.qwen_experts,
        qkv_bias=True,
    ),
    "qwen3_moe": _QWEN3_MOE,
    "mixtral": Family(
        {
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        _NO_BIAS,
        kinds.in_all_layers,
        experts=expert_kinds.mixtral_experts,
    ),
    "gpt_oss": Family(
        {
            "attention_bias": True,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
        },
        _NO_MLP_BIAS,
        kinds.all_but_every(2),
        ropes=kinds.gpt_oss_rope,
        traits=kinds.always(kinds.LayerTraits(sinks=True)),
        experts=expert_kinds.gpt_oss_experts,
    ),
    "gemma": Family(
        {**_TIED, "num_key_value_heads": 16, "head_dim": 256, "eos_token_id": 1},
        _NO_MLP_BIAS,
        traits=kinds.gemma1_traits,
        # The first files say gelu and mean the approximation.
        activations=(*_GELU, "gelu"),
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        defaults={
            **_TIED,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "eos_token_id": 1,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
        # Only Gemma 2 caps the scores of attention.
        fixed={**_NO_MLP_BIAS, "attn_logit_softcapping": None},
        windows=kinds.all_but_every(6),
        ropes=kinds.by_kind("rope_local_base_freq", 10000.0),
        qk_norm=True,
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(
        _GEMMA4,
        defaults={**_GEMMA4.defaults, "max_position_embeddings": 262144, "sliding_window": 1024},
        fixed={**_NO_MLP_BIAS, "hidden_size_per_layer_input": 0, "enable_moe_block": False},
    ),
    "smollm3": Family(
        {**_TIED, "num_key_value_heads": 4, "rope_theta": 2e6, "eos_token_id": 128001},
        windows=kinds.smollm3_windows,
        ropes=kinds.where_listed,
    ),
    "olmo2": replace(_OLMO, defaults={**_OLMO.defaults, "rope_theta": 10000.0}),
    "olmo3": replace(
        _OLMO,
        defaults={**_OLMO.defaults, "rope_theta": 500000.0, "sliding_window": 4096},
        windows=kinds.all_but_every(4),
        ropes=kinds.by_kind("rope_theta", 500000.0),
    ),
    "exaone4": Family(
        {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "eos_token_id": 2},
        _NO_BIAS,
        kinds.all_but_every(4),
        ropes=kinds.exaone_ropes,
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
        _NO_MLP_BIAS,
        traits=kinds.always(kinds.LayerTraits(whole_heads=True)),
        experts=expert_kinds.olmoe_experts,
        qk_norm=True,
    ),
    "granite": Family(traits=kinds.granite_traits),
    "granite_swa": _GRANITE_SWA,
    "granitemoe_swa": replace(
        _GRANITE_SWA,
        defaults={**_GRANITE_SWA_DEFAULTS, **_GRANITE_MOE.defaults, "rms_norm_eps": 1e-6},
        experts=expert_kinds.granite_swa_experts,
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
        _NO_MLP_BIAS,
        kinds.muse_windows,
        ropes=kinds.muse_rope,
        traits=kinds.muse_traits,
        activation_key="hidden_activation",
        qk_norm=True,
    ),
    "apertus": Family(
        {"rms_norm_eps": 1e-5, "rope_theta": 12e6},
        _NO_MLP_BIAS,
        ropes=kinds.apertus_rope,
        traits=kinds.apertus_traits,
        activations=("xielu",),
        qk_norm=True,
        names={
            "input_layernorm.": "attention_layernorm.",
            "post_attention_layernorm.": "feedforward_layernorm.",
        },
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_vl_text": replace(_HUNYUAN, defaults={**_HUNYUAN.defaults, **_TIED}),
    # Of GGUF files: transformers has no such family.
    "maincoder": replace(
        _HUNYUAN, traits=kinds.always(kinds.LayerTraits(turns_first=True, interleaved=True))
    ),
    "hunyuan_v1_moe": replace(_HUNYUAN, experts=expert_kinds.hunyuan_experts),
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
        _NO_BIAS,
        kinds.all_but_every(4),
        ropes=kinds.exaone_ropes,
        experts=expert_kinds.deepseek_experts,
        derived=expert_kinds.routed_settings,
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
        _NO_MLP_BIAS,
        kinds.all_but_every(4),
        ropes=kinds.where_sliding,
        traits=kinds.afmoe_traits,
        experts=expert_kinds.deepseek_experts,
        derived=expert_kinds.routed_settings,
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
        derived=expert_kinds.routed_settings,
        qk_norm=True,
        names={
            "mlp.gate.weight": "mlp.router.gate.weight",
            "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
            "mlp.shared_experts.": "mlp.shared_mlp.",
        },
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "seed_oss": Family(
        {
            "attention_bias": True,
            "attention_out_bias": False,
            "head_dim": 128,
            "num_key_value_heads": 8,
        }
    ),
    # Of GGUF files: transformers has no such family.
    "qwen": Family(fixed=_NO_BIAS, qkv_bias=True, fused_tensors=True),
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
            **_TIED,
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
            **_TIED,
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
            **_TIED,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "num_key_value_heads": 4,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1,
        },
        traits=kinds.always(kinds.LayerTraits(interleaved=True)),
        experts=expert_kinds.ernie_experts,
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
        windows=kinds.dots_windows,
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
        ropes=kinds.minimax_rope,
        experts=expert_kinds.minimax_experts,
        traits=kinds.always(kinds.LayerTraits(whole_heads=True)),
        rope=PARTIAL_ROPE,
        qk_norm=True,
    ),
    "mellum": replace(
        _QWEN3_MOE,
        windows=kinds.all_but_every(4),
        ropes=kinds.named_or_one,
    ),
    "qwen2_5_vl_text": Family(
        {**_QWEN, "max_window_layers": 80, "num_key_value_heads": 8, "rope_theta": 1e6},
        _NO_BIAS,
        kinds.qwen_windows,
        MROPE,
        qkv_bias=True,
    ),
    "qwen3_vl_text": Family(
        {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0},
        _NO_MLP_BIAS,
        rope=MROPE,
        qk_norm=True,
    ),
    "qwen3_vl_moe_text": replace(_QWEN3_MOE, rope=MROPE, windows=kinds.whole),
    **latent_kinds.LATENT_TABLE,
    **CENTRED_TABLE,
}
# Models that also see, by the family of the text model within; their keys are in `text_config`.
WRAPPERS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "hunyuan_vl": "hunyuan_vl_text",
    "mistral3": "mistral",
    "muse_glimmer": "muse_glimmer_text",
    "paddleocr_vl": "paddleocr_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
