from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedLinear
from unit.kernels.implementations import (
    DTYPES,
    IMPLEMENTATIONS,
    kernels_named,
    randn,
    relative_error,
    row_choices,
)

# Inputs by outputs: the embedded pair's, one smaller than a block, tails everywhere, a chain of
# inputs longer than a slice.
SHAPES = ((256, 512), (704, 256), (5, 3), (50, 77), (129, 1), (2100, 70))

pytestmark = [
    pytest.mark.parametrize("name", IMPLEMENTATIONS),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
]


def run(kernels: Kernels, packed: PackedLinear, x_NI: Tensor) -> Tensor:
    out_NO = torch.full((x_NI.shape[0], packed.num_out), torch.nan)
    kernels.linear(x_NI, packed, out_NO)
    return out_NO


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_does_not_depend_on_the_pass(
    name: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    num_in, num_out = shape
    kernels = kernels_named(name, dtype)
    packed = kernels.pack(randn(num_out, num_in, seed=1).to(dtype))
    x_NI = randn(100, num_in)
    alone_NO = torch.cat([run(kernels, packed, x_1I) for x_1I in torch.split(x_NI, 1)])
    for rows in row_choices(100):
        assert torch.equal(run(kernels, packed, x_NI[rows]), alone_NO[rows])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_is_near_the_float64_product(
    name: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    num_rows, num_in, num_out = (data.draw(st.integers(1, most)) for most in (40, 300, 150))
    kernels = kernels_named(name, dtype)
    weight_OI, x_NI = randn(num_out, num_in, seed=1).to(dtype), randn(num_rows, num_in)
    packed = kernels.pack(weight_OI)
    x_double_NI, weight_double_OI = x_NI.to(dtype).double(), weight_OI.double()
    out_NO = run(kernels, packed, x_NI)
    error_NO = (out_NO.double() - x_double_NI @ weight_double_OI.T).abs()
    # Of the sum of sizes: a sum that cancels to nearly nothing has no relative precision.
    assert (error_NO <= 5e-7 * (x_double_NI.abs() @ weight_double_OI.abs().T)).all()
    summed_NO = out_NO.clone()
    kernels.linear(x_NI, packed, summed_NO, accumulate=True)
    assert torch.equal(summed_NO, out_NO + out_NO)


def test_it_writes_its_output_and_nothing_else(name: str, dtype: torch.dtype) -> None:
    kernels = kernels_named(name, dtype)
    packed = kernels.pack(randn(77, 50).to(dtype))
    for num_rows in (1, 3, 9, 30):
        memory = torch.full((num_rows * 77 + 64,), 5.0)
        kernels.linear(randn(num_rows, 50), packed, memory[: num_rows * 77].view(num_rows, 77))
        assert (memory[num_rows * 77 :] == 5.0).all()


def test_no_rows_are_no_work(name: str, dtype: torch.dtype) -> None:
    kernels = kernels_named(name, dtype)
    assert run(kernels, kernels.pack(randn(7, 5).to(dtype)), torch.empty(0, 5)).shape == (0, 7)


def test_pack_takes_a_view_and_keeps_no_reference_to_it(name: str, dtype: torch.dtype) -> None:
    kernels = kernels_named(name, dtype)
    weight_IO = randn(40, 30).to(dtype)
    packed, x_NI = kernels.pack(weight_IO.T), randn(3, 40)
    before = run(kernels, packed, x_NI)
    assert relative_error(before, x_NI.to(dtype).double() @ weight_IO.double()) < 2e-6
    weight_IO.zero_()
    assert torch.equal(run(kernels, packed, x_NI), before)
    assert (packed.num_in, packed.num_out) == (40, 30)
    assert packed.nbytes >= 40 * 30 * dtype.itemsize


def test_nan_and_infinity_stay(name: str, dtype: torch.dtype) -> None:
    kernels = kernels_named(name, dtype)
    packed = kernels.pack(torch.ones(4, 6).to(dtype))
    x_NI = torch.ones(3, 6)
    x_NI[0, 2], x_NI[1, 2] = torch.nan, torch.inf
    out_NO = run(kernels, packed, x_NI)
    assert out_NO[0].isnan().all()
    assert out_NO[1].isposinf().all()
    assert (out_NO[2] == 6).all()
