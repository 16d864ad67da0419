"""Architectures of GGUF files, with a row for each: settings, and names and layouts of tensors.

A new architecture is a row: the family that computes it, the parts that make its config.json
(config.py has those of all, the others are here), and the names of its tensors in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.core.errors import CheckpointError
from outrider.models.gguf.config import Architecture, Part, Positions, Sizes, layered
from outrider.models.gguf.reader import Header
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
_SCALES = (
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
    ("attention.scale", "attention_multiplier"),
)


def scales(sizes: Sizes) -> dict[str, Any]:
    usual = {"attention.scale": sizes.head_dim**-0.5, **_usual_scales(sizes)}
    return {
        name: sizes.number(key) if sizes.is_set(key) else usual.get(key, 1.0)
        for key, name in _SCALES
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
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in sizes.header.entries}


def _activation(name: str) -> Part:
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
    if sizes.integer("block_count") > sizes.num_layers:
        found["mtp_num_hidden_layers"] = sizes.integer("block_count") - sizes.num_layers
    return found


def shared_expert_of(sizes: Sizes) -> dict[str, Any]:
    """The shared expert of a hybrid, which is as large as its tensor."""
    entry = sizes.header.entries.get("blk.0.ffn_gate_shexp.weight")
    return {"shared_expert_intermediate_size": 0 if entry is None else entry.shape[0]}


def seed_oss(sizes: Sizes) -> dict[str, Any]:
    """Outputs of attention have a bias, of zeros if the file has none, where queries have one."""
    return {"attention_out_bias": "blk.0.attn_q.bias" in sizes.header.entries}


def routed(*, has_sigmoids: bool, normalises: bool = False, has_dense: bool = True) -> Part:
    """A mixture with the keys of DeepSeek's, and what holds if the file does not say so. The first
    layers may be dense if the architecture `has_dense` ones."""

    def read(sizes: Sizes) -> dict[str, Any]:
        ffn, last = sizes.integer("expert_feed_forward_length"), sizes.num_layers - 1
        shared = sizes.header.entries.get(f"blk.{last}.ffn_gate_shexp.weight")
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
            "has_choice_bias": f"blk.{last}.exp_probs_b.bias" in sizes.header.entries,
        }

    return Part(read, _ROUTED_KEYS)


_SIGMOID = 2
_ROUTED_KEYS = (
    "expert_count", "expert_used_count", "expert_feed_forward_length",
    "expert_shared_feed_forward_length", "expert_shared_count", "leading_dense_block_count",
    "expert_weights_scale", "expert_weights_norm", "expert_gating_func",
    "interleave_moe_layer_step",
)  # fmt: skip


def halved_ffn(sizes: Sizes) -> dict[str, Any]:
    """The FFN of Qwen's first models has half of the size that they state."""
    return {"intermediate_size": sizes.integer("feed_forward_length") // 2}


_EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_LAYERED, _WINDOW, _SWITCHED_WINDOW = Part(layered), Part(window), Part(switched_window)
_EXPERTS = Part(experts, _EXPERT_KEYS)
_LLAMA_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA_LAYER = {
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
_FFN = ("ffn_gate", "ffn_up", "ffn_down")
_EXPERT_NAMES = {f"{part}_exps": f"mlp.experts.{part[4:]}_proj" for part in _FFN}
# Newer files have gate and up of the experts in one tensor.
_EXPERT_NAMES["ffn_gate_up_exps"] = "mlp.experts.gate_up_proj"
_ROUTED = {**_EXPERT_NAMES, "ffn_gate_inp": "mlp.gate"}
_SHARED = {
    **_ROUTED,
    **{f"{part}_shexp": f"mlp.shared_expert.{part[4:]}_proj" for part in _FFN},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_DEEPSEEK = {
    **_ROUTED,
    **{f"{part}_shexp": f"mlp.shared_experts.{part[4:]}_proj" for part in _FFN},
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NO_NORMS_BEFORE = ("attn_norm", "ffn_norm")
_GRANITE = Part(scales, tuple(key for key, _ in _SCALES))
_GRANITE_TENSORS: Mapping[str, Any] = {
    "names": {
        **_ROUTED,
        **{f"{part}_shexp": f"mlp.shared_expert.{part[4:]}_proj" for part in _FFN},
    },
    "paired": True,
}
# Parts of a head that turn with time, height and width: all the same for text.
_SECTIONS = Part(lambda _: {}, ("rope.dimension_sections", "n_deepstack_layers"))
_RECURRENT = Part(
    recurrences,
    (
        "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank",
        "ssm.inner_size", "full_attention_interval", "attention.recurrent_layers",
        "nextn_predict_layers",
    ),
)  # fmt: skip
_HYBRID_EXPERTS = Part(
    lambda sizes: {**experts(sizes), **shared_expert_of(sizes)},
    (*_EXPERT_KEYS, "expert_shared_feed_forward_length"),
)
_HYBRID: Mapping[str, Any] = {
    "names": {
        **_SHARED,
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt": "linear_attn.dt_bias",
        "ssm_a": "linear_attn.A_log",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        **{name: name for name in ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")},
        "nextn.shared_head_norm": "nextn.shared_head_norm",
    },
    "absent": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm"),
    "above_one": True,
    "turns_in_part": True,
    "mtp": True,
}
_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _row(
    family: str, *parts: Part, names: Mapping[str, str] | None = None, **traits: Any
) -> Architecture:
    """An architecture with the layers of a Llama, but for `names` and `traits`."""
    own = {**_LLAMA_LAYER, **(names or {})}
    return Architecture(
        family=family, parts=(_LAYERED, *parts), names=own, outer=_LLAMA_OUTER, **traits
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _row(
        "llama",
        Part(mistral_window),
        Part(mixtral, _EXPERT_KEYS),
        names=_ROUTED,
        paired=True,
    ),
    "qwen2": _row("qwen2", _SWITCHED_WINDOW, qkv_bias=True),
    "qwen3": _row("qwen3", _SWITCHED_WINDOW),
    "phi3": _row("phi3", _WINDOW, absent=("ffn_gate",), positions=Positions(has_factors=True)),
    "gpt2": Architecture(
        family="gpt2",
        parts=(Part(gpt2),),
        names={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        outer={
            "token_embd": "wte",
            "position_embd": "wpe",
            "output_norm": "ln_f",
            "output": "lm_head",
        },
        stem="h.",
        absent=("ffn_gate",),
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "qwen2moe": _row(
        "qwen2_moe",
        _SWITCHED_WINDOW,
        _EXPERTS,
        Part(shared_expert, ("expert_shared_feed_forward_length",)),
        names=_SHARED,
        qkv_bias=True,
    ),
    "qwen3moe": _row(
        "qwen3_moe",
        _SWITCHED_WINDOW,
        _EXPERTS,
        names=_ROUTED,
        settings={"norm_topk_prob": True},
    ),
    "gemma2": _row(
        "gemma2",
        mixed_windows(4096),
        soft_cap("attn"),
        soft_cap("final"),
        gemma_scale(46),
        names=_AROUND,
        settings={"hidden_activation": "gelu_pytorch_tanh"},
        positions=Positions(by_kind=True),
        above_one=True,
    ),
    "gemma3": _row(
        "gemma3_text",
        mixed_windows(0),
        soft_cap("final"),
        gemma_scale(62),
        names=_AROUND,
        settings={"hidden_activation": "gelu_pytorch_tanh"},
        positions=Positions(by_kind=True, stretches_local=False, local_theta=10000.0),
        above_one=True,
    ),
    "gemma": _row("gemma", _activation("gelu_pytorch_tanh"), above_one=True),
    "granite": _row("granite", _GRANITE, Part(granite_mixture, _EXPERT_KEYS), **_GRANITE_TENSORS),
    "granitemoe": _row(
        "granite", _GRANITE, Part(granite_mixture, _EXPERT_KEYS), **_GRANITE_TENSORS
    ),
    "minicpm": _row("granite", _GRANITE, paired=True),
    "internlm2": _row("llama", paired=True),
    "xverse": _row("llama", paired=True),
    "exaone": _row("llama"),
    "pangu-embedded": _row("llama"),
    "orion": _row("orion", centred("layer_norm_eps")),
    "stablelm": _row(
        "stablelm", centred("layer_norm_eps"), Part(stablelm), turns_in_part=True, out_bias=False
    ),
    "qwen": _row("qwen", Part(halved_ffn), qkv_bias=True),
    "olmo2": _row(
        "olmo2",
        Part(olmo3, ("attention.sliding_window_pattern", "rope.freq_base_swa")),
        names=_AFTER,
        absent=_NO_NORMS_BEFORE,
        positions=Positions(by_kind=True, stretches_local=False, in_windows=True),
    ),
    "olmoe": _row("olmoe", _EXPERTS, names=_ROUTED),
    "exaone4": _row("exaone4", mixed_windows(0), names=_AFTER, absent=_NO_NORMS_BEFORE),
    "cohere2": _row(
        "cohere2",
        mixed_windows(4096),
        Part(cohere, ("logit_scale",)),
        centred("layer_norm_eps"),
        absent=("ffn_norm",),
    ),
    "command-r": _row(
        "cohere",
        Part(cohere, ("logit_scale",)),
        centred("layer_norm_eps"),
        absent=("ffn_norm",),
    ),
    "seed_oss": _row(
        "seed_oss",
        Part(seed_oss),
        names={"post_attention_norm": "post_attention_layernorm"},
        absent=("ffn_norm",),
    ),
    "mistral3": _row("ministral3", paired=True),
    "qwen2vl": _row("qwen2", _SWITCHED_WINDOW, _SECTIONS, qkv_bias=True),
    "qwen3vl": _row("qwen3", _SECTIONS),
    "qwen3vlmoe": _row(
        "qwen3_moe", _EXPERTS, _SECTIONS, names=_ROUTED, settings={"norm_topk_prob": True}
    ),
    "mellum": _row(
        "mellum", mixed_windows(0), _EXPERTS, names=_ROUTED, positions=Positions(by_kind=True)
    ),
    "deepseek": _row("deepseek", routed(has_sigmoids=False), names=_DEEPSEEK, paired=True),
    "dots1": _row("dots1", routed(has_sigmoids=True), names=_DEEPSEEK),
    "bailingmoe": _row(
        "deepseek",
        routed(has_sigmoids=False, has_dense=False),
        names=_DEEPSEEK,
        paired=True,
    ),
    "glm4moe": _row(
        "glm4_moe",
        routed(has_sigmoids=True),
        Part(glm4_moe, ("rope.dimension_sections",)),
        turns_in_part=True,
        out_bias=False,
        names={**_DEEPSEEK, "post_attention_norm": "post_attention_layernorm"},
        absent=("ffn_norm",),
    ),
    "minimax-m2": _row(
        "minimax_m2",
        routed(has_sigmoids=True, normalises=True),
        names=_DEEPSEEK,
        turns_in_part=True,
    ),
    "arcee": _row("arcee", _activation("relu2"), paired=True, absent=("ffn_gate",)),
    "nemotron": _row(
        "nemotron",
        _activation("relu2"),
        centred("norm_eps"),
        absent=("ffn_gate",),
        above_one=True,
        turns_in_part=True,
    ),
    "starcoder2": _row(
        "starcoder2",
        _WINDOW,
        _activation("gelu_pytorch_tanh"),
        centred("norm_epsilon"),
        absent=("ffn_gate",),
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "plamo": _row("plamo", absent=("ffn_norm",)),
    "glm4": _row(
        "glm4", _SECTIONS, names=_AROUND, absent=("ffn_gate",), turns_in_part=True, out_bias=False
    ),
    "ernie4_5": _row("ernie4_5", _SECTIONS),
    "ernie4_5-moe": _row(
        "ernie4_5_moe",
        routed(has_sigmoids=False, normalises=True),
        names=_DEEPSEEK,
    ),
    "qwen35": _row("qwen3_5_text", _RECURRENT, _SECTIONS, **_HYBRID, tiled=True),
    "qwen35moe": _row(
        "qwen3_5_moe_text", _RECURRENT, _SECTIONS, _HYBRID_EXPERTS, **_HYBRID, tiled=True
    ),
    "qwen3next": _row(
        "qwen3_next", _RECURRENT, _HYBRID_EXPERTS, **_HYBRID, settings={"norm_topk_prob": True}
    ),
    "smollm3": _row("smollm3", _WINDOW, paired=True),
    "gpt-oss": _row(
        "gpt_oss",
        mixed_windows(None),
        Part(experts_alone, _EXPERT_KEYS),
        names={
            **_EXPERT_NAMES,
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
        },
        positions=Positions(by_kind=True, is_yarn=True),
        absent=("ffn_norm",),
    ),
}


def sizes_of(header: Header) -> Sizes:
    """The settings of a file. Raises CheckpointError if its architecture is not supported."""
    found = JsonObject(str(header.path), header.metadata).text("general.architecture")
    if found not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: GGUF files of architecture {found!r} are not supported.",
            hint=f"supported: {', '.join(ARCHITECTURES)}. The folder with safetensors that the "
            "file was made from may run; `outrider models pull` fetches it",
        )
    return Sizes(header, found, ARCHITECTURES[found])


def first_missing(sizes: Sizes) -> str | None:
    """The GGUF name of the first missing tensor that models of this kind have; None if none."""
    row, entries = sizes.row, sizes.header.entries
    stored = {name.split(".")[2] for name in entries if name.startswith("blk.")}
    own = {part for part, name in row.names.items() if _LLAMA_LAYER.get(part) != name}
    if not any(part.endswith("_exps") for part in stored):
        own = {part for part in own if "_exps" not in part and "_shexp" not in part}
        own -= {"ffn_gate_inp", "ffn_gate_inp_shexp"}
    parts = {"attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", *own}
    if not any(part.endswith("_exps") for part in own):
        parts |= {*_FFN}
    if "attn_qkv" in stored:
        parts = parts - {"attn_q", "attn_k", "attn_v"} | {"attn_qkv"}
    parts -= {*row.absent}
    num_layers = sizes.integer("block_count")
    names = ["token_embd.weight"]
    names += [f"blk.{n}.{part}.weight" for n in range(num_layers) for part in sorted(parts)]
    return next((name for name in [*names, "output_norm.weight"] if name not in entries), None)
