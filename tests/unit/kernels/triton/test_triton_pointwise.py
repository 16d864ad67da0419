from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.core.clock import host_ints
from unit.kernels.implementations import randn, relative_error
from unit.kernels.paged_cases import Heads, Sequenced, chain, make_pass
from unit.kernels.triton.interpreted import reference, triton_ops

pytestmark = pytest.mark.wide

KERNELS = reference(torch.float32)
rows_and_size = st.tuples(st.integers(1, 4), st.integers(1, 90))


@settings(max_examples=6)
@given(shape=rows_and_size)
def test_norms_and_gates_are_those_of_the_reference(shape: tuple[int, int]) -> None:
    num_rows, size = shape
    x_ND, weight_D, bias_D = randn(num_rows, size), randn(size, seed=1), randn(size, seed=2)
    gate_up_N2F = randn(num_rows, 2 * size, seed=3) * 5
    out_ND, expected_ND = torch.empty(num_rows, size), torch.empty(num_rows, size)
    for kernels, into_ND in ((triton_ops(), out_ND), (KERNELS, expected_ND)):
        kernels.rms_norm(x_ND, weight_D, 1e-5, into_ND)
    assert relative_error(out_ND, expected_ND.double()) < 1e-6
    for kernels, into_ND in ((triton_ops(), out_ND), (KERNELS, expected_ND)):
        kernels.layer_norm(x_ND, weight_D, bias_D, 1e-5, into_ND)
    assert relative_error(out_ND, expected_ND.double()) < 1e-6
    triton_ops().silu_mul(gate_up_N2F, out_ND)
    KERNELS.silu_mul(gate_up_N2F, expected_ND)
    assert relative_error(out_ND, expected_ND.double()) < 1e-6
    triton_ops().gelu(x_ND, x_ND)
    KERNELS.gelu(randn(num_rows, size), expected_ND)
    assert relative_error(x_ND, expected_ND.double()) < 1e-6


def test_head_norms_leave_values_alone() -> None:
    qkv_NE, q_weight_D, k_weight_D = randn(3, 8 * 10), randn(10, seed=1), randn(10, seed=2)
    expected_NE = qkv_NE.clone()
    KERNELS.head_norm(expected_NE, q_weight_D, k_weight_D, 2, 1e-6)
    triton_ops().head_norm(qkv_NE, q_weight_D, k_weight_D, 2, 1e-6)
    assert torch.equal(qkv_NE[:, 60:], expected_NE[:, 60:])
    assert relative_error(qkv_NE, expected_NE.double()) < 1e-6


TREE = Sequenced(5, (-1, -1, 0, 0))
HEADS = Heads(3, 1, 12)


def turned() -> tuple[Tensor, Tensor]:
    angle_TH = torch.arange(20)[:, None] * 0.7 ** torch.arange(6)
    return angle_TH.cos(), angle_TH.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rope_has_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    mine, other = (make_pass([TREE, chain(2, 3)], heads=HEADS, dtype=dtype) for _ in range(2))
    tables = turned()
    triton_ops().rope_append(mine.qkv_NE, *tables, mine.plan, mine.k_GSD, mine.v_GSD)
    reference(dtype).rope_append(other.qkv_NE, *tables, other.plan, other.k_GSD, other.v_GSD)
    assert torch.equal(mine.qkv_NE, other.qkv_NE)
    assert torch.equal(mine.k_GSD.nan_to_num(9), other.k_GSD.nan_to_num(9))
    assert torch.equal(mine.v_GSD.nan_to_num(9), other.v_GSD.nan_to_num(9))


def test_a_negative_slot_writes_nothing() -> None:
    case = make_pass([chain(2, 3)], heads=HEADS)
    before_GSD = case.k_GSD.clone()
    slots = host_ints(case.plan.slots_N)
    case.plan.slots_N[1] = -1
    tables = turned()
    triton_ops().rope_append(case.qkv_NE, *tables, case.plan, case.k_GSD, case.v_GSD)
    same_S = (case.k_GSD == before_GSD).nan_to_num(0).all(0).all(-1)
    assert bool(same_S[slots[1]])
    assert not same_S[[slots[0], slots[2]]].any()
