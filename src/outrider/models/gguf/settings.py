"""Settings of GGUF files that only some architectures have: a Part of a row reads each."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.core.errors import CheckpointError
from outrider.models.gguf.config import Part, Sizes, shortest
from outrider.models.gguf.reader import Entry
from outrider.models.json_object import CONTRADICTION, JsonObject


def gpt2(sizes: Sizes) -> dict[str, Any]:
    """Sizes of a GPT-2."""
    return {
        "n_embd": sizes.hidden,
        "n_inner": sizes.integer("feed_forward_length"),
        "n_layer": sizes.integer("block_count"),
        "n_head": sizes.num_heads,
        "n_positions": sizes.integer("context_length"),
        "layer_norm_epsilon": sizes.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def experts(sizes: Sizes) -> dict[str, Any]:
    """A mixture; without a size of its own, an expert has its part of the FFN's size."""
    usual = max(1, sizes.integer("feed_forward_length") // sizes.integer("expert_used_count"))
    return _experts(sizes, sizes.integer("expert_feed_forward_length", usual))


def experts_alone(sizes: Sizes, key: str = "expert_feed_forward_length") -> dict[str, Any]:
    """A mixture whose experts' size is that of the FFN in config.json."""
    ffn = sizes.integer("expert_feed_forward_length", sizes.integer(key))
    return _experts(sizes, ffn) | {"intermediate_size": ffn}


def _experts(sizes: Sizes, ffn_size: int) -> dict[str, Any]:
    return {
        "num_local_experts": sizes.integer("expert_count"),
        "num_experts_per_tok": sizes.integer("expert_used_count"),
        "moe_intermediate_size": ffn_size,
    }


def shared_expert(sizes: Sizes) -> dict[str, Any]:
    usual = sizes.integer("feed_forward_length")
    size = sizes.integer("expert_shared_feed_forward_length", usual)
    return {"shared_expert_intermediate_size": size}


def soft_cap(name: str) -> Part:
    """The cap of scores of attention (`attn`) or of logits (`final`); 0 means none."""
    key = f"{name}_logit_softcapping"

    def read(sizes: Sizes) -> dict[str, Any]:
        if not sizes.has(key):
            return {}
        return {key: sizes.number(key) if sizes.is_set(key) else None}

    return Part(read, (key,))


def gemma_scale(num_layers: int) -> Part:
    """The scale of scores; the model of `num_layers` does not scale them by the size of a head."""

    def read(sizes: Sizes) -> dict[str, Any]:
        largest = sizes.integer("block_count") == num_layers
        size = sizes.hidden // sizes.num_heads if largest else sizes.head_dim
        return {"query_pre_attn_scalar": size}

    return Part(read)


def window(sizes: Sizes) -> dict[str, Any]:
    """The window of all layers, if the file has one."""
    found = sizes.integer("attention.sliding_window", 0, least=0)
    return {"sliding_window": found} if found else {}


def mistral_window(sizes: Sizes) -> dict[str, Any]:
    """The window of a `llama`, which is then a Mistral."""
    found = window(sizes)
    return found | ({"model_type": "mistral"} if found else {})


def switched_window(sizes: Sizes) -> dict[str, Any]:
    found = sizes.integer("attention.sliding_window", 0, least=0)
    return {
        "use_sliding_window": found > 0,
        "sliding_window": found or None,
        "max_window_layers": 0,
    }


def mixed_windows(usual: int | None) -> Part:
    """Models in which some layers slide, all but every n-th or those of a list, by `usual` tokens
    if the file does not say; None if it must."""

    def read(sizes: Sizes) -> dict[str, Any]:
        found = sizes.integer("attention.sliding_window", usual, least=0)
        key = "attention.sliding_window_pattern"
        if not found or not sizes.has(key):
            return {"sliding_window": found or None}
        return {"sliding_window": found, "layer_types": layer_types(sizes, key)}

    return Part(read, ("attention.sliding_window_pattern", "rope.freq_base_swa"))


def layer_types(sizes: Sizes, key: str) -> list[str]:
    num_layers = sizes.num_layers
    given = sizes.raw.values[f"{sizes.arch}.{key}"]
    if isinstance(given, np.ndarray):
        slides = [bool(one) for one in given.tolist()]
    else:
        every = sizes.integer(key, least=0)
        slides = [not every or index % every < every - 1 for index in range(num_layers)]
    if len(slides) != num_layers:
        raise CheckpointError(
            f"{sizes.raw.where}: {sizes.arch}.{key} has {len(slides)} entries for {num_layers} "
            "layers.",
            hint=CONTRADICTION,
        )
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


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


def mixtral(sizes: Sizes) -> dict[str, Any]:
    """The mixture of a `llama`, which is then a Mixtral."""
    if not sizes.is_set("expert_count"):
        return {}
    return experts_alone(sizes, "feed_forward_length") | {"model_type": "mixtral"}


def granite_mixture(sizes: Sizes) -> dict[str, Any]:
    """The mixture of a Granite, whose FFN's size is that of an expert."""
    if not sizes.is_set("expert_count"):
        return {}
    shared = sizes.integer("expert_shared_feed_forward_length", 0, least=0)
    found = experts_alone(sizes, "feed_forward_length")
    return found | {"model_type": "granitemoeshared", "shared_intermediate_size": shared}


# Scales of Granite: the key in files, in config.json, and the value if the file has none.
SCALES = (
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
    ("attention.scale", "attention_multiplier"),
)


def scales(sizes: Sizes) -> dict[str, Any]:
    usual = {"attention.scale": sizes.head_dim**-0.5, **_usual_scales(sizes)}
    return {
        name: sizes.number(key) if sizes.is_set(key) else usual.get(key, 1.0)
        for key, name in SCALES
    }


def _usual_scales(sizes: Sizes) -> dict[str, float]:
    """Scales that files of MiniCPM leave out."""
    if sizes.arch != "minicpm":
        return {}
    return {
        "embedding_scale": 12.0,
        "residual_scale": 1.4 / sizes.integer("block_count") ** 0.5,
        "logit_scale": 256 / sizes.hidden,
    }


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


def activation(name: str) -> Part:
    return Part(lambda _: {"hidden_act": name})


def seed_oss(sizes: Sizes) -> dict[str, Any]:
    """Outputs of attention have a bias, of zeros if the file has none, where queries have one."""
    return {"attention_out_bias": "blk.0.attn_q.bias" in sizes.header.entries}


def routed(*, has_sigmoids: bool, normalises: bool = False, has_dense: bool = True) -> Part:
    """A mixture with the keys of DeepSeek's, and what holds if the file does not say so. The first
    layers may be dense if the architecture `has_dense` ones."""

    def read(sizes: Sizes) -> dict[str, Any]:
        ffn, shared = sizes.integer("expert_feed_forward_length"), entry_of(sizes, "ffn_up_shexp")
        scoring = sizes.integer("expert_gating_func", 2 if has_sigmoids else 1)
        return {
            "n_routed_experts": sizes.integer("expert_count"),
            "num_experts_per_tok": sizes.integer("expert_used_count"),
            "moe_intermediate_size": ffn,
            "shared_expert_intermediate_size": 0 if shared is None else shared.shape[0],
            "decoder_sparse_step": sizes.integer("interleave_moe_layer_step", 1),
            "first_k_dense_replace": sizes.integer("leading_dense_block_count", 0, least=0)
            if has_dense
            else 0,
            "routed_scaling_factor": sizes.number("expert_weights_scale")
            if sizes.is_set("expert_weights_scale")
            else 1.0,
            "norm_topk_prob": sizes.raw.flag(
                f"{sizes.arch}.expert_weights_norm", default=normalises
            ),
            "scoring_func": "sigmoid" if scoring == _SIGMOID else "softmax",
            "has_choice_bias": any(
                entry_of(sizes, "exp_probs_b", ending) is not None for ending in ("bias", "")
            ),
        }

    return Part(read, ROUTED_KEYS)


def entry_of(sizes: Sizes, part: str, ending: str = "weight") -> Entry | None:
    """The tensor `part` of the last layer that has it; None if none has."""
    whole = f"{part}.{ending}".rstrip(".")
    names = (f"blk.{index}.{whole}" for index in reversed(range(sizes.num_layers)))
    return next((found for name in names if (found := sizes.header.entries.get(name))), None)


_SIGMOID = 2
ROUTED_KEYS = (
    "expert_count", "expert_used_count", "expert_feed_forward_length",
    "expert_shared_feed_forward_length", "expert_shared_count", "leading_dense_block_count",
    "expert_weights_scale", "expert_weights_norm", "expert_gating_func",
    "interleave_moe_layer_step",
)  # fmt: skip


LATENT_KEYS = (
    "attention.kv_lora_rank", "attention.q_lora_rank", "attention.key_length_mla",
    "attention.value_length_mla", "expert_group_count", "expert_group_used_count",
    "nextn_predict_layers", "rope.scaling.yarn_log_multiplier",
)  # fmt: skip
# Layers and vocabulary of a GLM whose first files do not say how experts are scored.
_GLM_LAYERS, _GLM_VOCABULARY = (47, 48), 154880


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


def _first_glm(sizes: Sizes) -> dict[str, Any]:
    is_glm = sizes.num_layers in _GLM_LAYERS and sizes.vocab_size == _GLM_VOCABULARY
    silent = is_glm and not sizes.is_set("expert_gating_func")
    return {"scoring_func": "sigmoid"} if silent else {}


def temperature(sizes: Sizes) -> dict[str, Any]:
    """The scaling of queries by their positions."""
    if not sizes.is_set("attention.temperature_scale"):
        return {}
    step = sizes.integer("rope.scaling.original_context_length")
    return {"query_growth": sizes.number("attention.temperature_scale"), "query_reach": step}


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
