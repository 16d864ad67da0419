"""GGUF files of further families: rows of architectures, their settings, names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.models.gguf.architectures import (
    AROUND,
    DEEPSEEK,
    EXPERT_KEYS,
    EXPERTS,
    FFN,
    ROUTED,
    ROUTED_KEYS,
    SCALES,
    SECTIONS,
    SWITCHED_WINDOW,
    TEMPERATURE,
    WINDOW,
    activation,
    experts_alone,
    granite_mixture,
    layer_types,
    mixed_windows,
    routed,
    row,
    soft_cap,
)
from outrider.models.gguf.config import Architecture, Part, Positions, Sizes, shortest
from outrider.models.json_object import JsonObject

LATENT = {
    **DEEPSEEK,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}


# Tensors of an MTP block that is numbered as a layer.
NUMBERED_MTP = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}


# Tensors that files with latents lack, or have in some files or layers only.
SOME_LATENT = (
    "attn_q", "attn_k", "attn_v", "attn_q_a", "attn_q_a_norm", "attn_q_b", "attn_kv_b", "attn_k_b",
    "attn_v_b", *FFN, *DEEPSEEK, *NUMBERED_MTP,
)  # fmt: skip


AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


NO_NORMS_BEFORE = ("attn_norm", "ffn_norm")


def granite_swa(sizes: Sizes) -> dict[str, Any]:
    """Layers of Granite's sliding models: windows, and whether heads rotate."""
    key = f"{sizes.arch}.attention.rope_pattern"
    found = granite_mixture(sizes)
    if found:
        found["model_type"] = "granitemoe_swa"
    listed = sizes.raw.values.get(key)
    if isinstance(listed, np.ndarray):
        theta = sizes.number("rope.freq_base", 10000.0)
        found["layer_rope_theta"] = [theta if one else 0.0 for one in listed.tolist()]
    return found


def muse(sizes: Sizes) -> dict[str, Any]:
    """Norms, scale of logits and positions of Muse Glimmer: heads rotate in layers with a window,
    every fourth layer has none, unless the file says otherwise."""
    key = "attention.sliding_window_pattern"
    kinds = layer_types(sizes, key) if sizes.has(key) else []
    slides = [kind == "sliding_attention" for kind in kinds]
    slides = slides or [index % 4 < 3 for index in range(sizes.num_layers)]
    theta = sizes.number("rope.freq_base", 10000.0)
    return {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "layer_rope_theta": [theta if one else 0.0 for one in slides],
        "output_multiplier": sizes.number("logit_scale"),
        "norms_from_one": False,
        "interleaved": True,
    }


def hunyuan(sizes: Sizes) -> dict[str, Any]:
    """The mixture of Hunyuan, whose shared net has a size of its own."""
    found = experts_alone(sizes)
    shared = sizes.integer("expert_shared_feed_forward_length", found["intermediate_size"])
    return found | {"shared_expert_intermediate_size": shared}


def xielu(sizes: Sizes) -> dict[str, Any]:
    """Numbers of xIELU, one for each layer or one for all."""
    found: dict[str, Any] = {}
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        given = sizes.raw.values.get(f"xielu.{name}")
        listed = given.tolist() if isinstance(given, np.ndarray) else [given]
        raw = JsonObject(sizes.raw.where, {f"xielu.{name}": listed})
        numbers = [shortest(one) for one in raw.numbers(f"xielu.{name}", signed=True)]
        found[f"xielu_{name}"] = numbers * (sizes.num_layers if len(numbers) == 1 else 1)
    return found


def centred(name: str) -> Part:
    """The epsilon of layer norms, `name` in config.json."""
    return Part(lambda sizes: {name: sizes.number("attention.layer_norm_epsilon")})


def neox(sizes: Sizes) -> dict[str, Any]:
    """Traits of a GPT-NeoX; queries, keys and values lie apart in its fused matrix."""
    parallel = sizes.raw.flag(f"{sizes.arch}.use_parallel_residual", default=True)
    own = {"use_parallel_residual": parallel, "hidden_act": "gelu"}
    return {**own, "qkv_by_group": False}


def falcon(sizes: Sizes) -> dict[str, Any]:
    """Traits of a Falcon; files of its second generation have two norms of one residual."""
    is_new = "blk.0.attn_norm_2.weight" in sizes.header.entries
    return {"new_decoder_architecture": is_new, "qkv_by_group": False}


