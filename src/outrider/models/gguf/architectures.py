"""Architectures of GGUF files, with a row for each: settings, and names and layouts of tensors.

A new architecture is a row: the family that computes it, the parts that make its config.json
(config.py has those of all), and the names of its tensors in checkpoints.
Modules `architectures` of plugins have further rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from outrider.core.errors import CheckpointError
from outrider.core.plugins import plugin_modules
from outrider.models.gguf.config import Architecture, Part, Positions, Sizes, layered
from outrider.models.gguf.reader import Entry, Header
from outrider.models.json_object import JsonObject, contradictory

# Tensors whose rows are paired as neighbours in some architectures (checkpoint.py).
PAIRED = ("attn_q", "attn_k")
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
        raise contradictory(
            sizes.raw.where, f"{sizes.arch}.{key} has {len(slides)} entries for {num_layers} layers"
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
_SCALE_KEYS = (
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
    ("attention.scale", "attention_multiplier"),
)


def scales(sizes: Sizes) -> dict[str, Any]:
    usual = {"attention.scale": sizes.head_dim**-0.5, **_usual_scales(sizes)}
    return {
        name: sizes.number(key) if sizes.is_set(key) else usual.get(key, 1.0)
        for key, name in _SCALE_KEYS
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


EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
LAYERED, WINDOW, SWITCHED_WINDOW = (
    Part(layered),
    Part(window),
    Part(switched_window),
)
EXPERTS = Part(experts, EXPERT_KEYS)
TEMPERATURE = Part(temperature, ("attention.temperature_scale",))
SCALES = Part(scales, tuple(key for key, _ in _SCALE_KEYS))
# Parts of a head that turn with time, height and width: all the same for text.
SECTIONS = Part(lambda _: {}, ("rope.dimension_sections", "n_deepstack_layers"))


def row(
    family: str, *parts: Part, names: Mapping[str, str] | None = None, **traits: Any
) -> Architecture:
    """An architecture with the layers of a Llama, but for `names` and `traits`."""
    own = {**LLAMA_LAYER, **(names or {})}
    traits = {"outer": LLAMA_OUTER, **traits}
    return Architecture(family=family, parts=(LAYERED, *parts), names=own, **traits)


GRANITE = row(
    "granite",
    SCALES,
    Part(granite_mixture, EXPERT_KEYS),
    names={
        **ROUTED,
        **{f"{part}_shexp": f"mlp.shared_expert.{part[4:]}_proj" for part in FFN},
    },
    paired=True,
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": row(
        "llama",
        Part(mistral_window),
        Part(mixtral, EXPERT_KEYS),
        names=ROUTED,
        paired=True,
    ),
    "qwen2": row("qwen2", SWITCHED_WINDOW, qkv_bias=True),
    "qwen3": row("qwen3", SWITCHED_WINDOW),
    "phi3": row("phi3", WINDOW, absent=("ffn_gate",), positions=Positions(has_factors=True)),
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
    "qwen2moe": row(
        "qwen2_moe",
        SWITCHED_WINDOW,
        EXPERTS,
        Part(shared_expert, ("expert_shared_feed_forward_length",)),
        names=SHARED,
        qkv_bias=True,
    ),
    "qwen3moe": row(
        "qwen3_moe",
        SWITCHED_WINDOW,
        EXPERTS,
        names=ROUTED,
        settings={"norm_topk_prob": True},
    ),
    "gemma2": row(
        "gemma2",
        mixed_windows(4096),
        soft_cap("attn"),
        soft_cap("final"),
        gemma_scale(46),
        names=AROUND,
        settings={"hidden_activation": "gelu_pytorch_tanh"},
        positions=Positions(by_kind=True),
        above_one=True,
    ),
    "gemma3": row(
        "gemma3_text",
        mixed_windows(0),
        soft_cap("final"),
        gemma_scale(62),
        names=AROUND,
        settings={"hidden_activation": "gelu_pytorch_tanh"},
        positions=Positions(by_kind=True, stretches_local=False, local_theta=10000.0),
        above_one=True,
    ),
    "gemma": row("gemma", activation("gelu_pytorch_tanh"), above_one=True),
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "mistral3": row("ministral3", TEMPERATURE, paired=True),
    "smollm3": row("smollm3", WINDOW, paired=True),
    "gpt-oss": row(
        "gpt_oss",
        mixed_windows(None),
        Part(experts_alone, EXPERT_KEYS),
        names={
            **EXPERT_NAMES,
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
        },
        positions=Positions(by_kind=True, is_yarn=True),
        absent=("ffn_norm",),
    ),
}


@cache
def architectures() -> Mapping[str, Architecture]:
    """The rows of all architectures: ours, and those of plugins."""
    rows = dict(ARCHITECTURES)
    for module in plugin_modules("architectures"):
        rows |= module.ARCHITECTURES
    return rows


def sizes_of(header: Header) -> Sizes:
    """The settings of a file. Raises CheckpointError if its architecture is not supported."""
    found = JsonObject(str(header.path), header.metadata).text("general.architecture")
    rows = architectures()
    if found not in rows:
        raise CheckpointError(
            f"{header.path}: GGUF files of architecture {found!r} are not supported.",
            hint=f"supported: {', '.join(rows)}. The folder with safetensors that the "
            "file was made from may run; `outrider models pull` fetches it",
        )
    return Sizes(header, found, rows[found])


def first_missing(sizes: Sizes) -> str | None:
    """The GGUF name of the first missing tensor that models of this kind have; None if none."""
    row, entries = sizes.row, sizes.header.entries
    stored = {name.split(".")[2] for name in entries if name.startswith("blk.")}
    own = {part for part, name in row.names.items() if LLAMA_LAYER.get(part) != name}
    if not any(part.endswith("_exps") for part in stored):
        own = {part for part in own if "_exps" not in part and "_shexp" not in part}
        own -= {"ffn_gate_inp", "ffn_gate_inp_shexp"}
    parts = {"attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", *own}
    if not any(part.endswith("_exps") for part in own):
        parts |= {*FFN}
    if "attn_qkv" in stored:
        parts = parts - {"attn_q", "attn_k", "attn_v"} | {"attn_qkv"}
    parts -= {*row.absent}
    num_layers = sizes.integer("block_count")
    names = ["token_embd.weight"]
    names += [f"blk.{n}.{part}.weight" for n in range(num_layers) for part in sorted(parts)]
    return next((name for name in [*names, "output_norm.weight"] if name not in entries), None)
