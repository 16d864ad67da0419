"""Small random MTP blocks in files, a hybrid with such blocks, and what a block computes.

Shapes:  P = tokens, D = hidden size, H = heads, E = head size, V = vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.nn import functional

from doubles.tiny_checkpoints import save_tensors
from doubles.tiny_hybrids import hybrid_config, hybrid_shapes, write_hybrid
from outrider.models.configs import LlamaConfig
from outrider.plugins.heads.mtp import MtpConfig, config_values

Tensors = dict[str, Tensor]


def block_like(
    target: LlamaConfig, *, depth: int = 1, family: str = "llama", reads_normed: bool = False
) -> MtpConfig:
    """Blocks that fit a target, narrower than its layers."""
    block = LlamaConfig(
        family=family,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        ffn_size=target.hidden_size,
        num_layers=depth,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_tokens=256,
        qk_norm=family == "qwen3",
    )
    return MtpConfig(block=block, reads_normed=reads_normed)


def llama_block(config: MtpConfig) -> LlamaConfig:
    assert isinstance(config.block, LlamaConfig)
    return config.block


def mtp_tensors(config: MtpConfig, *, first: int = 0, seed: int = 3) -> Tensors:
    """Under the names of layers `first` and on."""
    rng = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for index in range(first, first + config.depth):
        for name, shape in _shapes(llama_block(config)).items():
            noise = torch.randn(shape, generator=rng)
            scaled = 1 + 0.1 * noise if len(shape) == 1 else 1.5 * noise / shape[-1] ** 0.5
            found[f"model.layers.{index}.{name}.weight"] = scaled
    return found


def _shapes(block: LlamaConfig) -> dict[str, tuple[int, ...]]:
    size, ffn = block.hidden_size, block.ffn_size
    query, kv = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "enorm": (size,),
        "hnorm": (size,),
        "eh_proj": (size, 2 * size),
        "input_layernorm": (size,),
        "self_attn.q_proj": (query, size),
        "self_attn.k_proj": (kv, size),
        "self_attn.v_proj": (kv, size),
        "self_attn.o_proj": (size, query),
        "post_attention_layernorm": (size,),
        "mlp.gate_proj": (ffn, size),
        "mlp.up_proj": (ffn, size),
        "mlp.down_proj": (size, ffn),
        "shared_head.norm": (size,),
    }
    if block.qk_norm:
        shapes |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (block.head_dim,))
    return shapes


def write_mtp(folder: Path, config: MtpConfig, tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_values(config)))
    save_tensors(folder / "model.safetensors", tensors)
    return folder


def mtp_definition(
    tensors: Mapping[str, Tensor], block: LlamaConfig, embedded_PD: Tensor, states_PD: Tensor
) -> tuple[Tensor, Tensor]:
    """(what the output head reads, the block's own states), each of shape [P, D], of block 0."""
    eps = block.rms_norm_eps

    def weight(name: str) -> Tensor:
        return tensors[f"model.layers.0.{name}.weight"]

    def normed(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight(name), eps)

    pair = torch.cat([normed(embedded_PD, "enorm"), normed(states_PD, "hnorm")], dim=-1)
    x_PD = pair @ weight("eh_proj").T
    y_PD = normed(x_PD, "input_layernorm")

    def heads(name: str) -> Tensor:
        rows = y_PD @ weight(f"self_attn.{name}_proj").T
        return rows.view(len(rows), -1, block.head_dim)

    q, k, v = heads("q"), heads("k"), heads("v")
    if block.qk_norm:
        q, k = normed(q, "self_attn.q_norm"), normed(k, "self_attn.k_norm")
    q, k = _turned(q, block.rope.theta), _turned(k, block.rope.theta)
    groups = block.num_heads // block.num_kv_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    seen = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True
    )
    x_PD = x_PD + seen[0].transpose(0, 1).flatten(1) @ weight("self_attn.o_proj").T
    y_PD = normed(x_PD, "post_attention_layernorm")
    up = functional.silu(y_PD @ weight("mlp.gate_proj").T) * (y_PD @ weight("mlp.up_proj").T)
    x_PD = x_PD + up @ weight("mlp.down_proj").T
    return normed(x_PD, "shared_head.norm"), x_PD


def _turned(x_PHE: Tensor, theta: float) -> Tensor:
    half = x_PHE.shape[-1] // 2
    rates = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(len(x_PHE), dtype=torch.float32)[:, None, None] * rates
    first, second = x_PHE[..., :half], x_PHE[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


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
    q = _turned_hybrid_mtp(normed(query, "layers.0.self_attn.q_norm"), turns)
    k = _turned_hybrid_mtp(normed(heads(y_PD, "k", head), "layers.0.self_attn.k_norm"), turns)
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


def _turned_hybrid_mtp(x_PHE: Tensor, turns: int) -> Tensor:
    half = turns // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(len(x_PHE), dtype=torch.float32)[:, None, None] * rates
    first, second, still = x_PHE[..., :half], x_PHE[..., half:turns], x_PHE[..., turns:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, still], dim=-1)
