"""Settings of GGUF files that only some architectures have: a Part of a row reads each. Names of
tensors in GGUF files, and those of the same tensors in checkpoints.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.core.errors import CheckpointError
from outrider.models.gguf.config import Part, Sizes
from outrider.models.gguf.reader import Entry
from outrider.models.json_object import CONTRADICTION

LLAMA_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FFN = ("ffn_gate", "ffn_up", "ffn_down")
EXPERT_NAMES = {f"{part}_exps": f"mlp.experts.{part[4:]}_proj" for part in FFN}
# Newer files have gate and up of the experts in one tensor.
EXPERT_NAMES["ffn_gate_up_exps"] = "mlp.experts.gate_up_proj"
ROUTED = {**EXPERT_NAMES, "ffn_gate_inp": "mlp.gate"}
SHARED = {
    **ROUTED,
    **{f"{part}_shexp": f"mlp.shared_expert.{part[4:]}_proj" for part in FFN},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
DEEPSEEK = {
    **ROUTED,
    **{f"{part}_shexp": f"mlp.shared_experts.{part[4:]}_proj" for part in FFN},
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


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


def activation(name: str) -> Part:
    return Part(lambda _: {"hidden_act": name})


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


def temperature(sizes: Sizes) -> dict[str, Any]:
    """The scaling of queries by their positions."""
    if not sizes.is_set("attention.temperature_scale"):
        return {}
    step = sizes.integer("rope.scaling.original_context_length")
    return {"query_growth": sizes.number("attention.temperature_scale"), "query_reach": step}
