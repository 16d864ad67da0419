"""Tiny random checkpoints of hybrids, named as on the hub: gated delta rules here, others in
tiny_mixers.py.

Value heads are more than key heads, values are wider than keys, norms are not what they are before
training, and feed-forward sizes are no multiples of a vector register.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from doubles.tiny_checkpoints import save_tensors
from doubles.tiny_mixers import MIXERS, Shapes, mixer_shapes
from outrider.core.spec import RecurrentCapacity
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.loading import load_model
from outrider.plugins.hybrids.model import HybridModel

_COMMON: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5": {**_COMMON, "model_type": "qwen3_5_text"},
    "qwen3_5_tied": {**_COMMON, "model_type": "qwen3_5_text", "tie_word_embeddings": True},
    "qwen3_5_moe": {**_COMMON, **_EXPERTS, "model_type": "qwen3_5_moe_text"},
    "qwen3_next": {
        **_COMMON,
        **_EXPERTS,
        "model_type": "qwen3_next",
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    **MIXERS,
}


def hybrid_config(name: str, **changes: Any) -> dict[str, Any]:
    # Configs of transformers write into the settings that they are made of.
    return deepcopy({**HYBRIDS[name], **changes})


def write_hybrid(folder: Path, config: Mapping[str, Any], *, seed: int = 0) -> Path:
    """Write config.json and safetensors into `folder` (made if need be); returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    rng = torch.Generator().manual_seed(seed)
    shapes, is_from_one = hybrid_shapes(config), config["model_type"].startswith("qwen")
    save_tensors(
        folder / "model.safetensors",
        {
            name: _random(name, shape, rng, is_from_one=is_from_one)
            for name, shape in shapes.items()
        },
    )
    return folder


@functools.cache
def stored_hybrid(name: str, seed: int = 0) -> Path:
    """A folder that lives as long as the process."""
    folder = TemporaryDirectory(prefix="outrider-hybrids-")
    atexit.register(folder.cleanup)
    return write_hybrid(Path(folder.name), hybrid_config(name), seed=seed)


def tiny_hybrid(
    name: str = "qwen3_5",
    *,
    seed: int = 0,
    capacity: ModelCapacity | None = None,
    force_reference: bool = False,
    dtype: str = "float32",
) -> HybridModel:
    options = LoadOptions(
        capacity=capacity or ModelCapacity(num_slots=256, page_size=4),
        dtype=dtype,
        device="cpu",
        force_reference=force_reference,
    )
    model = load_model(stored_hybrid(name, seed), options, name="tiny hybrid")
    assert isinstance(model, HybridModel)
    return model


def hybrid_kind(name: str, rollback: str) -> Callable[..., HybridModel]:
    """A model of tests/doubles/kinds.py, with room for the trees that its tests grow."""

    def build(
        *, vocab_size: int = 96, seed: int = 0, num_slots: int = 256, page_size: int = 4
    ) -> HybridModel:
        assert vocab_size <= 96
        states = RecurrentCapacity(
            rollback=rollback, history=24, num_sequences=4, num_checkpoints=4
        )
        capacity = ModelCapacity(
            num_slots=num_slots, page_size=page_size, max_rows=64, states=states
        )
        return tiny_hybrid(name, seed=seed, capacity=capacity)

    return build


def hybrid_shapes(config: Mapping[str, Any]) -> Shapes:
    if not config["model_type"].startswith("qwen"):
        return mixer_shapes(config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        attends = kind == "full_attention"
        shapes |= _attention(config, layer) if attends else _recurrent(config, layer)
        sparse = "num_experts" in config and index not in config.get("mlp_only_layers", [])
        shapes |= _mixture(config, f"{layer}.mlp") if sparse else _ffn(config, f"{layer}.mlp")
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _attention(config: Mapping[str, Any], layer: str) -> Shapes:
    hidden, head = config["hidden_size"], config["head_dim"]
    attended, kv = (head * config[key] for key in ("num_attention_heads", "num_key_value_heads"))
    return {
        f"{layer}.self_attn.q_proj.weight": (2 * attended, hidden),
        f"{layer}.self_attn.k_proj.weight": (kv, hidden),
        f"{layer}.self_attn.v_proj.weight": (kv, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, attended),
        f"{layer}.self_attn.q_norm.weight": (head,),
        f"{layer}.self_attn.k_norm.weight": (head,),
    }


def _recurrent(config: Mapping[str, Any], layer: str) -> Shapes:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * keys + values
    name = f"{layer}.linear_attn"
    first: Shapes = {
        f"{name}.in_proj_qkv.weight": (channels, hidden),
        f"{name}.in_proj_z.weight": (values, hidden),
        f"{name}.in_proj_b.weight": (heads, hidden),
        f"{name}.in_proj_a.weight": (heads, hidden),
    }
    if config["model_type"] == "qwen3_next":
        first = {
            f"{name}.in_proj_qkvz.weight": (channels + values, hidden),
            f"{name}.in_proj_ba.weight": (2 * heads, hidden),
        }
    return {
        **first,
        f"{name}.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        f"{name}.A_log": (heads,),
        f"{name}.dt_bias": (heads,),
        f"{name}.norm.weight": (config["linear_value_head_dim"],),
        f"{name}.out_proj.weight": (hidden, values),
    }


def _ffn(config: Mapping[str, Any], name: str, size: int | None = None) -> Shapes:
    hidden, ffn = config["hidden_size"], size or config["intermediate_size"]
    return {
        f"{name}.gate_proj.weight": (ffn, hidden),
        f"{name}.up_proj.weight": (ffn, hidden),
        f"{name}.down_proj.weight": (hidden, ffn),
    }


def _mixture(config: Mapping[str, Any], name: str) -> Shapes:
    hidden, count = config["hidden_size"], config["num_experts"]
    shapes: Shapes = {
        f"{name}.gate.weight": (count, hidden),
        f"{name}.shared_expert_gate.weight": (1, hidden),
    }
    for expert in range(count):
        shapes |= _ffn(config, f"{name}.experts.{expert}", config["moe_intermediate_size"])
    shared = config["shared_expert_intermediate_size"]
    return shapes | _ffn(config, f"{name}.shared_expert", shared)


def _random(
    name: str, shape: tuple[int, ...], rng: torch.Generator, *, is_from_one: bool = True
) -> Tensor:
    others = () if is_from_one else ("norm.weight", "norm_f.weight", ".D")
    is_one = "linear_attn" in name or name.endswith(others)
    uniform = torch.randint(-(2**20), 2**20, shape, generator=rng).float() / 2**20
    if len(shape) == 1:
        # Norms that multiply by 1 + weight, those that do not, and what sets the decay.
        return (1 if is_one else 0) + uniform / 4
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return uniform
    return uniform * 2.0 ** -round(math.log2(shape[-1]) / 2 - 1)
