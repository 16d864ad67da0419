"""A tiny hybrid with MTP blocks beside it, and what the first one computes, in plain PyTorch.

Shapes:  P = tokens, D = hidden size, E = head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.nn import functional

from doubles.tiny_checkpoints import save_tensors
from doubles.tiny_hybrids import hybrid_config, hybrid_shapes, write_hybrid

Tensors = dict[str, Tensor]
# The layer of the tiny hybrids that attends.
_LIKE = "model.layers.1."


def write_hybrid_with_mtp(folder: Path, name: str, *, depth: int = 1, **changes: Any) -> Tensors:
    """Write the stored hybrid of this name with `depth` blocks; all of its tensors."""
    config = hybrid_config(name, mtp_num_hidden_layers=depth, **changes)
    path = write_hybrid(folder, config) / "model.safetensors"
    own: Tensors = load_file(path)
    tensors = {**own, **_mtp_tensors(config, depth)}
    save_tensors(path, tensors)
    return tensors


def _mtp_tensors(config: Mapping[str, Any], depth: int) -> Tensors:
    rng, size = torch.Generator().manual_seed(6), config["hidden_size"]
    layer = {
        name.removeprefix(_LIKE): shape
        for name, shape in hybrid_shapes(config).items()
        if name.startswith(_LIKE)
    }
    shapes: dict[str, tuple[int, ...]] = {
        "pre_fc_norm_embedding.weight": (size,),
        "pre_fc_norm_hidden.weight": (size,),
        "norm.weight": (size,),
        "fc.weight": (size, 2 * size),
    }
    for index in range(depth):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    found: Tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=rng)
        found[f"mtp.{name}"] = 0.2 * noise if len(shape) == 1 else 1.5 * noise / shape[-1] ** 0.5
    return found


def gated_definition(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], embedded_PD: Tensor, states_PD: Tensor
) -> Tensor:
    """What the output head reads, and the next turn as well: of block 0 with a dense FFN."""
    eps, head = config["rms_norm_eps"], config["head_dim"]

    def weight(name: str) -> Tensor:
        return tensors[f"mtp.{name}.weight"]

    def normed(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], 1 + weight(name), eps)

    def heads(x_PD: Tensor, name: str, size: int) -> Tensor:
        rows = x_PD @ weight(f"layers.0.self_attn.{name}_proj").T
        return rows.view(len(rows), -1, size)

    pair = [normed(embedded_PD, "pre_fc_norm_embedding"), normed(states_PD, "pre_fc_norm_hidden")]
    x_PD = torch.cat(pair, dim=-1) @ weight("fc").T
    y_PD = normed(x_PD, "layers.0.input_layernorm")
    query, gate = heads(y_PD, "q", 2 * head).chunk(2, dim=-1)
    turns = int(head * config["rope_parameters"]["partial_rotary_factor"])
    q = _turned(normed(query, "layers.0.self_attn.q_norm"), turns)
    k = _turned(normed(heads(y_PD, "k", head), "layers.0.self_attn.k_norm"), turns)
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    k, v = k.repeat_interleave(groups, 1), heads(y_PD, "v", head).repeat_interleave(groups, 1)
    seen = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True
    )
    gated = seen[0].transpose(0, 1) * gate.sigmoid()
    x_PD = x_PD + gated.flatten(1) @ weight("layers.0.self_attn.o_proj").T
    y_PD = normed(x_PD, "layers.0.post_attention_layernorm")
    up = functional.silu(y_PD @ weight("layers.0.mlp.gate_proj").T)
    up = up * (y_PD @ weight("layers.0.mlp.up_proj").T)
    return normed(x_PD + up @ weight("layers.0.mlp.down_proj").T, "norm")


def _turned(x_PHE: Tensor, turns: int) -> Tensor:
    half = turns // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(len(x_PHE), dtype=torch.float32)[:, None, None] * rates
    first, second, still = x_PHE[..., :half], x_PHE[..., half:turns], x_PHE[..., turns:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, still], dim=-1)
