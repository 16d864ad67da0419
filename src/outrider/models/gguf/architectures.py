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


def experts_alone(sizes: Sizes) -> dict[str, Any]:
    """A mixture whose experts' size is that of the FFN in config.json."""
    ffn = sizes.integer("expert_feed_forward_length")
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
    num_layers = sizes.integer("block_count")
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
_ROUTED = {**_EXPERT_NAMES, "ffn_gate_inp": "mlp.gate"}
_SHARED = {
    **_ROUTED,
    **{f"{part}_shexp": f"mlp.shared_expert.{part[4:]}_proj" for part in _FFN},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
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
    "llama": _row("llama", Part(mistral_window), paired=True),
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
    own = {part for part, name in row.names.items() if _LLAMA_LAYER.get(part) != name}
    parts = {"attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", *own}
    if not any(part.endswith("_exps") for part in own):
        parts |= {*_FFN}
    stored = {name.split(".")[2] for name in entries if name.startswith("blk.")}
    if "attn_qkv" in stored:
        parts = parts - {"attn_q", "attn_k", "attn_v"} | {"attn_qkv"}
    parts -= {*row.absent}
    num_layers = sizes.integer("block_count")
    names = ["token_embd.weight"]
    names += [f"blk.{n}.{part}.weight" for n in range(num_layers) for part in sorted(parts)]
    return next((name for name in [*names, "output_norm.weight"] if name not in entries), None)
