"""Neither threads nor company change a bit, and nobody waits for a worker that sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from outrider.kernels.registry import Kernels, choose
from unit.kernels.implementations import CPU, DTYPES, kernels_named, randn
from unit.kernels.paged_cases import chain, make_pass


def everything(kernels: Kernels, dtype: torch.dtype) -> list[Tensor]:
    """Calls large enough to be split over threads."""
    packed = kernels.pack(randn(1000, 300, seed=1).to(dtype))
    case = make_pass([chain(100, 60)], dtype=dtype)
    x_NI = randn(40, 300)
    outs = [torch.empty(40, 1000), torch.empty(40, 500), torch.empty(40, 1000)]
    kernels.linear(x_NI, packed, outs[0])
    kernels.silu_mul(outs[0], outs[1])
    kernels.rms_norm(outs[0], randn(1000), 1e-5, outs[2])
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


def run_linear(kernels: Kernels, weight_OI: Tensor) -> Callable[[Tensor], Tensor]:
    packed = kernels.pack(weight_OI)

    def call(x_NI: Tensor) -> Tensor:
        out_NO = torch.empty(x_NI.shape[0], weight_OI.shape[0])
        kernels.linear(x_NI, packed, out_NO)
        return out_NO

    return call


@pytest.mark.parametrize("shape", [(256, 512), (704, 256), (256, 8192)], ids=str)
def test_the_reference_keeps_its_word_with_torch_threads(shape: tuple[int, int]) -> None:
    torch.set_num_threads(2)
    kernels = choose(device=CPU, dtype=torch.float32, force_reference=True)
    call = run_linear(kernels, randn(shape[1], shape[0], seed=1))
    x_NI = randn(20, shape[0])
    alone_NO = torch.cat([call(x_1I) for x_1I in torch.split(x_NI, 1)])
    assert torch.equal(call(x_NI), alone_NO)
    assert torch.equal(call(x_NI[3:8]), alone_NO[3:8])
