"""Folders of small random heads for a target, and what they compute, in plain PyTorch.

Shapes:  B = sequences, D = hidden size, C = context tokens, K = places, L = captured layers,
         V = vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from doubles.tiny_checkpoints import save_tensors
from outrider.core.spec import ModelSpec
from outrider.plugins.heads.medusa import MedusaConfig
from outrider.plugins.heads.medusa import config_values as medusa_values
from outrider_lab.models.block_net import BlockConfig
from outrider_lab.models.block_net import config_values as block_values

Tensors = dict[str, Tensor]


def random_tensor(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng) / shape[-1] ** 0.5


def medusa_tensors(
    config: MedusaConfig, spec: ModelSpec, *, own: Sequence[int] = (), seed: int = 3
) -> Tensors:
    """Under the published names; heads in `own` have a last matrix of their own."""
    rng = torch.Generator().manual_seed(seed)
    hidden = spec.hidden_size
    tensors: Tensors = {}
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = random_tensor(rng, hidden, hidden)
            tensors[f"{head}.{layer}.linear.bias"] = random_tensor(rng, hidden)
        if head in own:
            last = f"{head}.{config.num_layers}.weight"
            tensors[last] = random_tensor(rng, spec.vocab_size, hidden)
    return tensors


def write_medusa(
    folder: Path,
    config: MedusaConfig,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    *,
    file: str = "medusa_lm_head.safetensors",
) -> Path:
    return _write(folder, medusa_values(config, spec), tensors, file)


def medusa_logits(
    tensors: Mapping[str, Tensor], config: MedusaConfig, normed_BD: Tensor, head_VD: Tensor
) -> Tensor:
    """logits_HBV from the target's normed state."""
    found: list[Tensor] = []
    for head in range(config.num_heads):
        x_BD = normed_BD
        for layer in range(config.num_layers):
            name = f"{head}.{layer}.linear"
            inner_BD = x_BD @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]
            x_BD = x_BD + functional.silu(inner_BD)
        last_VD = tensors.get(f"{head}.{config.num_layers}.weight", head_VD)
        found.append(x_BD @ last_VD.T)
    return torch.stack(found)


def block_tensors(config: BlockConfig, spec: ModelSpec, *, seed: int = 4) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    hidden, ffn = spec.hidden_size, config.ffn_size
    tensors = {
        "fuse.weight": random_tensor(rng, hidden, (len(config.hidden_layers) + 1) * hidden),
        "distances.weight": random_tensor(rng, config.num_context, hidden),
        "queries.weight": random_tensor(rng, config.num_places, hidden),
        "norm.weight": 1 + random_tensor(rng, hidden),
        "confidence.weight": random_tensor(rng, 1, hidden),
        "confidence.bias": random_tensor(rng, 1),
    }
    for index in range(config.num_layers):
        layer = f"layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{norm}.weight"] = 1 + random_tensor(rng, hidden)
        for name in ("q", "k", "v", "o"):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = random_tensor(rng, hidden, hidden)
        for name in ("gate", "up"):
            tensors[f"{layer}mlp.{name}_proj.weight"] = random_tensor(rng, ffn, hidden)
        tensors[f"{layer}mlp.down_proj.weight"] = random_tensor(rng, hidden, ffn)
    return tensors


def write_block(
    folder: Path, config: BlockConfig, spec: ModelSpec, tensors: Mapping[str, Tensor]
) -> Path:
    return _write(folder, block_values(config, spec), tensors, "model.safetensors")


def block_guess(
    tensors: Mapping[str, Tensor], config: BlockConfig, read_CD: Tensor
) -> tuple[Tensor, Tensor]:
    """Of one sequence: what the target's head reads of each place, and confidences_K. `read_CD`
    has, of each context token, states and the next token's embedding, side by side."""
    hidden = tensors["norm.weight"].shape[0]
    eps = config.rms_norm_eps

    def normed(x: Tensor, name: str = "") -> Tensor:
        weight = tensors[f"{name}.weight"] if name else None
        return functional.rms_norm(x, (hidden,), weight, eps)

    parts_CD = normed(read_CD.view(len(read_CD), -1, hidden)).flatten(1)
    distances_CD = tensors["distances.weight"][-len(parts_CD) :]
    context_CD = parts_CD @ tensors["fuse.weight"].T + distances_CD
    x_KD = tensors["queries.weight"] + context_CD[-1]
    for index in range(config.num_layers):
        layer = f"layers.{index}."

        def times(x: Tensor, name: str, layer: str = layer) -> Tensor:
            return x @ tensors[f"{layer}{name}.weight"].T

        def heads(x: Tensor) -> Tensor:
            return x.view(len(x), config.num_heads, -1).transpose(0, 1)

        y_KD = normed(x_KD, f"{layer}input_layernorm")
        keys_TD = torch.cat([normed(context_CD), y_KD])
        q, k, v = (
            heads(times(rows, f"self_attn.{name}_proj"))
            for rows, name in ((y_KD, "q"), (keys_TD, "k"), (keys_TD, "v"))
        )
        shares = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        x_KD = x_KD + times((shares @ v).transpose(0, 1).flatten(1), "self_attn.o_proj")
        y_KD = normed(x_KD, f"{layer}post_attention_layernorm")
        gated = functional.silu(times(y_KD, "mlp.gate_proj")) * times(y_KD, "mlp.up_proj")
        x_KD = x_KD + times(gated, "mlp.down_proj")
    x_KD = normed(x_KD, "norm")
    sure_K = (x_KD @ tensors["confidence.weight"][0] + tensors["confidence.bias"]).sigmoid()
    return x_KD, sure_K


def _write(
    folder: Path, values: Mapping[str, object], tensors: Mapping[str, Tensor], file: str
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_tensors(folder / file, tensors)
    return folder
