"""GGUF files of the families beyond Llama's, as llama.cpp's converter writes them, in float32."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import numpy as safetensors_numpy

from doubles.gguf_writer import Gguf, from_config, module_named

ARCHITECTURES = {
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "smollm3": "smollm3",
    "gpt_oss": "gpt-oss",
}
_KEYS = {
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OWN = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
}
_MODULES = {
    "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
Numbers = np.ndarray[Any, Any]


def write_gguf(folder: Path, path: Path) -> Path:
    """Of the checkpoint in `folder`."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    read = cast("Any", safetensors_numpy).load_file
    tensors: dict[str, Numbers] = read(folder / "model.safetensors")
    file = from_config({**config, "model_type": arch}, arch)
    for key, value in config.items():
        if key in _KEYS and value is not None:
            file.metadata[f"{arch}.{_KEYS[key]}"] = value
    if arch == "gpt-oss":
        file.metadata[f"{arch}.expert_feed_forward_length"] = config["intermediate_size"]
    _rope(file, arch, config)
    own = _OWN.get(arch, {})
    for name, stored_values in _unstacked(tensors, arch).items():
        values = stored_values
        if name.startswith("blk."):
            file.add(name, np.ascontiguousarray(values))
            continue
        *outer, ending = name.split(".")
        outer = outer[1:] if outer[0] == "model" else outer
        layer = f"blk.{outer[1]}." if outer[0] == "layers" else ""
        if name.endswith("sinks"):
            outer, ending = [*outer, "sinks"], "weight"
        module = ".".join(outer[2:] if layer else outer)
        stored = own.get(module) or _MODULES.get(module) or module_named(module)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if stored == "ffn_gate_inp_shexp":
            values = values[0]
        if arch == "smollm3" and stored in ("attn_q", "attn_k"):
            key = "num_attention_heads" if stored == "attn_q" else "num_key_value_heads"
            halves = values.reshape(config[key], 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        file.add(f"{layer}{stored}.{ending}", np.ascontiguousarray(values))
    return file.write(path)


def _rope(file: Gguf, arch: str, config: Mapping[str, Any]) -> None:
    rope: dict[str, Any] = config["rope_parameters"]
    if arch == "gemma3":
        file.metadata[f"{arch}.rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    file.metadata[f"{arch}.rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        more = {"type": rope["rope_type"], "factor": rope["factor"]}
        if rope["rope_type"] == "yarn":
            more["original_context_length"] = rope["original_max_position_embeddings"]
        file.metadata |= {f"{arch}.rope.scaling.{key}": value for key, value in more.items()}


def _unstacked(tensors: Mapping[str, Numbers], arch: str) -> dict[str, Numbers]:
    """With gate, up and down of all experts in a tensor each, `blk.N.ffn_gate_exps`."""
    found: dict[str, Numbers] = {}
    experts: dict[str, dict[int, Numbers]] = {}
    for name, stored_values in tensors.items():
        values = stored_values
        before, _, after = name.partition(".mlp.experts.")
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
