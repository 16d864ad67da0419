"""Latent attention (MLA): a token's keys and values of all heads come from one latent in the cache.

DeepSeek-V2 (arXiv 2405.04434), 2.1.2: the product of a query with a key is that of the query, by
the transposed key matrix, with the latent; and the sum of values is the value matrix of the sum of
latents. So attention reads latents as they are stored, for one row and for many by the same sums,
and no key or value of a head is ever computed. Each row of the cache is key and value at once
(csrc/latent.cpp has its layout).

Shapes:  N = tokens, D = hidden size, E = queries, key and value as attention reads them,
         P = outputs of the first product, R = rank of the latent, T = numbers that turn,
         A = heads x row size, V = heads x value size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import given
from outrider.core.spec import LatentShape
from outrider.kernels.native.forward import LayerWeights
from outrider.kernels.native.layers import LatentWeights
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedLinear
from outrider.models.configs import LayeredConfig
from outrider.models.weights import WeightReader


def read_latent(reader: WeightReader, config: LayeredConfig, prefix: str) -> Mapping[str, Any]:
    """Read the attention of a layer, as a MixerReader does."""
    shape, hidden = given(config.latent, "sizes of latents"), config.hidden_size
    name, rank = f"{prefix}self_attn.", shape.query_rank
    latent = {f"{name}kv_a_proj_with_mqa": shape.row_size}
    first = {f"{name}q_a_proj": rank} if rank else {f"{name}q_proj": shape.query_size}
    keys, values = _matrices_of_heads(reader, shape, name)
    weights = LatentWeights(
        shape,
        keys,
        values,
        norm_R=reader.vector(f"{name}kv_a_layernorm.weight", shape.rank),
        query_norm_Q=reader.vector(f"{name}q_a_layernorm.weight", rank) if rank else None,
        queries=reader.linear({f"{name}q_b_proj": shape.query_size}, rank) if rank else None,
    )
    if (native := reader.kernels.latent) is not None:
        weights = replace(weights, native=native(weights))
    # Queries that come from the residual have no bias.
    bias = reader.bias({**first, **latent} if rank else latent, present=config.qkv_bias)
    if bias is not None and not rank:
        bias = torch.cat([bias.new_zeros(shape.query_size), bias])
    out = {f"{name}o_proj": hidden}
    return {
        "qkv": reader.linear({**first, **latent}, hidden),
        "qkv_bias_E": bias,
        "out": reader.linear(out, shape.num_heads * shape.value_dim),
        "out_bias_D": reader.bias(out, present=config.out_bias),
        "latent": weights,
    }


def _matrices_of_heads(
    reader: WeightReader, shape: LatentShape, name: str
) -> tuple[list[PackedLinear], list[PackedLinear]]:
    """The matrices of every head for keys and for values. Newer GGUF files have them apart."""
    count, rank, sizes = shape.num_heads, shape.rank, (shape.still, shape.value_dim)
    keys, values = f"{name}k_b_proj", f"{name}v_b_proj"
    if f"{keys}.weight" not in reader:
        return reader.two_by_head(f"{name}kv_b_proj", count, sizes, rank)
    if count == 1:  # A file has no axis of size 1.
        single = reader.linear({keys: rank}, shape.still)
        return [single], [reader.linear({values: shape.value_dim}, rank)]
    apart = reader.stacked({f"{keys}.weight": rank}, count, shape.still)
    return apart, reader.stacked({f"{values}.weight": shape.value_dim}, count, rank)


def fill_heads(kernels: Kernels, layer: LayerWeights, x_ND: Tensor, qkv_NE: Tensor) -> None:
    """Fill the queries of all heads, and the key, from the normed residual; no value is written."""
    latent = given(layer.latent, "latent")
    if latent.native is not None:
        kernels.latent_queries(latent.native, layer.qkv, layer.qkv_bias_E, x_ND, qkv_NE)
        return
    shape, num_rows = latent.shape, len(x_ND)
    first_NP = qkv_NE.new_empty(num_rows, shape.first_size)
    kernels.linear(x_ND, given(layer.qkv, "attention"), first_NP)
    if layer.qkv_bias_E is not None:
        first_NP.add_(layer.qkv_bias_E)
    before = shape.first_size - shape.row_size
    parts = [before, shape.rank, shape.turning]
    queries, latent_NR, key_NT = torch.split(first_NP, parts, dim=1)
    if latent.queries is not None and latent.query_norm_Q is not None:
        vector = _normed(kernels, queries, latent.query_norm_Q, shape.eps)
        queries = qkv_NE.new_empty(num_rows, shape.query_size)
        kernels.linear(vector, latent.queries, queries)
    rows = qkv_NE.view(num_rows, shape.num_heads + 2, shape.row_size)
    heads = queries.reshape(num_rows, shape.num_heads, -1)
    still, turning = torch.split(heads, [shape.still, shape.turning], dim=2)
    absorbed_NR = qkv_NE.new_empty(num_rows, shape.rank)
    for head, keys in enumerate(latent.keys):
        kernels.linear(still[:, head].contiguous(), keys, absorbed_NR)
        rows[:, head] = _joined(shape, absorbed_NR, turning[:, head])
    latent_NR = _normed(kernels, latent_NR, latent.norm_R, shape.eps)
    rows[:, shape.num_heads] = _joined(shape, latent_NR, key_NT)


def values_of_heads(kernels: Kernels, latent: LatentWeights, attended_NA: Tensor) -> Tensor:
    """The values of all heads, [N, V], from what they attended to; in new memory."""
    shape, num_rows = latent.shape, len(attended_NA)
    out_NV = attended_NA.new_empty(num_rows, shape.num_heads * shape.value_dim)
    if latent.native is not None:
        kernels.latent_values(latent.native, attended_NA, out_NV)
        return out_NV
    rows = attended_NA.view(num_rows, shape.num_heads, 2, -1)
    latents = rows[..., shape.turning // 2 :].flatten(2)
    value = attended_NA.new_empty(num_rows, shape.value_dim)
    for head, values in enumerate(latent.values):
        kernels.linear(latents[:, head].contiguous(), values, value)
        out_NV[:, head * shape.value_dim : (head + 1) * shape.value_dim] = value
    return out_NV


def _normed(kernels: Kernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = x.contiguous()
    kernels.rms_norm(out, weight, eps, out)
    return out


def _joined(shape: LatentShape, latent_NR: Tensor, turning_NT: Tensor) -> Tensor:
    """Rows of the cache: first partners of pairs, half of the latent, and the second ones."""
    if shape.interleaved:
        first, second = turning_NT[:, ::2], turning_NT[:, 1::2]
    else:
        first, second = turning_NT.chunk(2, dim=1)
    low, high = latent_NR.chunk(2, dim=1)
    return torch.cat([first, low, second, high], dim=1)
