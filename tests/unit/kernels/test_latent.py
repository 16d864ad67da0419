"""The native products around latent attention against the operators that define them.

Shapes:  N = tokens, D = hidden size, E = queries, key and value as attention reads them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.core.errors import given
from outrider.core.spec import LatentShape
from outrider.kernels.native.forward import LayerWeights
from outrider.kernels.native.layers import LatentWeights
from outrider.kernels.operators import Kernels
from outrider.models.latent import fill_heads, values_of_heads
from outrider.plugins.measure.timers import DeviceTimers, timed
from unit.kernels.implementations import kernels_named, randn

HIDDEN, ROWS = 40, 33
PLAIN = LatentShape(num_heads=3, rank=20, turning=6, still=10, value_dim=9)
SHAPES = {
    "from the residual": PLAIN,
    "from a vector": replace(PLAIN, query_rank=24),
    "pairs of halves": replace(PLAIN, interleaved=False),
    "one head": replace(PLAIN, num_heads=1, value_dim=16),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def layer_of(
    kernels: Kernels, shape: LatentShape, dtype: torch.dtype, *, native: bool = True
) -> LayerWeights:
    seeds = iter(range(1000))

    def matrix(*size: int) -> Tensor:
        return (randn(*size, seed=next(seeds)) * 0.3).to(dtype)

    heads, rank = range(shape.num_heads), shape.query_rank
    weights = LatentWeights(
        shape,
        [kernels.pack(matrix(shape.rank, shape.still)) for _ in heads],
        [kernels.pack(matrix(shape.value_dim, shape.rank)) for _ in heads],
        1 + randn(shape.rank, seed=1) / 4,
        1 + randn(rank, seed=2) / 4 if rank else None,
        kernels.pack(matrix(shape.query_size, rank)) if rank else None,
    )
    if native:
        weights = replace(weights, native=given(kernels.latent, "native latent")(weights))
    return LayerWeights(
        qkv=kernels.pack(matrix(shape.first_size, HIDDEN)),
        out=kernels.pack(matrix(HIDDEN, shape.num_heads * shape.value_dim)),
        qkv_bias_E=randn(shape.first_size, seed=3),
        latent=weights,
    )


def filled(kernels: Kernels, layer: LayerWeights, x_ND: Tensor) -> Tensor:
    """Queries and key; values are not written."""
    shape = given(layer.latent, "latent").shape
    used = (shape.num_heads + 1) * shape.row_size
    qkv_NE = torch.full((len(x_ND), used + shape.row_size), torch.nan)
    fill_heads(kernels, layer, x_ND, qkv_NE)
    assert bool(qkv_NE[:, used:].isnan().all())
    return qkv_NE[:, :used]


def given_by(kernels: Kernels, layer: LayerWeights, attended_NA: Tensor) -> Tensor:
    return values_of_heads(kernels, given(layer.latent, "latent"), attended_NA)


@every_shape
@every_dtype
def test_calls_have_the_bits_of_the_operators(shape: LatentShape, dtype: torch.dtype) -> None:
    kernels, others = kernels_named("native-1", dtype), kernels_named("native-2", dtype)
    ours, threads = layer_of(kernels, shape, dtype), layer_of(others, shape, dtype)
    defined = layer_of(kernels, shape, dtype, native=False)
    x_ND = randn(ROWS, HIDDEN, seed=5)
    attended_NA = randn(ROWS, shape.num_heads * shape.row_size, seed=6)
    for run, x in ((filled, x_ND), (given_by, attended_NA)):
        expected = run(kernels, defined, x)
        assert bool(expected.isfinite().all())
        assert torch.equal(run(kernels, ours, x), expected)
        assert torch.equal(run(others, threads, x), expected)
        alone = [run(kernels, ours, x[n : n + 1].clone()) for n in range(ROWS)]
        assert torch.equal(torch.cat(alone), expected)


@every_shape
def test_the_reference_computes_the_same(shape: LatentShape) -> None:
    native, plain = (kernels_named(one, torch.float32) for one in ("native-1", "reference"))
    ours = layer_of(native, shape, torch.float32)
    defined = layer_of(plain, shape, torch.float32, native=False)
    x_ND = randn(ROWS, HIDDEN, seed=5)
    found, expected = filled(native, ours, x_ND), filled(plain, defined, x_ND)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@every_shape
def test_values_are_those_of_the_latent(shape: LatentShape) -> None:
    """A head that attends to one row gets its value matrix times the latent in it."""
    plain = kernels_named("reference", torch.float32)
    layer = layer_of(plain, shape, torch.float32, native=False)
    rows = filled(plain, layer, randn(ROWS, HIDDEN, seed=5)).view(ROWS, -1, shape.row_size)
    latents_NR = rows[:, -1].reshape(ROWS, 2, -1)[..., shape.turning // 2 :].flatten(1)
    attended_NA = rows[:, -1:].expand(-1, shape.num_heads, -1).reshape(ROWS, -1)
    found = given_by(plain, layer, attended_NA).view(ROWS, shape.num_heads, -1)
    for head, matrix in enumerate(given(layer.latent, "latent").values):
        expected = torch.empty(ROWS, shape.value_dim)
        plain.linear(latents_NR.contiguous(), matrix, expected)
        assert torch.equal(found[:, head], expected)


def test_profiles_time_both_calls() -> None:
    kernels = kernels_named("native-1", torch.float32)
    layer, timers = layer_of(kernels, PLAIN, torch.float32), DeviceTimers(torch.device("cpu"))
    watched, x_ND = timed(kernels, "target", timers), randn(3, HIDDEN, seed=1)
    assert torch.equal(filled(watched, layer, x_ND), filled(kernels, layer, x_ND))
    given_by(watched, layer, randn(3, PLAIN.num_heads * PLAIN.row_size, seed=2))
    counts = {name: timers.count(name) for name in timers.names}
    assert counts == {"target latent_queries": 1, "target latent_values": 1}
