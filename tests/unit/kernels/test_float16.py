"""Kernels of float16: what is stored is widened exactly, and summed as in float32."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
from torch import Tensor

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core import env
from outrider.kernels.native import build
from outrider.kernels.native import build as levels
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.ops import NativeOps
from unit.kernels.implementations import DRAFTERS, kernels_named, randn
from unit.kernels.paged_cases import Heads, chain, make_pass

EVERY_16 = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
PROMPTS = ["def add(a, b):\n", "for i in range(10):\n    print(i)\nfor i in range(10):\n    print"]


@functools.cache
def library(version: str) -> ctypes.CDLL:
    """The kernels as they are, or with the conversions that every CPU has."""
    with pytest.MonkeyPatch.context() as patch:
        if version == "plain":
            patch.setattr(build, "FLAGS", (*levels.FLAGS, "-O1", "-DOUTRIDER_PLAIN_HALVES"))
        built = built_kernels(env.compiler(), env.cache_folder())
    if built.library is None:
        pytest.skip(str(built.refusal))
    return built.library


def product(version: str, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    ops = NativeOps(library(version), torch.float16, 1)
    out_NO = torch.full((x_NI.shape[0], weight_OI.shape[0]), 7.0)
    ops.linear(x_NI, ops.pack(weight_OI), out_NO)
    return out_NO


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["of this CPU", "plain"])
def test_every_number_is_widened_exactly(version: str) -> None:
    out_1O = product(version, torch.ones(1, 1), EVERY_16[:, None])
    assert_equal(out_1O[0], EVERY_16.float())


@pytest.mark.slow
@pytest.mark.parametrize("version", ["of this CPU", "plain"])
def test_rows_are_rounded_to_the_nearest_even(version: str) -> None:
    """All numbers, what lies halfway between neighbours, and on either side of that."""
    numbers = EVERY_16[EVERY_16.isfinite()].double().sort().values
    halfway = ((numbers[1:] + numbers[:-1]) / 2).float()
    infinity = torch.tensor(torch.inf)
    x_N = torch.cat([
        numbers.float(),
        halfway,
        halfway.nextafter(infinity),
        halfway.nextafter(-infinity),
        torch.tensor([65519.996, 65520.0, -65520.0, 1e30, torch.inf, -torch.inf, torch.nan, 1e-45]),
    ])  # fmt: skip
    assert_equal(product(version, x_N[:, None], torch.ones(1, 1).half())[:, 0], x_N.half().float())


@pytest.mark.parametrize("num_rows", [1, 2, 9, 33])
def test_a_linear_is_that_of_float32_on_what_was_stored(num_rows: int) -> None:
    """One chain of the same multiply-adds: not only near, but bit for bit."""
    half, single = (
        kernels_named("native-2", torch.float16),
        kernels_named("native-2", torch.float32),
    )
    x_NI, weight_OI = randn(num_rows, 2100), randn(70, 2100, seed=1).half()
    out_NO, wide_NO = torch.empty(num_rows, 70), torch.empty(num_rows, 70)
    half.linear(x_NI, half.pack(weight_OI), out_NO)
    single.linear(x_NI.half().float(), single.pack(weight_OI.float()), wide_NO)
    assert torch.equal(out_NO, wide_NO)


@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(8, 1, 80), Heads(5, 1, 6)], ids=str)
def test_attention_is_that_of_float32_on_what_was_stored(heads: Heads) -> None:
    case = make_pass([chain(60, 5), chain(0, 33), chain(70, 1)], heads=heads, dtype=torch.float16)
    found: list[Tensor] = []
    for dtype in (torch.float16, torch.float32):
        kernels = kernels_named("native-2", dtype)
        out_NO = torch.empty(case.plan.num_tokens, heads.num_heads * heads.head_dim)
        k_GSD, v_GSD = case.k_GSD.to(dtype), case.v_GSD.to(dtype)
        kernels.attention(case.qkv_NE, k_GSD, v_GSD, case.plan, 0.125, out_NO)
        found.append(out_NO)
    assert torch.equal(*found)


@functools.cache
def texts(quantise: str, drafter: str, nodes: int = 0) -> list[tuple[int, ...]]:
    config = EngineConfig(
        dtype="float16", quantise=quantise, drafter=drafter, k=5, tree_nodes=nodes, batch_size=2
    )
    llm = LLM(config=config)
    library("of this CPU")
    assert {choice.name.split()[0] for choice in llm.kernels.choices} == {"native"}
    assert llm.kernels.exact
    results = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
    assert all(result.stats.num_target_passes <= 41 for result in results)
    return [result.token_ids for result in results]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize(("drafter", "nodes"), DRAFTERS)
def test_greedy_text_is_the_same_with_every_drafter(drafter: str, nodes: int) -> None:
    assert texts("none", drafter, nodes) == texts("none", "none")


@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("quantise", ["int8", "int4"])
@pytest.mark.parametrize("drafter", ["model", "eagle"])
def test_the_rest_of_a_quantised_model_may_be_float16(quantise: str, drafter: str) -> None:
    assert texts(quantise, drafter) == texts(quantise, "none")
