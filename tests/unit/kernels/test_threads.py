"""Neither threads nor company change a bit, and nobody waits for a worker that sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from outrider.kernels.operators import Kernels
from outrider.kernels.registry import choose
from unit.kernels.implementations import CPU, DTYPES, kernels_named, randn
from unit.kernels.paged_cases import chain, make_pass


def everything(kernels: Kernels, dtype: torch.dtype) -> list[Tensor]:
    """Calls large enough to be split over threads."""
    packed = kernels.pack(randn(1000, 300, seed=1).to(dtype))
    case = make_pass([chain(100, 60)], dtype=dtype)
    x_NI = randn(40, 300)
    outs = [torch.empty(40, size) for size in (1000, 500, 1000, 1000, 1000)]
    kernels.linear(x_NI, packed, outs[0])
    kernels.silu_mul(outs[0], outs[1])
    kernels.rms_norm(outs[0], randn(1000), 1e-5, outs[2])
    kernels.layer_norm(outs[0], randn(1000), randn(1000, seed=1), 1e-5, outs[3])
    kernels.gelu(outs[0], outs[4])
    kernels.head_norm(outs[4], randn(50), randn(50, seed=1), 5, 1e-6)
    attended_NO = torch.empty(60, 256)
    kernels.attention(case.qkv_NE, case.k_GSD, case.v_GSD, case.plan, 0.125, attended_NO)
    return [*outs, attended_NO, torch.tensor(kernels.argmax(outs[0]))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype, threads: int) -> None:
    alone = everything(kernels_named("native-1", dtype), dtype)
    for _ in range(5):
        together = everything(kernels_named(f"native-{threads}", dtype), dtype)
        assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


def test_callers_of_one_team_take_turns() -> None:
    kernels = kernels_named("native-2", torch.float32)
    packed = kernels.pack(randn(1000, 300, seed=1))
    inputs = [randn(20, 300, seed=seed) for seed in range(4)]

    def call(x_NI: Tensor) -> Tensor:
        out_NO = torch.empty(20, 1000)
        kernels.linear(x_NI, packed, out_NO)
        return out_NO

    expected = [call(x_NI) for x_NI in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            for actual, out_NO in zip(pool.map(call, inputs), expected, strict=True):
                assert torch.equal(actual, out_NO)


def test_workers_that_slept_are_woken() -> None:
    kernels = kernels_named("native-2", torch.float32)
    first = everything(kernels, torch.float32)
    time.sleep(0.05)
    assert all(map(torch.equal, first, everything(kernels, torch.float32)))


@pytest.fixture
def three_torch_threads(one_torch_thread: None) -> None:
    """More than torch needs to split the work of the tests below inside a row."""
    del one_torch_thread
    torch.set_num_threads(3)


def assert_rows_alone(call: Callable[[Tensor], Tensor], x_ND: Tensor) -> None:
    whole_ND = call(x_ND)
    assert torch.equal(whole_ND, torch.cat([call(x_1D) for x_1D in torch.split(x_ND, 1)]))
    assert torch.equal(whole_ND[3:8], call(x_ND[3:8]))


@pytest.mark.usefixtures("three_torch_threads")
@pytest.mark.parametrize("shape", [(256, 512), (704, 256), (256, 8192)], ids=str)
def test_the_reference_linear_keeps_its_word(shape: tuple[int, int]) -> None:
    num_in, num_out = shape
    kernels = choose(device=CPU, dtype=torch.float32, force_reference=True)
    packed = kernels.pack(randn(num_out, num_in, seed=1))

    def call(x_NI: Tensor) -> Tensor:
        out_NO = torch.empty(x_NI.shape[0], num_out)
        kernels.linear(x_NI, packed, out_NO)
        return out_NO

    assert_rows_alone(call, randn(20, num_in))


@pytest.mark.usefixtures("three_torch_threads")
@pytest.mark.parametrize("size", [704, 1001])
def test_the_reference_pointwise_ops_keep_their_word(size: int) -> None:
    kernels = choose(device=CPU, dtype=torch.float32, force_reference=True)

    def norm(x_ND: Tensor) -> Tensor:
        out_ND = torch.empty_like(x_ND)
        kernels.rms_norm(x_ND, randn(2 * size), 1e-5, out_ND)
        return out_ND

    def gated(x_ND: Tensor) -> Tensor:
        out_NF = torch.empty(x_ND.shape[0], size)
        kernels.silu_mul(x_ND, out_NF)
        return out_NF

    def centred(x_ND: Tensor) -> Tensor:
        out_ND = torch.empty_like(x_ND)
        kernels.layer_norm(x_ND, randn(2 * size), randn(2 * size, seed=1), 1e-5, out_ND)
        return out_ND

    def by_head(x_ND: Tensor) -> Tensor:
        x_ND = x_ND.clone()
        kernels.head_norm(x_ND, randn(size // 11), randn(size // 11, seed=1), 4, 1e-6)
        return x_ND

    def curved(x_ND: Tensor) -> Tensor:
        out_ND = torch.empty_like(x_ND)
        kernels.gelu(x_ND, out_ND)
        return out_ND

    for call in (norm, gated, centred, by_head, curved):
        assert_rows_alone(call, randn(257, 2 * size))
