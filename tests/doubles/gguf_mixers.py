"""GGUF files of hybrids with convolutions or Mamba-2, as llama.cpp's converter writes them, in
float32."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import numpy as safetensors_numpy

from doubles.gguf_writer import Gguf
from doubles.tiny_mixers import ffn_size, kinds_of, scan_sizes

Numbers = np.ndarray[Any, Any]
_BY_LAYER = ("attention.head_count_kv", "feed_forward_length")
ARCHITECTURES = {
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h",
}
_OUTER = {
    "embed_tokens": "token_embd",
    "embeddings": "token_embd",
    "norm": "output_norm",
    "norm_f": "output_norm",
    "final_layernorm": "output_norm",
    "embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
# Names of modules of layers without their first part (`self_attn`, `mixer`, ...).
_MODULES = {
    "operator_norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_layernorm": "attn_q_norm",
    "k_layernorm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "w1": "ffn_gate",
    "w3": "ffn_up",
    "w2": "ffn_down",
    "gate": "ffn_gate_inp",
    "router.layer": "ffn_gate_inp",
    "shared_experts.up_proj": "ffn_up_shexp",
    "shared_experts.down_proj": "ffn_down_shexp",
    "fc1_latent_proj": "ffn_latent_down",
    "fc2_latent_proj": "ffn_latent_up",
    "conv1d": "ssm_conv1d",
}
# Parts that mean another tensor within `mamba`, `conv` or `mixer`.
_WITHIN = {
    "mamba": {"in_proj": "ssm_in", "out_proj": "ssm_out", "norm": "ssm_norm"},
    "mixer": {"in_proj": "ssm_in", "out_proj": "ssm_out", "norm": "ssm_norm"},
    "self_attn": {"out_proj": "attn_output"},
    "conv": {
        "in_proj": "shortconv.in_proj",
        "conv": "shortconv.conv",
        "out_proj": "shortconv.out_proj",
    },
}


def write_mixer_gguf(folder: Path, path: Path, *, mtp: bool = False) -> Path:
    """The file of the checkpoint in `folder`; with `mtp` it has an MTP block behind the layers."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    if arch == "nemotron_h" and "E" in kinds_of(config):
        arch = "nemotron_h_moe"
    settings = _settings(config)
    depth = settings["block_count"]
    if mtp:
        longer = {key: [*settings[key], settings[key][-1]] for key in _BY_LAYER}
        settings |= {**longer, "block_count": depth + 1, "nextn_predict_layers": 1}
    metadata = {f"{arch}.{key}": value for key, value in settings.items()}
    metadata |= {"general.architecture": arch, "tokenizer.ggml.eos_token_id": 2}
    metadata["tokenizer.ggml.tokens"] = [f"t{i}" for i in range(config["vocab_size"])]
    file = Gguf({**metadata, "tokenizer.ggml.bos_token_id": 1})
    read = cast("Any", safetensors_numpy).load_file
    stacks: dict[str, dict[int, Numbers]] = {}
    for name, values in read(folder / "model.safetensors").items():
        before, _, after = name.partition(".experts.")
        if after:
            number, part, _ = after.split(".")
            stacked = f"blk.{before.split('.')[2]}.{_MODULES[part]}_exps.weight"
            stacks.setdefault(stacked, {})[int(number)] = values
            continue
        for stored, laid_out in _stored(config, name, values).items():
            file.add(stored, np.ascontiguousarray(laid_out))
    for stored, parts in stacks.items():
        file.add(stored, np.stack([parts[number] for number in sorted(parts)]))
    for part in ("nextn.eh_proj", "nextn.enorm", "attn_norm", "ffn_up_exps") if mtp else ():
        file.add(f"blk.{depth}.{part}.weight", np.ones((2, 2), np.float32))
    return file.write(path)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds, family = kinds_of(config), config["model_type"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    eps = next(
        config[key] for key in ("norm_eps", "rms_norm_eps", "layer_norm_epsilon") if key in config
    )
    kv_heads = [config["num_key_value_heads"] if "*" in kind else 0 for kind in kinds]
    found: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": len(kinds),
        "feed_forward_length": ffn_size(config),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": eps,
        "attention.key_length": head,
        "attention.value_length": head,
    }
    if "rope_parameters" in config:
        found["rope.freq_base"] = config["rope_parameters"]["rope_theta"]
    if family.startswith("lfm2"):
        found["shortconv.l_cache"] = config["conv_L_cache"]
    else:
        heads, dim, groups, state, taps = scan_sizes(config)
        found |= {"ssm.time_step_rank": heads, "ssm.inner_size": heads * dim}
        found |= {"ssm.group_count": groups, "ssm.state_size": state, "ssm.conv_kernel": taps}
    if family in ("granitemoehybrid", "bamba"):
        found["rope.scaling.finetuned"] = (
            family == "bamba" or config.get("position_embedding_type") == "rope"
        )
    own = {"granitemoehybrid": _granite, "lfm2_moe": _lfm2_moe, "nemotron_h": _nemotron}
    return found | own[family](config) if family in own else found