def clip(sizes: Sizes) -> dict[str, Any]:
    key = "attention.clamp_kqv"
    return {"clip_qkv": sizes.number(key)} if sizes.is_set(key) else {}


def cohere(sizes: Sizes) -> dict[str, Any]:
    return {"logit_scale": sizes.number("logit_scale") if sizes.is_set("logit_scale") else 1.0}


def olmo3(sizes: Sizes) -> dict[str, Any]:
    """The windows of an `olmo2`, which is then an OLMo 3."""
    if not sizes.is_set("attention.sliding_window"):
        return {}
    key = "attention.sliding_window_pattern"
    found = {"model_type": "olmo3", "sliding_window": sizes.integer("attention.sliding_window")}
    return found | ({"layer_types": layer_types(sizes, key)} if sizes.has(key) else {})


def stablelm(sizes: Sizes) -> dict[str, Any]:
    return {"use_qkv_bias": "blk.0.attn_q.bias" in sizes.header.entries}


def glm4_moe(sizes: Sizes) -> dict[str, Any]:
    has_norms = "blk.0.attn_q_norm.weight" in sizes.header.entries
    return {"use_qk_norm": has_norms, **mtp_blocks(sizes)}


def seed_oss(sizes: Sizes) -> dict[str, Any]:
    """Outputs of attention have a bias, of zeros if the file has none, where queries have one."""
    return {"attention_out_bias": "blk.0.attn_q.bias" in sizes.header.entries}


LATENT_KEYS = (
    "attention.kv_lora_rank", "attention.q_lora_rank", "attention.key_length_mla",
    "attention.value_length_mla", "expert_group_count", "expert_group_used_count",
    "nextn_predict_layers", "rope.scaling.yarn_log_multiplier",
)  # fmt: skip


def groups(sizes: Sizes) -> dict[str, Any]:
    """Groups of experts, of which a token chooses some."""
    count = sizes.integer("expert_group_count", 1)
    return {"n_group": count, "topk_group": sizes.integer("expert_group_used_count", count)}


def latent(sizes: Sizes) -> dict[str, Any]:
    """Attention over latents, and the groups of experts. Older files have the sizes of keys and
    values of a head where newer ones have those of a row of the cache."""
    key, value = (
        sizes.integer(f"attention.{kind}_length_mla", sizes.integer(f"attention.{kind}_length"))
        for kind in ("key", "value")
    )
    has_vectors = "blk.0.attn_q_a.weight" in sizes.header.entries
    found: dict[str, Any] = {
        "kv_lora_rank": sizes.integer("attention.kv_lora_rank"),
        "q_lora_rank": sizes.integer("attention.q_lora_rank") if has_vectors else None,
        "qk_rope_head_dim": sizes.turning,
        "qk_nope_head_dim": key - sizes.turning,
        "v_head_dim": value,
        "latent_norm_eps": sizes.number("attention.layer_norm_rms_epsilon"),
        **groups(sizes),
    }
    return found | mtp_blocks(sizes)


# Layers and vocabulary of a GLM whose first files do not say how experts are scored.
_GLM_LAYERS, _GLM_VOCABULARY = (47, 48), 154880


def _first_glm(sizes: Sizes) -> dict[str, Any]:
    is_glm = sizes.num_layers in _GLM_LAYERS and sizes.vocab_size == _GLM_VOCABULARY
    silent = is_glm and not sizes.is_set("expert_gating_func")
    return {"scoring_func": "sigmoid"} if silent else {}


def latent_mixture(sizes: Sizes) -> dict[str, Any]:
    """A mixture with the keys of DeepSeek's, or none; with a softmax it is DeepSeek-V2's."""
    if not sizes.is_set("expert_count"):
        return {"model_type": "youtu"}
    found = dict(routed(has_sigmoids=False).read(sizes)) | _first_glm(sizes)
    if found["scoring_func"] == "softmax" and not found["has_choice_bias"]:
        found |= {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}
    return found


def mtp_blocks(sizes: Sizes) -> dict[str, Any]:
    """Number of MTP blocks, if the file has their tensors."""
    first, end = sizes.num_layers, sizes.integer("block_count")
    there = f"blk.{first}.nextn.eh_proj.weight" in sizes.header.entries
    return {"num_nextn_predict_layers": end - first} if there else {}


