"""Choosing codes: nearly the least error, as GGUF writes it, the same wherever it is chosen."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.native.ops import NativeInt4
from outrider.kernels.reference import linear as module
from outrider.kernels.reference.linear import GROUP, Groups, quantise
from outrider.models.gguf.blocks import TYPES, decode
from unit.kernels.implementations import randn

Q4_1, Q8_0 = TYPES[3], TYPES[8]


def numbers(groups: Groups) -> Tensor:
    scale_OI, *rest = groups.factors_FOG.repeat_interleave(GROUP, dim=2)
    found_OI = groups.codes_OI * scale_OI
    return found_OI + rest[0] if rest else found_OI


def squared_error(weight_OI: Tensor, groups: Groups) -> float:
    return float((numbers(groups)[:, : weight_OI.shape[1]] - weight_OI).square().sum())


def of_least_and_most(weight_OI: Tensor) -> Groups:
    """Codes spread from the least number of a group to its largest, which GGUF's writers do without
    an importance of inputs."""
    groups_OGC = weight_OI.view(len(weight_OI), -1, GROUP)
    low_OG = groups_OGC.amin(2).half().float()
    scale_OG = ((groups_OGC.amax(2) - groups_OGC.amin(2)) / 15).half().float()
    codes_OGC = ((groups_OGC - low_OG[:, :, None]) / scale_OG[:, :, None]).round().clamp(0, 15)
    return Groups(codes_OGC.flatten(1), torch.stack([scale_OG, low_OG]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 32), (5, 50), (40, 2100)], ids=str)
def test_blocks_have_the_numbers_that_were_chosen(bits: int, shape: tuple[int, int]) -> None:
    groups = quantise(randn(*shape), bits)
    assert groups.codes_OI.shape == (shape[0], -(-shape[1] // GROUP) * GROUP)
    found = decode(groups.blocks(), Q4_1 if bits == 4 else Q8_0)
    assert np.array_equal(found, numbers(groups).numpy().reshape(-1))
    assert torch.equal(groups.factors_FOG, groups.factors_FOG.half().float())
    least, most = (0, 15) if bits == 4 else (-127, 127)
    assert least <= int(groups.codes_OI.min()) <= int(groups.codes_OI.max()) <= most


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), power=st.integers(1, 3), size=st.floats(1e-2, 10))
def test_the_error_is_less_than_that_of_the_whole_range(seed: int, power: int, size: float) -> None:
    weight_OI = randn(16, 8 * GROUP, seed=seed) ** power * size
    ratio = squared_error(weight_OI, quantise(weight_OI, 4))
    ratio /= squared_error(weight_OI, of_least_and_most(weight_OI))
    assert ratio < 0.95


def test_numbers_that_lie_on_a_grid_stay() -> None:
    """As those of a checkpoint that was made of such a file."""
    grid_OI = numbers(quantise(randn(30, 10 * GROUP), 4))
    assert squared_error(grid_OI, quantise(grid_OI, 4)) < 1e-6 * float(grid_OI.square().sum())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_group_of_one_number_keeps_it(bits: int) -> None:
    weight_OI = torch.tensor([0.0, 1.5, -3.0, 0.125])[:, None].repeat(1, GROUP)
    found_OI = numbers(quantise(weight_OI, bits))
    assert torch.allclose(found_OI, weight_OI, rtol=1e-3 if bits == 8 else 0, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38, -3e38])
def test_what_float16_cannot_scale_is_no_number(bits: int, bad: float) -> None:
    weight_OI = randn(3, 3 * GROUP)
    fine = quantise(weight_OI, bits)
    weight_OI[1, 40] = bad
    found = quantise(weight_OI, bits)
    assert bool(found.factors_FOG[:, 1, 1].isnan().any())
    others = torch.ones(3, 3, dtype=torch.bool)
    others[1, 1] = False
    assert torch.equal(found.factors_FOG[:, others], fine.factors_FOG[:, others])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_groups_are_chosen_alone(bits: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_OI = randn(33, 5 * GROUP) * torch.logspace(-4, 2, 33)[:, None]
    whole = quantise(weight_OI, bits)
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    found = quantise(weight_OI, bits)
    assert torch.equal(found.codes_OI, whole.codes_OI)
    assert torch.equal(found.factors_FOG, whole.factors_FOG)


def test_numbers_of_8_bits_are_the_nearest() -> None:
    weight_OI = randn(20, 4 * GROUP)
    groups = quantise(weight_OI, 8)
    step_OI = groups.factors_FOG[0].repeat_interleave(GROUP, dim=1)
    # A scale that float16 rounded down has no code for the largest number.
    assert bool(((numbers(groups) - weight_OI).abs() <= 0.57 * step_OI).all())


def hostile(num_out: int, num_in: int, seed: int) -> Tensor:
    """Groups of every size, some of one number, some with what is no number."""
    weight_OI = randn(num_out, num_in, seed=seed)
    weight_OI *= 10.0 ** randn(num_out, 1, seed=seed + 1).mul(5).clamp(-30, 30)
    weight_OI += 10.0 ** randn(num_out, 1, seed=seed + 2).mul(3).clamp(-30, 30)
    weight_OI[::7] = weight_OI[::7, :1]
    weight_OI[3::11, ::GROUP] = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38])[seed % 4]
    weight_OI[5::13] = 0.0
    return weight_OI


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 32), (3, 50), (70, 96), (40, 2100)], ids=str)
def test_native_chooses_as_numpy_does(
    bits: int, dtype: torch.dtype, shape: tuple[int, int], native_library: ctypes.CDLL
) -> None:
    native = NativeInt4(native_library, 2)
    for seed in range(4):
        for made_OI in (randn(*shape, seed=seed), hostile(*shape, seed)):
            weight_OI = made_OI.to(dtype)
            expected = quantise(weight_OI, bits).blocks()
            assert np.array_equal(native.chosen(weight_OI, bits), expected)
