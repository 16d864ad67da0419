"""GGUF files of hybrids: rows of architectures, settings of recurrent layers, tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.models.gguf.architectures import (
    DEEPSEEK,
    EXPERT_KEYS,
    FFN,
    GRANITE,
    LLAMA_OUTER,
    ROUTED_KEYS,
    SCALES,
    SECTIONS,
    SHARED,
    WINDOW,
    entry_of,
    experts,
    granite_mixture,
    routed,
    row,
)
from outrider.models.gguf.config import Architecture, Part, Positions, Sizes

MTP = {
    f"nextn.{part}": f"nextn.{part}" for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
}


# Tensors that not every layer of a hybrid has.
ONCE = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", *FFN)


SCANS = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}


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
        "mamba_conv_bias": entry_of(sizes, "ssm_conv1d", "bias") is not None,
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
    has_norm = entry_of(sizes, "ssm_norm") is not None
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
    (*EXPERT_KEYS, "expert_shared_feed_forward_length"),
)


_HYBRID: Mapping[str, Any] = {
    "names": {
        **SHARED,
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
        **MTP,
    },
    "absent": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm"),
    "above_one": True,
    "turns_in_part": True,
    "mtp": True,
}


_CONVOLUTIONS = Part(short_convolutions, ("shortconv.l_cache", "attention.recurrent_layers"))


_LFM2_NAMES = {f"shortconv.{part}": f"conv.{part}" for part in ("in_proj", "conv", "out_proj")}


_LFM2: Mapping[str, Any] = {
    "names": {**DEEPSEEK, **_LFM2_NAMES},
    "outer": {**LLAMA_OUTER, "token_embd_norm": "model.norm"},
    "absent": (*ONCE, *_LFM2_NAMES, *DEEPSEEK),
    "uneven": True,
}


_NEMOTRON_H = row(
    "nemotron_h",
    Part(
        nemotron_h,
        (*SCAN_KEYS, *ROUTED_KEYS, "moe_latent_size", "nextn_predict_layers"),
    ),
    names={
        **DEEPSEEK,
        **SCANS,
        **MTP,
        "ffn_latent_down": "mlp.fc1_latent_proj",
        "ffn_latent_up": "mlp.fc2_latent_proj",
    },
    absent=(
        *ONCE,
        *SCANS,
        *DEEPSEEK,
        *MTP,
        "ffn_latent_down",
        "ffn_latent_up",
    ),
    uneven=True,
    # Its MTP block is not read.
    mtp=True,
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen35": row("qwen3_5_text", _RECURRENT, SECTIONS, **_HYBRID, tiled=True),
    "qwen35moe": row(
        "qwen3_5_moe_text", _RECURRENT, SECTIONS, _HYBRID_EXPERTS, **_HYBRID, tiled=True
    ),
    "qwen3next": row(
        "qwen3_next", _RECURRENT, _HYBRID_EXPERTS, **_HYBRID, settings={"norm_topk_prob": True}
    ),
    "lfm2": row("lfm2", WINDOW, _CONVOLUTIONS, **_LFM2),
    "lfm2moe": row(
        "lfm2_moe",
        routed(has_sigmoids=True),
        _CONVOLUTIONS,
        # Whatever the file says.
        Part(lambda _: {"norm_topk_prob": True}),
        **_LFM2,
    ),
    "granitehybrid": row(
        "granitemoehybrid",
        SCALES,
        Part(scans, SCAN_KEYS),
        Part(granite_hybrid, (*EXPERT_KEYS, "expert_shared_feed_forward_length")),
        names={**GRANITE.names, **SCANS},
        absent=(*ONCE, *SCANS),
        paired=True,
        uneven=True,
    ),
    "falcon-h1": row(
        "falcon_h1",
        Part(scans, SCAN_KEYS),
        Part(falcon_h1),
        names=SCANS,
        absent=(*ONCE, *SCANS),
        positions=Positions(ignores_factors=True),
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
}
