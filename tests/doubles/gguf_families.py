"""GGUF files of the families beyond Llama's, as llama.cpp's converter writes them, in float32."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import numpy as safetensors_numpy

from doubles.gguf_writer import Gguf, Stored, from_config, module_named

ARCHITECTURES = {
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), "gemma4"),
    "gemma4_assistant": "gemma4-assistant",
    "smollm3": "smollm3",
    "gpt_oss": "gpt-oss",
    "gemma": "gemma",
    "mixtral": "llama",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "exaone4": "exaone4",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "seed_oss": "seed_oss",
    "stablelm": "stablelm",
    "arcee": "arcee",
    "nemotron": "nemotron",
    "starcoder2": "starcoder2",
    "glm4": "glm4",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "dots1": "dots1",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "apertus": "apertus",
    "exaone_moe": "exaone-moe",
    "hy_v3": "hy_v3",
    "granite_swa": "granite_swa",
    "granitemoe_swa": "granite_swa",
    "glm": "chatglm",
    "phi": "phi2",
    "gpt_neox": "gptneox",
    "falcon": "falcon",
    "olmo": "olmo",
    "jais2": "jais2",
    "muse_glimmer": "muse-glimmer",
    "afmoe": "afmoe",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2"),
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
}
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
# Queries and keys of these are stored with neighbours as pairs.
_PAIRED = (
    "smollm3",
    "llama",
    "granite",
    "granitemoe",
    "granite_swa",
    "arcee",
    "olmo",
    "muse-glimmer",
)
_KEYS = {
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "backbone_hidden_size": "embedding_length_out",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "router_scaling_factor": "expert_weights_scale",
    "route_scale": "expert_weights_scale",
    "num_dense_layers": "leading_dense_block_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "attention_multiplier": "attention.scale",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_SHARED_EXPERTS = {
    f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")
}
_RECURRENT = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
_NUMBERED_MTP = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}
_SHARED_MLP = {
    f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")
}
_HUNYUAN = {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate.wg": "ffn_gate_inp",
    **_SHARED_MLP,
}
_OWN: Mapping[str, Mapping[str, str]] = {
    "phi2": {
        "self_attn.dense": "attn_output",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
        "final_layernorm": "output_norm",
    },
    "gptneox": {
        "embed_in": "token_embd",
        "embed_out": "output",
        "final_layer_norm": "output_norm",
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "falcon": {
        "word_embeddings": "token_embd",
        "ln_attn": "attn_norm_2",
        "ln_mlp": "attn_norm",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "muse-glimmer": {**_GEMMA, "self_attn.gate_proj": "attn_gate"},
    "afmoe": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "self_attn.gate_proj": "attn_gate",
        "mlp.router.gate": "ffn_gate_inp",
    },
    "hunyuan-dense": _HUNYUAN,
    "hunyuan-moe": _HUNYUAN,
    "apertus": {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
    "hy_v3": {"mlp.router.gate": "ffn_gate_inp", **_SHARED_MLP},
    "granite_swa": {
        "block_sparse_moe.router": "ffn_gate_inp",
        "shared_mlp.input_linear": "ffn_up_shexp",
        "shared_mlp.output_linear": "ffn_down_shexp",
    },
    "deepseek2": {**_LATENT, **_NUMBERED_MTP},
    "olmo2": _AFTER,
    "exaone4": _AFTER,
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
    "glm4moe": {**_NUMBERED_MTP, "post_attention_layernorm": "post_attention_norm"},
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    **dict.fromkeys(HYBRIDS, _RECURRENT),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma4": {
        **_GEMMA,
        "embed_tokens_per_layer": "per_layer_token_embd",
        "per_layer_model_projection": "per_layer_model_proj",
        "per_layer_projection_norm": "per_layer_proj_norm",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "router.proj": "ffn_gate_inp",
        "pre_projection": "nextn.pre_projection",
        "post_projection": "nextn.post_projection",
    },
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
}
_MODULES = {
    **_SHARED_EXPERTS,
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{stored: stored for stored in ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")},
    "nextn.shared_head_norm": "nextn.shared_head_norm",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
Numbers = np.ndarray[Any, Any]


def write_gguf(
    folder: Path,
    path: Path,
    *,
    only: tuple[str, ...] = ("",),
    apart: bool = True,
    in_blocks: bool = False,
) -> Path:
    """Of the checkpoint in `folder`, with the tensors that begin in one of the ways `only`.

    Matrices of latent attention are `apart` for keys and values, as newer files have them, or one.
    Matrices are in blocks of Q8_0, if asked for, or floats."""
    config, tensors = _read(folder)
    arch = ARCHITECTURES[config["model_type"]]
    file = from_config({**config, "model_type": arch}, arch)
    _more_keys(file, arch, config)
    for key, value in config.items():
        if key in _KEYS and value is not None:
            file.metadata[f"{arch}.{_KEYS[key]}"] = value
    if arch == "gpt-oss":
        file.metadata[f"{arch}.expert_feed_forward_length"] = config["intermediate_size"]
    _rope(file, arch, config)
    own = _OWN.get(arch.removesuffix("-assistant"), {})
    if arch in HYBRIDS:
        behind = {_behind(name, config): values for name, values in tensors.items()}
        tensors = _recurrent(behind, arch, config)
    _take_curves(file, tensors)
    if arch == "deepseek2":
        tensors = _latent(file, tensors, config, apart=apart)
    if arch.startswith("gemma4"):
        tensors = {_gemma4_name(name): values for name, values in tensors.items()}
    for name, stored_values in _unstacked(tensors, arch).items():
        if name.startswith("blk."):
            _add(file, name, stored_values, in_blocks=in_blocks)
            continue
        *outer, ending = name.split(".")
        outer = outer[1:] if outer[0] in ("model", "gpt_neox", "transformer") else outer
        layer = f"blk.{outer[1]}." if outer[0] in ("layers", "h") else ""
        if name.endswith("sinks"):
            outer, ending = [*outer, "sinks"], "weight"
        module = ".".join(outer[2:] if layer else outer)
        stored = own.get(module) or _MODULES.get(module) or module_named(module)
        values = _laid_out(stored_values, arch, stored, ending, config)
        _add(file, f"{layer}{stored}.{ending}", values, in_blocks=in_blocks)
    file.tensors = {name: one for name, one in file.tensors.items() if name.startswith(only)}
    return file.write(path)


def _gemma4_name(name: str) -> str:
    """The name in the file of a tensor that is no module's weight; others as they are."""
    own = {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    }
    before, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{before}.{own[rest]}" if rest in own else name


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Numbers]]:
    """Settings and tensors of a checkpoint, or of its text model."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Numbers] = cast("Any", safetensors_numpy).load_file(
        folder / "model.safetensors"
    )
    if "text_config" not in config:
        return config, tensors
    backbone = config.get("backbone_hidden_size")
    config = {**config["text_config"], "model_type": config["model_type"]}
    if backbone:  # An assistant of Gemma 4.
        return {**config, "backbone_hidden_size": backbone}, tensors
    return config, _text_part(tensors, config)


def _text_part(tensors: Mapping[str, Numbers], config: Mapping[str, Any]) -> dict[str, Numbers]:
    """Muse Glimmer's text model, with norms of queries and keys that have its scale."""
    found = {
        name.replace("language_model.", ""): values
        for name, values in tensors.items()
        if "vision" not in name
    }
    for index in range(config["num_hidden_layers"]):
        name, ones = f"model.layers.{index}.self_attn.", np.ones(config["head_dim"], np.float32)
        found[f"{name}q_norm.weight"] = ones * np.float32(config["qk_scale_factor"])
        found[f"{name}k_norm.weight"] = ones
    return found


