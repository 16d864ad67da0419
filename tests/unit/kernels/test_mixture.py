"""The native mixture of experts against the operators that define it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.core.errors import given
from outrider.kernels.native.layers import DenseWeights, MixtureWeights
from outrider.kernels.operators import Kernels
from outrider.models.expert_kinds import Experts
from outrider.models.ffn import mix
from outrider.models.layer_kinds import Gate
from outrider.plugins.measure.timers import DeviceTimers, timed
from unit.kernels.implementations import kernels_named, randn

HIDDEN, FFN = 40, 24
MANY = Experts(num_experts=7, num_chosen=3, ffn_size=FFN)
SIZES = {
    "normalised": MANY,
    "as they are": replace(MANY, normalise=False),
    "one of all": replace(MANY, num_chosen=1),
    "all": replace(MANY, num_chosen=7),
    "shared": replace(MANY, shared_ffn_size=56),
    "gelu": replace(MANY, gate=Gate.GELU),
    "clamped": replace(MANY, gate=Gate.CLAMPED, biased=True, limit=0.6),
    "groups": replace(MANY, num_experts=12, num_groups=4, top_groups=2, has_sigmoids=True),
    "groups by their best": replace(
        MANY, num_experts=12, num_groups=4, top_groups=3, group_best=1, normalise=False
    ),
    "groups by a bias": replace(
        MANY, num_experts=12, num_groups=6, top_groups=2, has_choice_bias=True, num_chosen=4
    ),
}
every_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())


def weights_for(kernels: Kernels, sizes: Experts, dtype: torch.dtype) -> MixtureWeights:
    seeds = iter(range(1000))

    def matrix(*shape: int) -> Tensor:
        return randn(*shape, seed=next(seeds)) * 0.3

    def net(ffn: int) -> DenseWeights:
        biases = (matrix(2 * ffn), matrix(HIDDEN)) if sizes.biased else (None, None)
        up, down = matrix(2 * ffn, HIDDEN).to(dtype), matrix(HIDDEN, ffn).to(dtype)
        return DenseWeights(kernels.pack(up), kernels.pack(down), *biases)

    num_scores = sizes.num_experts + bool(sizes.shared_ffn_size)
    return MixtureWeights(
        router=kernels.pack(matrix(num_scores, HIDDEN).to(dtype)),
        experts=[net(sizes.ffn_size) for _ in range(sizes.num_experts)],
        shared=net(sizes.shared_ffn_size) if sizes.shared_ffn_size else None,
        router_bias_X=matrix(num_scores) if sizes.biased else None,
        choice_bias_X=matrix(sizes.num_experts) if sizes.has_choice_bias else None,
    )


def both(
    sizes: Experts, dtype: torch.dtype, name: str = "native-1"
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """In one call, and by operators."""
    kernels = kernels_named(name, dtype)
    weights = weights_for(kernels, sizes, dtype)
    assert kernels.mixture is not None
    native = replace(weights, native=kernels.mixture(sizes, weights))
    return (
        lambda x_ND: mix(kernels, sizes, native, x_ND),
        lambda x_ND: mix(kernels, sizes, weights, x_ND),
    )


@every_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_gives_what_the_operators_give(sizes: Experts, dtype: torch.dtype) -> None:
    ours, defined = both(sizes, dtype)
    for num_rows in (1, 2, 33):
        x_ND = randn(num_rows, HIDDEN, seed=num_rows)
        torch.testing.assert_close(ours(x_ND), defined(x_ND), atol=1e-5, rtol=1e-5)


@every_size
def test_a_row_has_bits_of_its_own(sizes: Experts) -> None:
    """Whatever rows it comes with, and however many threads there are."""
    ours, _ = both(sizes, torch.bfloat16)
    others, _ = both(sizes, torch.bfloat16, "native-2")
    x_ND = randn(50, HIDDEN, seed=5)
    whole_ND = ours(x_ND)
    assert torch.equal(torch.cat([ours(x_ND[n : n + 1].contiguous()) for n in range(50)]), whole_ND)
    assert torch.equal(ours(x_ND.flip(0)).flip(0), whole_ND)
    assert torch.equal(others(x_ND), whole_ND)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_no_number_stays_alone(value: float) -> None:
    ours, _ = both(MANY, torch.float32)
    x_ND = randn(6, HIDDEN, seed=1)
    clean_ND = ours(x_ND)
    x_ND[2, 3] = value
    found_ND = ours(x_ND)
    assert bool(found_ND[2].isnan().all())
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found_ND[others], clean_ND[others])


def test_profiles_time_the_one_call() -> None:
    kernels = kernels_named("native-1", torch.float32)
    weights = weights_for(kernels, MANY, torch.float32)
    assert kernels.mixture is not None
    native = replace(weights, native=kernels.mixture(MANY, weights))
    timers, x_ND = DeviceTimers(torch.device("cpu")), randn(3, HIDDEN, seed=1)
    found_ND = mix(timed(kernels, "target", timers), MANY, native, x_ND)
    assert torch.equal(found_ND, mix(kernels, MANY, native, x_ND))
    assert {name: timers.count(name) for name in timers.names} == {"target mix": 1}


@pytest.mark.parametrize("part", [0, FFN], ids=["gate", "up"])
def test_limits_of_a_gate_hide_no_nan(part: int) -> None:
    """What an expert gives is a NaN where its gate or its up is one, as the operators say."""
    sizes = replace(MANY, gate=Gate.CLAMPED, biased=True, limit=0.6, num_chosen=7)
    kernels = kernels_named("native-1", torch.float32)
    weights = weights_for(kernels, sizes, torch.float32)
    given(weights.experts[3].gate_up_bias_2F, "bias")[part + 5] = torch.nan
    assert kernels.mixture is not None
    native = replace(weights, native=kernels.mixture(sizes, weights))
    for one in (weights, native):
        assert bool(mix(kernels, sizes, one, randn(3, HIDDEN, seed=2)).isnan().all())


def test_no_rows_are_none() -> None:
    ours, _ = both(MANY, torch.float32)
    assert ours(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)
