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
        return {"sliding_window": found, "layer_types": _layer_types(sizes, key)}

    return Part(read, ("attention.sliding_window_pattern", "rope.freq_base_swa"))


def _layer_types(sizes: Sizes, key: str) -> list[str]:
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
    kinds = _layer_types(sizes, key) if sizes.has(key) else []
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
    return found | ({"layer_types": _layer_types(sizes, key)} if sizes.has(key) else {})


def stablelm(sizes: Sizes) -> dict[str, Any]:
    return {"use_qkv_bias": "blk.0.attn_q.bias" in sizes.header.entries}


def glm4_moe(sizes: Sizes) -> dict[str, Any]:
    has_norms = "blk.0.attn_q_norm.weight" in sizes.header.entries
    return {"use_qk_norm": has_norms, **mtp_blocks(sizes)}


def activation(name: str) -> Part:
    return Part(lambda _: {"hidden_act": name})


def recurrences(sizes: Sizes) -> dict[str, Any]:
    """Gated delta rules of Qwen3-Next and Qwen3.5, and their MTP block."""
    heads, key = sizes.integer("ssm.time_step_rank"), f"{sizes.arch}.attention.recurrent_layers"
    found: dict[str, Any] = {
        "linear_conv_kernel_dim": sizes.integer("ssm.conv_kernel"),
        "linear_key_head_dim": sizes.integer("ssm.state_size"),
        "linear_num_key_heads": sizes.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": sizes.integer("ssm.inner_size") // heads,
        "full_attention_interval": sizes.integer("full_attention_interval", 4),
        "linear_tiled_values": sizes.row.tiled,
    }
    given = sizes.raw.values.get(key)
    if isinstance(given, np.ndarray):
        recurrent = [bool(one) for one in given.tolist()[: sizes.num_layers]]
        found["layer_types"] = [
            "linear_attention" if one else "full_attention" for one in recurrent
        ]
    if sizes.num_blocks > sizes.num_layers:
        found["mtp_num_hidden_layers"] = sizes.num_blocks - sizes.num_layers
    return found


def shared_expert_of(sizes: Sizes) -> dict[str, Any]:
    """The shared expert of a hybrid, which is as large as its tensor."""
    entry = sizes.header.entries.get(f"blk.{sizes.num_blocks - 1}.ffn_gate_shexp.weight")
    return {"shared_expert_intermediate_size": 0 if entry is None else entry.shape[0]}


def seed_oss(sizes: Sizes) -> dict[str, Any]:
    """Outputs of attention have a bias, of zeros if the file has none, where queries have one."""
    return {"attention_out_bias": "blk.0.attn_q.bias" in sizes.header.entries}


def routed(*, has_sigmoids: bool, normalises: bool = False, has_dense: bool = True) -> Part:
    """A mixture with the keys of DeepSeek's, and what holds if the file does not say so. The first
    layers may be dense if the architecture `has_dense` ones."""

    def read(sizes: Sizes) -> dict[str, Any]:
        ffn, shared = sizes.integer("expert_feed_forward_length"), _entry(sizes, "ffn_up_shexp")
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
                _entry(sizes, "exp_probs_b", ending) is not None for ending in ("bias", "")
            ),
        }

    return Part(read, ROUTED_KEYS)


def _entry(sizes: Sizes, part: str, ending: str = "weight") -> Entry | None:
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


def _kinds(sizes: Sizes, other: str) -> list[str]:
    """The kinds of layers: those without key and value heads are of the `other` kind."""
    heads = sizes.by_layer("attention.head_count_kv")
    return ["full_attention" if count else other for count in heads]


def short_convolutions(sizes: Sizes) -> dict[str, Any]:
    """LFM2's convolutions, in layers without key and value heads."""
    return {
        "conv_L_cache": sizes.integer("shortconv.l_cache"),
        "layer_types": _kinds(sizes, "conv"),
        "norm_eps": sizes.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }


def scans(sizes: Sizes) -> dict[str, Any]:
    """Sizes of Mamba-2 layers."""
    inner, heads = sizes.integer("ssm.inner_size"), sizes.integer("ssm.time_step_rank")
    return {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": sizes.integer("ssm.group_count"),
        "mamba_d_state": sizes.integer("ssm.state_size"),
        "mamba_d_conv": sizes.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _entry(sizes, "ssm_conv1d", "bias") is not None,
    }


SCAN_KEYS = (
    "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size",
    "attention.recurrent_layers",
)  # fmt: skip