def _add(file: Gguf, name: str, values: Numbers, *, in_blocks: bool) -> None:
    values = np.ascontiguousarray(values)
    if not in_blocks or values.ndim < 2 or name.endswith("gate_inp.weight"):
        file.add(name, values)
        return
    blocks = values.astype(np.float32).reshape(-1, 32)
    scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype("<f2")
    codes = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
    raw = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1)
    file.tensors[name] = Stored(values.shape, "Q8_0", raw.tobytes())


def _latent(
    file: Gguf, tensors: Mapping[str, Numbers], config: Mapping[str, Any], *, apart: bool
) -> dict[str, Numbers]:
    """The tensors with the matrices of keys and values as asked for; sizes go to the file."""
    still, rank, values = (config[k] for k in ("qk_nope_head_dim", "kv_lora_rank", "v_head_dim"))
    turning, heads = config["qk_rope_head_dim"], config["num_attention_heads"]
    own = {"key_length": still + turning, "value_length": values}
    if apart:
        own = {f"{key}_mla": value for key, value in own.items()}
        own |= {"key_length": rank + turning, "value_length": rank, "head_count_kv": 1}
    file.metadata |= {f"deepseek2.attention.{key}": value for key, value in own.items()}
    if "n_routed_experts" in config:
        is_v2 = config["model_type"] == "deepseek_v2"
        file.metadata["deepseek2.expert_gating_func"] = 1 if is_v2 else 2
    if "mlp_layer_types" in config:
        file.metadata["deepseek2.leading_dense_block_count"] = 1
    scale = config["rope_parameters"].get("mscale_all_dim")
    if scale:
        file.metadata["deepseek2.rope.scaling.yarn_log_multiplier"] = 0.1 * scale
    found = dict[str, Numbers]()
    for name, matrix in tensors.items():
        stem, _, part = name.rpartition("self_attn.")
        if not apart or part != "kv_b_proj.weight":
            found[name] = matrix
            continue
        block = f"blk.{stem.split('.')[2]}."
        by_head = matrix.reshape(heads, still + values, rank)
        found[f"{block}attn_k_b.weight"] = by_head[:, :still].swapaxes(1, 2)
        found[f"{block}attn_v_b.weight"] = by_head[:, still:]
    return found


