"""Tiny random checkpoints of the families of models/family_table.py, written by transformers.

Windows are shorter than the texts of tests, and sizes no multiples of a vector register.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from doubles.hf_checkpoints import random_wrapper, write_hf

_SLIDING, _FULL = "sliding_attention", "full_attention"
_FOUR = {"num_hidden_layers": 4}
_MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 4.0,
}
_ROUTED = {
    "head_dim": 12,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
# Rows of the cache have 20 + 6 numbers, keys of a head 10 + 6, and values 14.
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
}
_LATENT_MIXTURE = {key: value for key, value in _ROUTED.items() if key != "head_dim"} | _LATENT
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
_GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 7, **_FOUR}
_GEMMA4 = {
    "head_dim": 12,
    "global_head_dim": 20,
    "num_hidden_layers": 6,
    "sliding_window": 7,
    "hidden_size_per_layer_input": 0,
    "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
}
_INPUTS = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96}
# By a name of the case, the family and what its config says beside the common settings.
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 7}),
    "ministral": (
        "ministral",
        {"head_dim": 12, "sliding_window": 9, "layer_types": [_FULL, _SLIDING]},
    ),
    "ministral3": (
        "ministral3",
        {"head_dim": 12, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    ),
    "qwen2_sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3_sliding": (
        "qwen3",
        {
            "head_dim": 12,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": [_SLIDING, _FULL],
        },
    ),
    "phi3_sliding": ("phi3", {"sliding_window": 11}),
    "qwen2_moe": ("qwen2_moe", {**_MIXTURE, "shared_expert_intermediate_size": 28}),
    "qwen2_moe_unusual": (
        "qwen2_moe",
        {
            **_MIXTURE,
            **_FOUR,
            "shared_expert_intermediate_size": 28,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 3,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**_MIXTURE, "head_dim": 12, "norm_topk_prob": True}),
    "qwen3_moe_unusual": (
        "qwen3_moe",
        {
            **_MIXTURE,
            "head_dim": 12,
            "mlp_only_layers": [0],
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
    "mixtral": ("mixtral", _LOCAL),
    "mixtral_sliding": ("mixtral", {**_LOCAL, "sliding_window": 6, "head_dim": 12}),
    "gpt_oss": ("gpt_oss", {**_LOCAL, **_FOUR, "head_dim": 12, "sliding_window": 6}),
    "gpt_oss_unusual": (
        "gpt_oss",
        {
            **_LOCAL,
            "head_dim": 12,
            "sliding_window": 6,
            "layer_types": [_FULL, _SLIDING],
            "swiglu_limit": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "gemma": ("gemma", {"head_dim": 12}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma2_unusual": (
        "gemma2",
        {
            **_GEMMA,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": None,
            "layer_types": [_FULL, _FULL, _SLIDING, _SLIDING],
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3_text": ("gemma3_text", {**_GEMMA, "sliding_window_pattern": 3}),
    # As GGUF files say it: queries are scaled by the size of a head.
    "gemma2_plain": ("gemma2", {**_GEMMA, "query_pre_attn_scalar": 12}),
    "gemma3_plain": (
        "gemma3_text",
        {**_GEMMA, "query_pre_attn_scalar": 12, "num_hidden_layers": 6},
    ),
    "gemma3_unusual": (
        "gemma3_text",
        {
            **_GEMMA,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 9000.0},
                _SLIDING: {"rope_type": "default", "rope_theta": 300.0},
            },
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
        },
    ),
    "gemma4": ("gemma4_text", {**_GEMMA4, "final_logit_softcapping": 3.0}),
    "gemma4_equal": (
        "gemma4_unified_text",
        {
            **{key: value for key, value in _GEMMA4.items() if "per_layer" not in key},
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
            "num_hidden_layers": 4,
            "rope_parameters": {
                _FULL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "factor": 4.0,
                    "rope_theta": 9000.0,
                },
                _SLIDING: {
                    "rope_type": "default",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 300.0,
                },
            },
        },
    ),
    "gemma4_shared": (
        "gemma4_text",
        {
            **_GEMMA4,
            **_INPUTS,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "num_key_value_heads": 1,
        },
    ),
    "gemma4_moe": (
        "gemma4_text",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
        },
    ),
    "smollm3": ("smollm3", _FOUR),
    "smollm3_unusual": (
        "smollm3",
        {
            **_FOUR,
            "no_rope_layers": [0, 1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {**_FOUR, "sliding_window": 6}),
    "olmo3_unusual": (
        "olmo3",
        {
            "sliding_window": 6,
            "layer_types": [_FULL, _SLIDING],
            "attention_bias": True,
            "rope_parameters": {
                _FULL: _YARN,
                _SLIDING: {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "cohere2": ("cohere2", {**_FOUR, "sliding_window": 6}),
    "cohere2_unusual": (
        "cohere2",
        {
            "sliding_window": 6,
            "layer_types": [_FULL, _SLIDING],
            "logit_scale": 0.75,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "exaone4": ("exaone4", {**_FOUR, "sliding_window": 6, "sliding_window_pattern": 4}),
    "exaone4_whole": ("exaone4", {"sliding_window": None, "layer_types": [_FULL, _FULL]}),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 4.0,
        },
    ),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "granitemoe": ("granitemoe", {**_LOCAL, **_GRANITE}),
    "granitemoeshared": (
        "granitemoeshared",
        {**_LOCAL, **_GRANITE, "shared_intermediate_size": 28},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 12, "attention_out_bias": True}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.4, "use_qkv_bias": True}),
    "arcee": ("arcee", {"mlp_bias": True}),
    "nemotron": (
        "nemotron",
        {"partial_rotary_factor": 0.4, "attention_bias": True, "mlp_bias": True},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 7}),
    "glm4": ("glm4", {"head_dim": 12, "attention_bias": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 12, "use_bias": True}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 20,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {**_LATENT_MIXTURE, "q_lora_rank": None, "n_shared_experts": 2, "norm_topk_prob": False},
    ),
    "deepseek_v2_unusual": (
        "deepseek_v2",
        {
            **_LATENT_MIXTURE,
            "n_routed_experts": 9,
            "n_group": 3,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "norm_topk_prob": False,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_LATENT_MIXTURE,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v3_unusual": (
        "deepseek_v3",
        {
            **_LATENT_MIXTURE,
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        },
    ),
    # As GGUF files say it: all norms have one epsilon.
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT_MIXTURE, "rms_norm_eps": 1e-6}),
    "glm4_moe_lite_unusual": (
        "glm4_moe_lite",
        {
            **_LATENT_MIXTURE,
            **_FOUR,
            "mlp_layer_types": ["sparse", "dense", "dense", "sparse"],
            "norm_topk_prob": False,
        },
    ),
    # transformers zeroes the embedding of padding, which no published file names.
    "youtu": ("youtu", {**_LATENT, "v_head_dim": 9, "pad_token_id": None}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 12, "attention_bias": True}),
    "hunyuan_alpha": (
        "hunyuan_v1_dense",
        {
            "head_dim": 12,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 1.0,
                "alpha": 50.0,
                "rope_theta": 700.0,
            },
        },
    ),
    "hunyuan_moe": ("hunyuan_v1_moe", {"num_experts": 6, "moe_topk": [2, 2], "head_dim": 12}),
    "apertus": ("apertus", {"rope_parameters": _PLAIN_ROPE}),
    "apertus_unusual": ("apertus", {"attention_bias": True, "tie_word_embeddings": True}),
    "exaone_moe": ("exaone_moe", {**_MIXTURE, **_FOUR, "head_dim": 12, "sliding_window": 6}),
    "exaone_moe_unusual": (
        "exaone_moe",
        {
            **_MIXTURE,
            "sliding_window": 6,
            "layer_types": [_FULL, _SLIDING],
            "mlp_layer_types": ["sparse", "dense"],
            "num_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
        },
    ),
    "afmoe": (
        "afmoe",
        {
            **_MIXTURE,
            **_FOUR,
            "head_dim": 12,
            "sliding_window": 6,
            "global_attn_every_n_layers": 3,
            "num_dense_layers": 2,
            "num_shared_experts": 1,
            "route_scale": 1.7,
            "mup_enabled": True,
        },
    ),
    "hy_v3": ("hy_v3", {**_MIXTURE, "head_dim": 12}),
    "hy_v3_unusual": (
        "hy_v3",
        {
            **_MIXTURE,
            "head_dim": 12,
            "mlp_layer_types": ["sparse", "dense"],
            "num_shared_experts": 2,
            "attention_bias": True,
            "router_scaling_factor": 0.7,
        },
    ),
    "granite_swa": (
        "granite_swa",
        {
            **_GRANITE,
            **_FOUR,
            "sliding_window": 6,
            "layer_rope_theta": [0, 700.0, 10000.0, 0],
        },
    ),
    "granite_swa_plain": ("granite_swa", {**_GRANITE, **_FOUR, "sliding_window": 6}),
    "granitemoe_swa": (
        "granitemoe_swa",
        {
            **_GRANITE,
            **_LOCAL,
            "sliding_window": 6,
            "shared_intermediate_size": 28,
            "layer_types": [_SLIDING, _FULL],
        },
    ),
    "glm": ("glm", {"head_dim": 12}),
    "glm_unusual": ("glm", {"head_dim": 12, "attention_bias": False, "partial_rotary_factor": 1.0}),
    "phi": ("phi", {"partial_rotary_factor": 0.4}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.6}),
    "gpt_neox_unusual": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "hidden_act": "gelu_new",
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "falcon": ("falcon", {}),
    "falcon_new": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 52, "bias": True},
    ),
    "falcon_one_norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon_unusual": (
        "falcon",
        {
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "activation": "gelu_new",
            "tie_word_embeddings": False,
        },
    ),
    "olmo": ("olmo", {"clip_qkv": 0.5}),
    "olmo_unusual": ("olmo", {"attention_bias": True, "tie_word_embeddings": True}),
    "jais2": ("jais2", {"head_dim": 12}),
    "dots1": ("dots1", _ROUTED),
    "glm4_moe": ("glm4_moe", {**_ROUTED, "use_qk_norm": True, "attention_bias": True}),
    "minimax_m2": ("minimax_m2", {**_LOCAL, "head_dim": 12, "rotary_dim": 6}),
}
_TEXT = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EYES = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
_DEPTH = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
_MROPE = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 5000.0}
_QWEN_EYES = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "out_hidden_size": 40,
}
# Models that also see: settings of the text model, then those of the part for pictures.
WRAPPERS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "gemma3": ({**_TEXT, "sliding_window": 7}, {**_EYES, **_DEPTH}),
    "gemma4": (
        {**_TEXT, **_GEMMA4, **_INPUTS, "num_kv_shared_layers": 2},
        {**_EYES, "num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 8},
    ),
    "mistral3": ({**_TEXT, "model_type": "mistral"}, {**_EYES, **_DEPTH, "head_dim": 8}),
    "mistral4": (
        {
            **{key: value for key, value in _TEXT.items() if key != "head_dim"},
            **_LATENT_MIXTURE,
            "model_type": "mistral4",
            "first_k_dense_replace": 0,
            "rope_parameters": {
                **_YARN,
                "original_max_position_embeddings": 256,
                "llama_4_scaling_beta": 0.1,
                "mscale_all_dim": 1.0,
            },
        },
        {**_EYES, **_DEPTH, "head_dim": 8},
    ),
    "qwen3_vl": (
        {**_TEXT, "rope_parameters": _MROPE},
        {**_QWEN_EYES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "hunyuan_vl": (
        {
            **_TEXT,
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 1.0,
                "alpha": 50.0,
                "rope_theta": 5000.0,
                "mrope_section": [1, 2, 2, 1],
            },
        },
        {**_EYES, **_DEPTH},
    ),
    "muse_glimmer": (
        {**_TEXT, "num_hidden_layers": 4, "sliding_window": 7, "post_norm_eps": 0.01},
        {**_EYES, "num_hidden_layers": 1},
    ),
    "paddleocr_vl": (
        {**_TEXT, "use_bias": True, "rope_parameters": _MROPE},
        {**_EYES, **_DEPTH},
    ),
    "qwen2_5_vl": (
        {
            key: value
            for key, value in {
                **_TEXT,
                "rope_parameters": {**_MROPE, "mrope_section": [1, 2, 2]},
            }.items()
            if key != "head_dim"
        },
        _QWEN_EYES,
    ),
}


# Seeds of cases whose greedy text would have a tie.
_SEEDS = {"exaone4": 5, "smollm3_unusual": 5}


def write_family(folder: Path, name: str) -> Path:
    """A checkpoint of the case `name`."""
    family, changes = FAMILIES[name]
    return write_hf(folder, family, changes, seed=_SEEDS.get(name, 3))


def add_words(folder: Path, vocab_size: int = 96) -> Path:
    """Give a checkpoint a tokenizer of one word an id."""
    model = {
        "type": "WordLevel",
        "vocab": {f"w{i}": i for i in range(vocab_size)},
        "unk_token": "w0",
    }
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def write_wrapper(folder: Path, name: str, *, seed: int = 3) -> tuple[Path, Any]:
    """A checkpoint, and transformers' model of it."""
    family = "mistral3" if name == "mistral4" else name
    model = random_wrapper(family, *WRAPPERS[name], seed=seed)
    model.save_pretrained(folder)
    return folder, model