def halved_ffn(sizes: Sizes) -> dict[str, Any]:
    """The FFN of Qwen's first models has half of the size that they state."""
    return {"intermediate_size": sizes.integer("feed_forward_length") // 2}


_GROUPS = Part(groups, ("expert_group_count", "expert_group_used_count"))


_DEEPSEEK2 = row(
    "deepseek_v3",
    Part(latent_mixture, ROUTED_KEYS),
    Part(latent, LATENT_KEYS),
    names={**LATENT, **NUMBERED_MTP},
    positions=Positions(log_factor="rope.scaling.yarn_log_multiplier"),
    absent=SOME_LATENT,
    numbered_mtp=True,
    latent=True,
)


ARCHITECTURES: Mapping[str, Architecture] = {
    "muse-glimmer": row(
        "muse_glimmer_text",
        mixed_windows(None),
        soft_cap("final"),
        Part(muse, ("logit_scale",)),
        names={**AROUND, "attn_gate": "self_attn.gate_proj"},
    ),
    "granite_swa": row(
        "granite_swa",
        SCALES,
        mixed_windows(None),
        Part(
            granite_swa,
            (*EXPERT_KEYS, "expert_shared_feed_forward_length", "attention.rope_pattern"),
        ),
        names={
            **ROUTED,
            "ffn_up_shexp": "shared_mlp.input_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
            "attn_sinks": "self_attn.sinks",
        },
        paired=True,
    ),
    "minicpm": row("granite", SCALES, paired=True),
    "internlm2": row("llama", paired=True),
    "xverse": row("llama", paired=True),
    "exaone": row("llama"),
    "pangu-embedded": row("llama"),
    "orion": row("orion", centred("layer_norm_eps")),
    "stablelm": row(
        "stablelm",
        centred("layer_norm_eps"),
        Part(stablelm),
        turns_in_part=True,
        out_bias=False,
    ),
    "apertus": row(
        "apertus",
        Part(xielu),
        activation("xielu"),
        absent=("ffn_gate",),
        positions=Positions(is_silent=True),
    ),
    "hunyuan-dense": row("hunyuan_v1_dense"),
    "hunyuan_vl": row("hunyuan_v1_dense", SECTIONS),
    "hunyuan-moe": row(
        "hunyuan_v1_moe",
        Part(hunyuan, (*EXPERT_KEYS, "expert_shared_feed_forward_length")),
        names=DEEPSEEK,
        absent=("exp_probs_b",),
    ),
    "maincoder": row("maincoder"),
    "exaone-moe": row(
        "exaone_moe",
        mixed_windows(128),
        routed(has_sigmoids=True),
        _GROUPS,
        Part(mtp_blocks, ("nextn_predict_layers",)),
        names={**DEEPSEEK, **NUMBERED_MTP},
        absent=(*FFN, *DEEPSEEK, *NUMBERED_MTP),
        numbered_mtp=True,
    ),
    "afmoe": row(
        "afmoe",
        mixed_windows(0),
        routed(has_sigmoids=True),
        names={**DEEPSEEK, **AROUND, "attn_gate": "self_attn.gate_proj"},
        settings={"mup_enabled": True},
    ),
    "bailingmoe2": row(
        "bailing_moe_v2",
        routed(has_sigmoids=True),
        _GROUPS,
        Part(mtp_blocks, ("nextn_predict_layers",)),
        names={**DEEPSEEK, **NUMBERED_MTP, "layer_output_norm": "final_layernorm"},
        turns_in_part=True,
        numbered_mtp=True,
    ),
    "hy_v3": row(
        "hy_v3",
        routed(has_sigmoids=True),
        Part(mtp_blocks, ("nextn_predict_layers",)),
        names={**DEEPSEEK, **NUMBERED_MTP},
        absent=(*FFN, *DEEPSEEK, *NUMBERED_MTP),
        numbered_mtp=True,
    ),
    "chatglm": row("glm", absent=("ffn_gate",), turns_in_part=True, out_bias=False),
    "paddleocr": row("paddleocr_vl_text", SECTIONS),
    "qwen": row("qwen", Part(halved_ffn), qkv_bias=True),
    "olmo2": row(
        "olmo2",
        Part(olmo3, ("attention.sliding_window_pattern", "rope.freq_base_swa")),
        names=AFTER,
        absent=NO_NORMS_BEFORE,
        positions=Positions(by_kind=True, stretches_local=False, in_windows=True),
    ),
    "olmoe": row("olmoe", EXPERTS, names=ROUTED),
    "exaone4": row("exaone4", mixed_windows(0), names=AFTER, absent=NO_NORMS_BEFORE),
    "cohere2": row(
        "cohere2",
        mixed_windows(4096),
        Part(cohere, ("logit_scale",)),
        centred("layer_norm_eps"),
        absent=("ffn_norm",),
    ),
    "command-r": row(
        "cohere",
        Part(cohere, ("logit_scale",)),
        centred("layer_norm_eps"),
        absent=("ffn_norm",),
    ),
    "seed_oss": row(
        "seed_oss",
        Part(seed_oss),
        names={"post_attention_norm": "post_attention_layernorm"},
        absent=("ffn_norm",),
    ),
    "qwen2vl": row("qwen2", SWITCHED_WINDOW, SECTIONS, qkv_bias=True),
    "qwen3vl": row("qwen3", SECTIONS),
    "qwen3vlmoe": row(
        "qwen3_moe", EXPERTS, SECTIONS, names=ROUTED, settings={"norm_topk_prob": True}
    ),
    "mellum": row(
        "mellum",
        mixed_windows(0),
        EXPERTS,
        names=ROUTED,
        positions=Positions(by_kind=True),
    ),
    "deepseek": row("deepseek", routed(has_sigmoids=False), names=DEEPSEEK, paired=True),
    "deepseek2": _DEEPSEEK2,
    "mistral4": replace(_DEEPSEEK2, parts=(*_DEEPSEEK2.parts, TEMPERATURE)),
    "dots1": row("dots1", routed(has_sigmoids=True), names=DEEPSEEK),
    "bailingmoe": row(
        "deepseek",
        routed(has_sigmoids=False, has_dense=False),
        names=DEEPSEEK,
        paired=True,
    ),
    "glm4moe": row(
        "glm4_moe",
        routed(has_sigmoids=True),
        Part(glm4_moe, ("rope.dimension_sections", "nextn_predict_layers")),
        turns_in_part=True,
        out_bias=False,
        names={
            **DEEPSEEK,
            **NUMBERED_MTP,
            "post_attention_norm": "post_attention_layernorm",
        },
        absent=("ffn_norm", *NUMBERED_MTP),
        numbered_mtp=True,
    ),
    "minimax-m2": row(
        "minimax_m2",
        routed(has_sigmoids=True, normalises=True),
        names=DEEPSEEK,
        turns_in_part=True,
    ),
    "phi2": row(
        "phi",
        activation("gelu_new"),
        centred("layer_norm_eps"),
        absent=("ffn_gate", "ffn_norm"),
        turns_in_part=True,
    ),
    "gptneox": row(
        "gpt_neox",
        Part(neox, ("use_parallel_residual",)),
        centred("layer_norm_eps"),
        absent=("ffn_gate",),
        turns_in_part=True,
    ),
    "falcon": row(
        "falcon",
        Part(falcon),
        centred("layer_norm_epsilon"),
        names={"attn_norm_2": "ln_attn"},
        absent=("ffn_gate", "ffn_norm", "attn_norm_2"),
    ),
    "olmo": row(
        "olmo",
        Part(clip, ("attention.clamp_kqv",)),
        absent=("attn_norm", "ffn_norm"),
        paired=True,
    ),
    "jais2": row(
        "jais2",
        activation("relu2"),
        centred("layer_norm_eps"),
        absent=("ffn_gate",),
    ),
    "codeshell": row(
        "codeshell",
        activation("gelu_new"),
        centred("layer_norm_epsilon"),
        absent=("ffn_gate",),
    ),
    "arcee": row("arcee", activation("relu2"), paired=True, absent=("ffn_gate",)),
    "nemotron": row(
        "nemotron",
        activation("relu2"),
        centred("norm_eps"),
        absent=("ffn_gate",),
        above_one=True,
        turns_in_part=True,
    ),
    "starcoder2": row(
        "starcoder2",
        WINDOW,
        activation("gelu_pytorch_tanh"),
        centred("norm_epsilon"),
        absent=("ffn_gate",),
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "plamo": row("plamo", absent=("ffn_norm",)),
    "glm4": row(
        "glm4",
        SECTIONS,
        names=AROUND,
        absent=("ffn_gate",),
        turns_in_part=True,
        out_bias=False,
    ),
    "ernie4_5": row("ernie4_5", SECTIONS),
    "ernie4_5-moe": row(
        "ernie4_5_moe",
        routed(has_sigmoids=False, normalises=True),
        names=DEEPSEEK,
    ),
}