_MTP = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}


def _behind(name: str, config: Mapping[str, Any]) -> str:
    """A tensor of an MTP block as one of the layers behind the last."""
    first = config.get("num_hidden_layers", 0)
    if name.startswith("mtp.layers."):
        _, _, number, rest = name.split(".", 3)
        return f"model.layers.{first + int(number)}.{rest}"
    stem, _, ending = name.rpartition(".")
    return f"model.layers.{first}.{_MTP[stem]}.{ending}" if stem in _MTP else name


def _laid_out(
    values: Numbers, arch: str, stored: str, ending: str, config: Mapping[str, Any]
) -> Numbers:
    if arch == "muse-glimmer" and stored.endswith("norm"):
        return values + np.float32(stored not in ("output_norm", "attn_q_norm", "attn_k_norm"))
    above = arch.startswith(("gemma", "nemotron")) or arch in HYBRIDS
    above = above and not arch.startswith("gemma4")
    if above and stored.endswith("norm") and ending == "weight" and stored != "ssm_norm":
        return values + np.float32(1)
    if stored == "ffn_gate_inp_shexp":
        return values[0]
    if stored == "attn_qkv" and arch in ("gptneox", "falcon"):
        return _by_kind(values, config)
    if arch in _PAIRED and stored in ("attn_q", "attn_k"):
        key = "num_attention_heads" if stored == "attn_q" else "num_key_value_heads"
        halves = values.reshape(config[key], 2, -1, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    return values


def _take_curves(file: Gguf, tensors: dict[str, Numbers]) -> None:
    """Move the numbers of xIELU to the metadata."""
    for name in sorted(name for name in tensors if ".act_fn." in name):
        listed: list[float] = file.metadata.setdefault(f"xielu.{name.rpartition('.')[2]}", [])
        listed.append(float(tensors.pop(name).item()))


def _by_kind(values: Numbers, config: Mapping[str, Any]) -> Numbers:
    """Rows of all queries, all keys and all values of a matrix that has them by key head."""
    heads: int = config["num_attention_heads"]
    groups = heads
    if config["model_type"] == "falcon":
        is_new = config["new_decoder_architecture"]
        groups = int(config["num_kv_heads"] if is_new else 1 if config["multi_query"] else heads)
    size = config["hidden_size"] // heads
    rows = values.reshape(groups, -1, size, *values.shape[1:])
    parts = (rows[:, :-2], rows[:, -2], rows[:, -1])
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def _of_rows(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if arch in ("hunyuan-moe", "granite_swa"):
        own["expert_feed_forward_length"] = config["intermediate_size"]
    if arch == "gptneox":
        own |= {"use_parallel_residual": config["use_parallel_residual"]}
        own["attention.head_count_kv"] = config["num_attention_heads"]
    if arch == "falcon":
        own["feed_forward_length"] = config["ffn_hidden_size"]
        plain = 1 if config["multi_query"] else config["num_attention_heads"]
        is_new = config["new_decoder_architecture"]
        own["attention.head_count_kv"] = config["num_kv_heads"] if is_new else plain
    if arch == "olmo":
        own["attention.layer_norm_epsilon"] = 1e-5
        own["attention.clamp_kqv"] = config["clip_qkv"]
    if arch == "muse-glimmer":
        own["logit_scale"] = config["output_multiplier"]
    if arch == "hunyuan-moe":
        own["expert_used_count"] = config["moe_topk"][0]
    if arch in ("exaone-moe", "hy_v3"):
        own["leading_dense_block_count"] = config["mlp_layer_types"].count("dense")
    if arch == "granite_swa":
        own["attention.rope_pattern"] = [base > 0 for base in config["layer_rope_theta"]]
    return own


def _more_keys(file: Gguf, arch: str, config: Mapping[str, Any]) -> None:
    """Keys that are made of several, or of none."""
    own: dict[str, Any] = {}
    if config.get("moe_intermediate_size"):
        own["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if arch in ("dots1", "glm4moe", "minimax-m2", "exaone-moe", "hy_v3", "afmoe"):
        own["expert_gating_func"] = 2
        own["expert_weights_norm"] = True
    if arch == "minimax-m2":
        own["expert_feed_forward_length"] = config["intermediate_size"]
    if arch == "ernie4_5-moe":
        own["interleave_moe_layer_step"] = 1
    if arch in HYBRIDS:
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
        own |= {"ssm.inner_size": values, "attention.recurrent_layers": recurrent}
        own["rope.dimension_sections"] = [2, 1, 1, 0]
        depth = config.get("mtp_num_hidden_layers", 0)
        own["block_count"] = config["num_hidden_layers"] + depth
        own |= {"nextn_predict_layers": depth} if depth else {}
    own |= _of_rows(arch, config)
    if arch.startswith("gemma4"):
        own |= _gemma4_keys(file, config)
    if config.get("layer_types") and arch in (
        "cohere2",
        "olmo2",
        "exaone-moe",
        "granite_swa",
        "muse-glimmer",
        "afmoe",
    ):
        sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
        own["attention.sliding_window_pattern"] = sliding
    part = config.get("rope_parameters", {}).get("partial_rotary_factor")
    if part:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        own["rope.dimension_count"] = int(head * part)
    depth = config.get("num_nextn_predict_layers", 0)
    if arch in ("deepseek2", "glm4moe") and depth:
        own["nextn_predict_layers"] = depth
        own["block_count"] = config["num_hidden_layers"] + depth
    file.metadata |= {f"{arch}.{key}": value for key, value in own.items()}


def _gemma4_keys(file: Gguf, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes by layer; the part of a head that turns goes to the file's factors of frequencies."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    listed = config["per_layer_config"]
    whole = listed[str(slides.index(False))]
    local, heads, ffn = config["head_dim"], config["num_key_value_heads"], "intermediate_size"
    own: dict[str, Any] = {"attention.sliding_window_pattern": slides}
    for key, size in {"key_length": whole["head_dim"], "key_length_swa": local}.items():
        own |= {f"attention.{key}": size, f"attention.{key.replace('key', 'value')}": size}
    own |= {"rope.dimension_count": whole["head_dim"], "rope.dimension_count_swa": local}
    if "num_key_value_heads" in whole:
        own["attention.head_count_kv"] = [
            heads if slide else whole["num_key_value_heads"] for slide in slides
        ]
    if config["use_double_wide_mlp"]:
        first = len(slides) - config["num_kv_shared_layers"]
        own["feed_forward_length"] = [
            config[ffn] * (1 + (index >= first)) for index in range(len(slides))
        ]
    rope = config["rope_parameters"]["full_attention"]
    turning = int(whole["head_dim"] * rope["partial_rotary_factor"] / 2)
    still = whole["head_dim"] // 2 - turning
    file.add("rope_freqs.weight", np.array([1.0] * turning + [1e30] * still))
    return own


def tiled(values: Numbers, config: Mapping[str, Any], dim: int) -> Numbers:
    """Rows of value heads, stored by key head, as one head of each key head after another."""
    groups = config["linear_num_key_heads"]
    heads = values.reshape(groups, -1, dim, *values.shape[1:])
    return heads.swapaxes(0, 1).reshape(values.shape)


_BY_HEAD = ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight")


def _by_purpose(rows: Numbers, config: Mapping[str, Any], block: str) -> dict[str, Numbers]:
    """Qwen3-Next's first product, stored key head by key head, as q, k and v, and as z."""
    keys, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    shared = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    by_key = rows.reshape(keys, -1, rows.shape[1])
    parts = np.split(by_key, np.cumsum([key, key, shared]), axis=1)
    flat = [one.reshape(-1, rows.shape[1]) for one in parts]
    return {
        f"{block}attn_qkv.weight": np.concatenate(flat[:3]),
        f"{block}attn_gate.weight": flat[3],
    }


def _recurrent(
    tensors: Mapping[str, Numbers], arch: str, config: Mapping[str, Any]
) -> dict[str, Numbers]:
    """Tensors of recurrent layers in the layout of GGUF files, most of them under their names."""
    found: dict[str, Numbers] = {}
    dim, keys = config["linear_value_head_dim"], config["linear_num_key_heads"]
    num_keys = 2 * keys * config["linear_key_head_dim"]

    def moved(rows: Numbers, size: int) -> Numbers:
        return tiled(rows, config, size) if arch != "qwen3next" else rows

    for name, values in tensors.items():
        before, _, part = name.rpartition("linear_attn.")
        block = f"blk.{before.split('.')[2]}." if before else ""
        rows = values.reshape(len(values), -1) if part == "conv1d.weight" else values
        if part == "in_proj_qkvz.weight":
            found |= _by_purpose(rows, config, block)
        elif part in ("in_proj_qkv.weight", "conv1d.weight"):
            stored = "attn_qkv" if part.startswith("in") else "ssm_conv1d"
            whole = np.concatenate([rows[:num_keys], moved(rows[num_keys:], dim)])
            found[f"{block}{stored}.weight"] = whole
        elif part == "out_proj.weight":
            found[f"{block}ssm_out.weight"] = moved(rows.T, dim).T
        elif part in ("A_log", "dt_bias"):
            is_rate = part == "A_log"
            stored = "ssm_a" if is_rate else "ssm_dt.bias"
            found[f"{block}{stored}"] = moved(-np.exp(rows) if is_rate else rows, 1)
        elif part in _BY_HEAD:
            found[name] = moved(rows, dim if part == "in_proj_z.weight" else 1)
        else:
            found[name] = rows
    return found


def _rope(file: Gguf, arch: str, config: Mapping[str, Any]) -> None:
    rope: dict[str, Any] = config["rope_parameters"]
    by_kind = arch in ("gemma3", "gemma4", "gemma4-assistant")
    rope = rope if by_kind else rope.get("full_attention", rope)
    if "alpha" in rope:
        size = config["head_dim"]
        base = rope["rope_theta"] * rope["alpha"] ** (size / (size - 2))
        rope = {"rope_type": "default", "rope_theta": base}
    if by_kind:
        file.metadata[f"{arch}.rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    file.metadata[f"{arch}.rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] not in ("default", "proportional"):
        more = {"type": rope["rope_type"], "factor": rope["factor"]}
        if rope["rope_type"] == "yarn":
            more["original_context_length"] = rope["original_max_position_embeddings"]
        file.metadata |= {f"{arch}.rope.scaling.{key}": value for key, value in more.items()}


_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _usual(after: str) -> str:
    """`0.up_proj.weight` for Mixtral's `0.w3.weight`; other names as they are."""
    return ".".join(_MIXTRAL.get(part, part) for part in after.split("."))


def _granite(found: dict[str, Numbers], name: str, values: Numbers) -> bool:
    """Whether `name` is one of Granite's tensors with gate and up as one, which are taken apart."""
    if not name.endswith(("input_linear.weight", "output_linear.weight")):
        return False
    ending = "exps" if values.ndim == 3 else "shexp"
    block = f"blk.{name.split('.')[2]}."
    if "output" in name:
        found[f"{block}ffn_down_{ending}.weight"] = values
        return True
    for part, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
        found[f"{block}ffn_{part}_{ending}.weight"] = half
    return True


def _fused(found: dict[str, Numbers], name: str, values: Numbers) -> bool:
    """Whether `name` is a stack of gate and up as one, which is taken apart, or of down."""
    block = f"blk.{name.split('.')[2]}." if "experts" in name else ""
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            found[f"{block}ffn_{part}_exps.weight"] = half
    elif name.endswith("experts.down_proj"):
        found[f"{block}ffn_down_exps.weight"] = values
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def _unstacked(tensors: Mapping[str, Numbers], arch: str) -> dict[str, Numbers]:
    """With gate, up and down of all experts in a tensor each, `blk.N.ffn_gate_exps`."""
    found: dict[str, Numbers] = {}
    experts: dict[str, dict[int, Numbers]] = {}
    for name, stored_values in tensors.items():
        values = stored_values
        if "e_score_correction_bias" in name or name.endswith("mlp.expert_bias"):
            # Files of Hy3 have no ending there.
            ending = "" if arch == "hy_v3" else ".bias"
            found[f"blk.{name.split('.')[2]}.exp_probs_b{ending}"] = values.reshape(-1)
            continue
        if _granite(found, name, values) if arch != "granite_swa" else _fused(found, name, values):
            continue
        before, _, after = name.replace("block_sparse_moe", "mlp").partition(".mlp.experts.")
        after = _usual(after)
        block = f"blk.{before.split('.')[-1]}."
        if not after:
            found[name] = values
        elif arch == "gpt-oss":
            ending = "bias" if after.endswith("bias") else "weight"
            if ending == "weight":
                values = values.swapaxes(1, 2)
            if after.startswith("down"):
                found[f"{block}ffn_down_exps.{ending}"] = values
            else:
                found[f"{block}ffn_gate_exps.{ending}"] = values[:, ::2]
                found[f"{block}ffn_up_exps.{ending}"] = values[:, 1::2]
        else:
            number, part, _ = after.split(".")
            stacked = f"{block}ffn_{part.removesuffix('_proj')}_exps.weight"
            experts.setdefault(stacked, {})[int(number)] = values
    return found | {
        name: np.stack([parts[number] for number in sorted(parts)])
        for name, parts in experts.items()
    }
