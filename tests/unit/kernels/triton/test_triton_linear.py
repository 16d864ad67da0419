from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.reference.linear import SCHEMES
from outrider.plugins.gpu.kernels.tiles import ROWS, linear_shape, padded_inputs
from unit.kernels.implementations import randn, relative_error
from unit.kernels.triton.interpreted import head, linear, reference, triton_ops

pytestmark = pytest.mark.wide

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
sizes = st.tuples(st.integers(1, 20), st.integers(1, 300), st.integers(1, 20))


@settings(max_examples=6)
@given(size=sizes, dtype=st.sampled_from(DTYPES))
def test_any_shape_is_near_float64(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_rows, num_in, num_out = size
    x_NI, weight_OI = randn(num_rows, num_in), randn(num_out, num_in, seed=1).to(dtype)
    exact_NO = 7 + x_NI.to(dtype).double() @ weight_OI.double().T
    assert relative_error(linear(triton_ops(), x_NI, weight_OI), exact_NO) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_pass(dtype: torch.dtype) -> None:
    x_NI, weight_OI = randn(33, 50), randn(16, 50, seed=1).to(dtype)
    whole_NO = linear(triton_ops(), x_NI, weight_OI)
    for num_rows in range(1, 34) if dtype == torch.bfloat16 else (1, 5, 16, 17):
        few_NO = linear(triton_ops(), x_NI[:num_rows], weight_OI)
        assert torch.equal(few_NO, whole_NO[:num_rows])
    order_N = torch.randperm(33, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear(triton_ops(), x_NI[order_N], weight_OI), whole_NO[order_N])


def test_the_dead_space_of_a_tile_is_not_read() -> None:
    weight_OI, room_NI = randn(5, 40, seed=1).bfloat16(), torch.full((16, 40), torch.nan)
    room_NI[:3] = randn(3, 40)
    assert not linear(triton_ops(), room_NI[:3], weight_OI).isnan().any()


def test_activations_may_come_rounded() -> None:
    """A norm that writes bfloat16 leaves the bits that the linear would have made."""
    x_ND, norm_D, weight_OI = randn(3, 70), randn(70, seed=2), randn(9, 70, seed=1).bfloat16()
    wide_ND, narrow_ND = torch.empty(3, 70), torch.empty(3, 70, dtype=torch.bfloat16)
    triton_ops().rms_norm(x_ND, norm_D, 1e-5, wide_ND)
    triton_ops().rms_norm(x_ND, norm_D, 1e-5, narrow_ND)
    assert torch.equal(narrow_ND, wide_ND.bfloat16())
    wide_NO = linear(triton_ops(), wide_ND, weight_OI)
    assert torch.equal(linear(triton_ops(), narrow_ND, weight_OI), wide_NO)


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=3)
@given(size=sizes)
def test_integers_have_the_bits_of_the_reference(scheme: str, size: tuple[int, int, int]) -> None:
    num_rows, num_in, num_out = size
    weight_OI = randn(num_out, num_in, seed=1)
    weight_OI[num_out // 2] = 0
    x_NI = randn(num_rows, num_in) * torch.logspace(-9, 9, num_rows)[:, None]
    x_NI[1::7] = 0
    x_NI[2::7] *= 1e-33
    own, rule = triton_ops(scheme), reference(torch.bfloat16, scheme)
    assert torch.equal(linear(own, x_NI, weight_OI), linear(rule, x_NI, weight_OI))
    if scheme == "int4":
        assert torch.equal(head(own, x_NI, weight_OI), head(rule, x_NI, weight_OI))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_not_a_number_stays_in_its_row_and_output(scheme: str) -> None:
    x_NI, weight_OI = randn(4, 50), randn(6, 50, seed=1)
    x_NI[1, 3], x_NI[2, 4], weight_OI[5, 7] = torch.nan, torch.inf, torch.nan
    expected_NO = linear(reference(torch.bfloat16, scheme), x_NI, weight_OI)
    out_NO = linear(triton_ops(scheme), x_NI, weight_OI)
    assert torch.equal(out_NO.isnan(), expected_NO.isnan())
    assert torch.equal(out_NO.nan_to_num(0), expected_NO.nan_to_num(0))


@pytest.mark.parametrize(("scheme", "bits"), [("int8", 8), ("int4", 5)])
def test_packed_weights_take_their_bits(scheme: str, bits: float) -> None:
    packed = triton_ops(scheme).pack(randn(64, 512))
    row_scales = 4 * 64 if scheme == "int8" else 0
    assert packed.nbytes == 64 * 512 * bits / 8 + row_scales
    if scheme == "int4":
        assert triton_ops(scheme).pack_head(randn(64, 512)).nbytes == 64 * 512 * 8.5 / 8


def test_tiles_know_the_weight_and_not_the_rows() -> None:
    for dtype in (*DTYPES, torch.int8, torch.uint8):
        for num_out in (1, 4096, 128_256):
            shape = linear_shape(num_out, dtype)
            assert shape.outputs % 16 == 0
            assert padded_inputs(1) % shape.inputs == 0


@pytest.mark.parametrize("num_out", [2048, 4096, 6144])
def test_few_programs_have_enough_weights_on_their_way(num_out: int) -> None:
    """As Little's law asks of one program a multiprocessor, of an H200 with its memory's full rate;
    and all steps fit into the smallest device."""
    shape = linear_shape(num_out, torch.bfloat16)
    weights, rows = 2 * shape.outputs * shape.inputs, 4 * ROWS * shape.inputs
    # The next step is asked for when one was multiplied: of one buffer half is on its way.
    assert (shape.num_stages - 1.5) * weights >= 26_000
    assert (shape.num_stages - 1) * (weights + rows) <= 99 * 1024