def granite_hybrid(sizes: Sizes) -> dict[str, Any]:
    """Layers and FFN of Granite's hybrids. Heads rotate unless the file says that the positions of
    the original model were not stretched, the key that stands for it."""
    found = {"shared_intermediate_size": sizes.integer("feed_forward_length")}
    found |= {"num_local_experts": 0} | granite_mixture(sizes)
    turns = sizes.raw.flag(f"{sizes.arch}.rope.scaling.finetuned", default=True)
    own = {"model_type": sizes.row.family, "layer_types": _kinds(sizes, "mamba")}
    return found | own | {"position_embedding_type": "rope" if turns else "none"}


def falcon_h1(sizes: Sizes) -> dict[str, Any]:
    """Norms of Falcon H1, which come after the gate; its factors are part of the weights."""
    has_norm = _entry(sizes, "ssm_norm") is not None
    return {"mamba_rms_norm": has_norm, "mamba_norm_before_gate": False}


def nemotron_h(sizes: Sizes) -> dict[str, Any]:
    """Layers of Nemotron H, each of one kind, and their mixture, if there is one."""
    is_sparse = sizes.is_set("expert_count")
    fed, heads = sizes.by_layer("feed_forward_length"), sizes.by_layer("attention.head_count_kv")
    kinds = [
        ("E" if is_sparse else "-") if ffn else "*" if count else "M"
        for ffn, count in zip(fed, heads, strict=True)
    ]
    own = scans(sizes)
    return {
        "hybrid_override_pattern": "".join(kinds),
        "layer_norm_epsilon": sizes.number("attention.layer_norm_rms_epsilon", 1e-5),
        "mamba_num_heads": own["mamba_n_heads"],
        "mamba_head_dim": own["mamba_d_head"],
        "moe_latent_size": sizes.integer("moe_latent_size", 0, least=0),
        **own,
        **(routed(has_sigmoids=True).read(sizes) if is_sparse else {}),
    }


def halved_ffn(sizes: Sizes) -> dict[str, Any]:
    """The FFN of Qwen's first models has half of the size that they state."""
    return {"intermediate_size": sizes.integer("feed_forward_length") // 2}


def _drafter(sizes: Sizes, name: str) -> dict[str, Any]:
    """Settings of every drafter, whose class is `name`: hidden layers by the number of layers
    before them, and the size of its vocabulary."""
    listed = sizes.raw.values.get(f"{sizes.arch}.target_layers")
    layers = listed.tolist() if isinstance(listed, np.ndarray) else listed
    table = sizes.header.entries.get("d2t")
    return {
        "architectures": [name],
        "hidden_layers": layers,
        "draft_vocab_size": sizes.vocab_size if table is None else table.shape[0],
    }


def _eagle3(sizes: Sizes) -> dict[str, Any]:
    flags = {
        key: sizes.raw.flag(f"{sizes.arch}.{key}", default=False)
        for key in ("norm_before_residual", "norm_before_fc")
    }
    return {**_drafter(sizes, "LlamaForCausalLMEagle3"), **flags}


def _dflash(sizes: Sizes) -> dict[str, Any]:
    found, entries = _drafter(sizes, "DFlashDraftModel"), sizes.header.entries
    found["mask_token_id"] = sizes.raw.values.get("tokenizer.ggml.mask_token_id")
    found["dflash_config"] = {}
    for key in _DFLASH_SIZES:
        if sizes.is_set(key):
            found[key] = sizes.integer(key)
    if "markov_w1.weight" in entries:
        found["markov_rank"] = entries["markov_w1.weight"].shape[1]
    if sizes.has("sample_from_anchor"):
        found["sample_from_anchor"] = sizes.raw.flag(
            f"{sizes.arch}.sample_from_anchor", default=True
        )
    if sizes.has("attention.causal"):
        found["is_causal"] = sizes.raw.flag(f"{sizes.arch}.attention.causal", default=False)
    for key, name in _DFLASH_SCALES:
        if sizes.is_set(key):
            found[name] = sizes.number(key)
    pattern = "attention.sliding_window_pattern"
    if sizes.is_set("attention.sliding_window"):
        found["sliding_window"] = sizes.integer("attention.sliding_window")
        found["layer_types"] = _layer_types(sizes, pattern)
    return found


_DFLASH_SIZES = (
    "block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
)  # fmt: skip
_DFLASH_SCALES = (
    ("embedding_scale", "input_embedding_scale"),
    ("logit_scale", "output_multiplier"),
    ("final_logit_softcapping", "final_logit_softcapping"),
)
EAGLE3 = Part(
    _eagle3, ("target_layers", "target_hidden_size", "norm_before_residual", "norm_before_fc")
)
DFLASH = Part(
    _dflash,
    (
        "target_layers", *_DFLASH_SIZES, *(key for key, _ in _DFLASH_SCALES), "attention.causal",
        "attention.sliding_window_pattern", "sample_from_anchor", "has_confidence_head",
        "rope.dimension_sections",
    ),
)  # fmt: skip