def _granite(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "attention.scale": config["attention_multiplier"],
        "feed_forward_length": config["shared_intermediate_size"],
    }
    if config["num_local_experts"]:
        found |= {
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "feed_forward_length": config["intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        }
    return found


def _lfm2_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_gating_func": 2,
    }


def _nemotron(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = kinds_of(config)
    size = config["moe_intermediate_size"] if "E" in kinds else config["intermediate_size"]
    found: dict[str, Any] = {
        "feed_forward_length": [size if kind in ("E", "-") else 0 for kind in kinds]
    }
    if "E" in kinds:
        found |= {
            "expert_count": config["n_routed_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": size,
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_weights_norm": config.get("norm_topk_prob", True),
            "expert_weights_scale": config.get("routed_scaling_factor", 1.0),
        }
    if config.get("moe_latent_size"):
        found["moe_latent_size"] = config["moe_latent_size"]
    return found


def _stored(config: Mapping[str, Any], name: str, values: Numbers) -> dict[str, Numbers]:
    """The tensors of the file that `name` becomes."""
    *module, ending = name.split(".")
    module = [part for part in module if part not in ("model", "backbone")]
    values = _scaled(config, module, values)
    if module[0] != "layers":
        return {f"{_OUTER[module[0]]}.{ending}": values}
    block, inner = f"blk.{module[1]}.", module[2:]
    if "e_score_correction_bias" in name or "expert_bias" in name:
        return {f"{block}exp_probs_b.bias": values}
    if ending in ("A_log", "D"):
        values = -np.exp(values) if ending == "A_log" else values
        return {f"{block}ssm_{ending[0].lower()}": values.reshape(-1, 1)}
    if ending == "dt_bias":
        return {f"{block}ssm_dt.bias": values}
    if inner[-1] in ("input_linear", "output_linear"):
        return _granite_net(config, f"{block}ffn_", inner, values)
    outer, part = inner[0], ".".join(inner[1:])
    stored = _WITHIN.get(outer, {}).get(part) or _MODULES[part or outer]
    if stored in ("ssm_conv1d", "shortconv.conv") and ending == "weight":
        values = values[:, 0]
    if stored == "ssm_norm":
        values = values.reshape(scan_sizes(config)[2], -1)
    if config["model_type"] == "granitemoehybrid" and stored in ("attn_q", "attn_k"):
        key = "num_attention_heads" if stored == "attn_q" else "num_key_value_heads"
        halves = values.reshape(config[key], 2, -1, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    return {f"{block}{stored}.{ending}": values}


def _granite_net(
    config: Mapping[str, Any], stem: str, inner: list[str], values: Numbers
) -> dict[str, Numbers]:
    ending = "_exps.weight" if inner[0] == "block_sparse_moe" else ".weight"
    if inner[0] == "shared_mlp" and config["num_local_experts"]:
        ending = "_shexp.weight"
    if inner[-1] == "output_linear":
        return {f"{stem}down{ending}": values}
    gate, up = np.split(values, 2, axis=-2)
    return {f"{stem}gate{ending}": gate, f"{stem}up{ending}": up}


def _scaled(config: Mapping[str, Any], module: list[str], values: Numbers) -> Numbers:
    """Falcon H1's factors become part of the weights."""
    if config["model_type"] != "falcon_h1":
        return values
    gate, down = config["mlp_multipliers"]
    taken_in = config["attention_in_multiplier"]
    if module[-1] == "in_proj":
        heads, dim, groups, state, _ = scan_sizes(config)
        sizes = (heads * dim, heads * dim, groups * state, groups * state, heads)
        factors = np.repeat(np.array(config["ssm_multipliers"], np.float32), sizes)
        return values * factors[:, None] * np.float32(config["ssm_in_multiplier"])
    factor = {
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": taken_in,
        "v_proj": taken_in,
        "k_proj": taken_in * config["key_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }.get(module[-1], 1.0)
    return values * np.float32(factor)
