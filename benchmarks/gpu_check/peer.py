"""A peer in the manner of gpt-fast, written here: plain PyTorch, a static cache, one CUDA graph.

Batch 1, greedy, bfloat16, the same shapes; every layer through torch.compile where that works, and
library kernels where it does not. It reads the same number of weights as our model does.

Shapes:  D = hidden size, G = KV heads, R = query heads each, H = head size, T = cache positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpu_check import models
from gpu_check.setting import Setting, seconds_of
from torch import Tensor
from torch.nn import functional

from outrider.engine.cuda_graph.program import launcher_for
from outrider.lab.inflate import ModelShape

LayerStep = Callable[..., Tensor]
CONTEXT, LENGTH = 256, 2048
HEAD = 64


@dataclass(frozen=True, slots=True)
class Layer:
    norms_2D: Tensor
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    cache_2GTH: Tensor


def peer(setting: Setting, record: dict[str, Any]) -> None:
    record["cells"] = []
    kinds: list[tuple[str, LayerStep]] = [("library kernels", layer_step)]
    if setting.on_cuda:
        # Last, for compiling may take what is left of the section's budget.
        kinds.append(("torch.compile", torch.compile(layer_step, dynamic=False)))
    for kind, layer in kinds:
        for name, shape in setting.shapes.items():
            record["cells"].append(cell := {"shape": name, "kind": kind})
            try:
                cell |= _measure(setting, shape, layer)
            except RuntimeError as error:
                logging.exception("peer %s", kind)
                cell["refused"] = str(error).splitlines()[0]
            models.let_go()


def _measure(setting: Setting, shape: ModelShape, layer: LayerStep) -> dict[str, Any]:
    peer = Peer(shape, setting)
    launch = launcher_for(setting.device).make(lambda: peer.step(layer), peer.rewind)
    seconds = seconds_of(launch, setting, calls=setting.rounds)
    return {"ms": 1e3 * seconds, "tokens_per_second": 1 / seconds}


class Peer:
    """One token a step; `position` and `token` live on the device."""

    def __init__(self, shape: ModelShape, setting: Setting) -> None:
        head = HEAD if not setting.quick else 32
        width, kv = shape.num_heads * head, shape.num_kv_heads * head
        make = {"device": setting.device, "dtype": setting.dtype}
        length = 64 if setting.quick else LENGTH

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, **make).mul_(0.02)

        self.layers = [
            Layer(
                torch.ones(2, shape.hidden_size, **make),
                weight(width + 2 * kv, shape.hidden_size),
                weight(shape.hidden_size, width),
                weight(2 * shape.ffn_size, shape.hidden_size),
                weight(shape.hidden_size, shape.ffn_size),
                torch.zeros(2, shape.num_kv_heads, length, head, **make),
            )
            for _ in range(shape.num_layers)
        ]
        self.embedding = weight(setting.vocabulary, shape.hidden_size)
        self.output = weight(setting.vocabulary, shape.hidden_size)
        self.norm_D = torch.ones(shape.hidden_size, **make)
        self.token_1 = torch.zeros(1, dtype=torch.int64, device=setting.device)
        self.position_1 = torch.zeros(1, dtype=torch.int64, device=setting.device)
        self.start = 8 if setting.quick else CONTEXT

    def rewind(self) -> None:
        self.position_1.fill_(self.start)

    def step(self, layer: LayerStep) -> None:
        with torch.inference_mode():
            x_1D = self.embedding[self.token_1]
            for one in self.layers:
                x_1D = layer(
                    x_1D, one.norms_2D, one.qkv, one.out, one.gate_up, one.down, one.cache_2GTH,
                    self.position_1,
                )  # fmt: skip
            logits_1V = functional.linear(normed(x_1D, self.norm_D), self.output)
            self.token_1.copy_(logits_1V.argmax(-1))
            # The cache is a ring here, so that a timing may take as many steps as it wants.
            length = self.layers[0].cache_2GTH.shape[2]
            self.position_1.copy_((self.position_1 + 1) % length)


def normed(x_1D: Tensor, weight_D: Tensor) -> Tensor:
    x_1D = x_1D.float()
    return (x_1D * torch.rsqrt(x_1D.square().mean(-1, keepdim=True) + 1e-5)).to(
        weight_D.dtype
    ) * weight_D


def layer_step(  # noqa: PLR0913 torch.compile takes tensors, not objects, without a guard each
    x_1D: Tensor,
    norms_2D: Tensor,
    qkv: Tensor,
    out: Tensor,
    gate_up: Tensor,
    down: Tensor,
    cache_2GTH: Tensor,
    position_1: Tensor,
) -> Tensor:
    _, num_kv, length, head = cache_2GTH.shape
    mixed = functional.linear(normed(x_1D, norms_2D[0]), qkv).view(-1, head)
    q, k, v = mixed[: -2 * num_kv], mixed[-2 * num_kv : -num_kv], mixed[-num_kv:]
    angle = position_1 * torch.arange(1, head // 2 + 1, device=x_1D.device) / head
    q, k = turned(q, angle), turned(k, angle)
    cache_2GTH[:, :, position_1] = torch.stack([k, v])[:, :, None]
    seen = torch.arange(length, device=x_1D.device) <= position_1
    attended = functional.scaled_dot_product_attention(
        q.view(1, num_kv, -1, head),
        cache_2GTH[0][None],
        cache_2GTH[1][None],
        attn_mask=seen[None, None, None],
    )
    x_1D = x_1D + functional.linear(attended.reshape(1, -1), out)
    gate, up = functional.linear(normed(x_1D, norms_2D[1]), gate_up).chunk(2, -1)
    return x_1D + functional.linear(functional.silu(gate) * up, down)


def turned(heads: Tensor, angle: Tensor) -> Tensor:
    low, high = heads.chunk(2, -1)
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
