from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.core.clock import host_ints
from outrider.kernels.operators import Kernels
from unit.kernels.implementations import (
    DTYPES,
    IMPLEMENTATIONS,
    kernels_named,
    randn,
    relative_error,
    row_choices,
)
from unit.kernels.paged_cases import Heads, Pass, Sequenced, chain, make_pass

SIZES = (1, 17, 64, 350, 704, 1001)

pytestmark = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def assert_rows_alone(op: Callable[[Tensor], Tensor], x_ND: Tensor) -> None:
    alone_ND = torch.cat([op(x_1D) for x_1D in torch.split(x_ND, 1)])
    for rows in row_choices(x_ND.shape[0]):
        assert torch.equal(op(x_ND[rows]), alone_ND[rows])


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(name: str, size: int) -> None:
    kernels = kernels_named(name, torch.float32)
    weight_D, eps = randn(size, seed=1), 1e-5

    def norm(x_ND: Tensor) -> Tensor:
        out_ND = torch.full_like(x_ND, torch.nan)
        kernels.rms_norm(x_ND, weight_D, eps, out_ND)
        return out_ND

    x_ND = randn(100, size)
    assert_rows_alone(norm, x_ND)
    mean_N1 = x_ND.double().square().mean(-1, keepdim=True)
    assert relative_error(norm(x_ND), x_ND.double() / (mean_N1 + eps).sqrt() * weight_D) < 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_layer_norm(name: str, size: int) -> None:
    kernels = kernels_named(name, torch.float32)
    weight_D, bias_D, eps = randn(size, seed=1), randn(size, seed=2), 1e-5

    def norm(x_ND: Tensor) -> Tensor:
        out_ND = torch.full_like(x_ND, torch.nan)
        kernels.layer_norm(x_ND, weight_D, bias_D, eps, out_ND)
        return out_ND

    x_ND = randn(100, size) + 3
    assert_rows_alone(norm, x_ND)
    exact_ND = torch.nn.functional.layer_norm(
        x_ND.double(), (size,), weight_D.double(), bias_D.double(), eps
    )
    assert relative_error(norm(x_ND), exact_ND) < 2e-6


@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(1, 1, 17), Heads(6, 3, 20)], ids=str)
def test_head_norm(name: str, heads: Heads) -> None:
    kernels = kernels_named(name, torch.float32)
    dim, num_kv, eps = heads.head_dim, heads.num_kv_heads, 1e-6
    weights = randn(dim, seed=1), randn(dim, seed=2)

    def norm(qkv_NE: Tensor) -> Tensor:
        qkv_NE = qkv_NE.clone()
        kernels.head_norm(qkv_NE, *weights, num_kv, eps)
        return qkv_NE

    qkv_NE = randn(100, heads.row_size)
    assert_rows_alone(norm, qkv_NE)
    heads_NAD = qkv_NE.double().view(100, -1, dim)
    root_NA1 = (heads_NAD.square().mean(-1, keepdim=True) + eps).sqrt()
    parts = torch.split(heads_NAD / root_NA1, [heads.num_heads, num_kv, num_kv], dim=1)
    exact_NAD = torch.cat([parts[0] * weights[0], parts[1] * weights[1]], dim=1)
    normed_NAD = norm(qkv_NE).view(100, -1, dim)
    assert relative_error(normed_NAD[:, :-num_kv], exact_NAD) < 1e-6
    assert torch.equal(normed_NAD[:, -num_kv:], qkv_NE.view(100, -1, dim)[:, -num_kv:])


@pytest.mark.parametrize("size", SIZES)
def test_gelu(name: str, size: int) -> None:
    kernels = kernels_named(name, torch.float32)

    def curved(x_NF: Tensor) -> Tensor:
        out_NF = torch.full_like(x_NF, torch.nan)
        kernels.gelu(x_NF, out_NF)
        return out_NF

    x_NF = randn(100, size) * 4
    assert_rows_alone(curved, x_NF)
    x_double_NF = x_NF.double()
    inner_NF = math.sqrt(2 / math.pi) * (x_double_NF + 0.044715 * x_double_NF**3)
    expected_NF = curved(x_NF)
    assert relative_error(expected_NF, x_double_NF / 2 * (1 + inner_NF.tanh())) < 1e-6
    kernels.gelu(x_NF, x_NF)
    assert torch.equal(x_NF, expected_NF)


def test_gelu_of_large_values(name: str) -> None:
    x_NF = torch.tensor([[-1e9, -1000.0, -0.0, 0.0, 20.0, 1e9, torch.nan]])
    out_NF = torch.empty(1, 7)
    kernels_named(name, torch.float32).gelu(x_NF, out_NF)
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 20.0, 1e9, torch.nan]])
    assert torch.allclose(out_NF, expected, rtol=1e-6, atol=1e-28, equal_nan=True)


@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(name: str, size: int) -> None:
    kernels = kernels_named(name, torch.float32)

    def gated(gate_up_N2F: Tensor) -> Tensor:
        out_NF = torch.full((gate_up_N2F.shape[0], size), torch.nan)
        kernels.silu_mul(gate_up_N2F, out_NF)
        return out_NF

    gate_up_N2F = randn(100, 2 * size) * 4
    assert_rows_alone(gated, gate_up_N2F)
    gate_NF, up_NF = gate_up_N2F.double().chunk(2, dim=-1)
    assert relative_error(gated(gate_up_N2F), gate_NF * gate_NF.sigmoid() * up_NF) < 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_sigmoid_mul(name: str, size: int) -> None:
    kernels = kernels_named(name, torch.float32)

    def gated(gate_x_N2F: Tensor) -> Tensor:
        gate_NF, x_NF = (part.clone() for part in gate_x_N2F.chunk(2, dim=-1))
        kernels.sigmoid_mul(gate_NF, x_NF)
        return x_NF

    gate_x_N2F = randn(100, 2 * size) * 4
    assert_rows_alone(gated, gate_x_N2F)
    gate_NF, x_NF = gate_x_N2F.double().chunk(2, dim=-1)
    assert relative_error(gated(gate_x_N2F), x_NF * gate_NF.sigmoid()) < 1e-6


def test_sigmoid_of_large_values(name: str) -> None:
    gate_NF = torch.tensor([[-1000.0, -89.0, 0.0, 20.0, 1000.0, torch.nan]])
    x_NF = torch.full((1, 6), 2.0)
    kernels_named(name, torch.float32).sigmoid_mul(gate_NF, x_NF)
    expected = torch.tensor([[0.0, 0.0, 1.0, 2.0, 2.0, torch.nan]])
    assert torch.allclose(x_NF, expected, rtol=1e-6, atol=1e-35, equal_nan=True)


def test_silu_of_large_values(name: str) -> None:
    gate = torch.tensor([[-1000.0, -89.0, -20.0, 0.0, 20.0, 1000.0, torch.nan]])
    out_NF = torch.empty(1, 7)
    kernels_named(name, torch.float32).silu_mul(torch.cat([gate, torch.ones(1, 7)], dim=1), out_NF)
    expected = torch.tensor([[0.0, 0.0, -20 / (1 + torch.e**20), 0.0, 20.0, 1000.0, torch.nan]])
    assert torch.allclose(out_NF, expected, rtol=1e-6, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("vocab_size", [1, 5, 1000, 1024, 8192, 9001])
def test_argmax_takes_the_first_largest(name: str, vocab_size: int) -> None:
    kernels = kernels_named(name, torch.float32)
    logits_MV = randn(9, vocab_size).round(decimals=1)
    expected = [int((row == row.max()).nonzero()[0]) for row in logits_MV]
    assert kernels.argmax(logits_MV) == expected
    assert [kernels.argmax(row_1V)[0] for row_1V in torch.split(logits_MV, 1)] == expected
    assert kernels.argmax(torch.full((2, vocab_size), -torch.inf)) == [0, 0]
    logits_MV[3, vocab_size - 1] = torch.inf
    assert kernels.argmax(logits_MV)[3] == vocab_size - 1


HEADS = (Heads(4, 2, 64), Heads(2, 1, 128), Heads(3, 3, 20))
SEQUENCES = (chain(0, 60), Sequenced(30, (-1, -1, 0, 1, 1, 3, 5)), chain(70, 33))


def tables(head_dim: int) -> tuple[Tensor, Tensor]:
    angles_TH = torch.arange(128)[:, None] * 10000 ** (-torch.arange(head_dim // 2) / head_dim)
    return angles_TH.cos(), angles_TH.sin()


def roped(kernels: Kernels, case: Pass) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and the arena rows that were written; the rest of the arena must not change."""
    qkv_NE, k_GSD, v_GSD = case.qkv_NE.clone(), case.k_GSD.clone(), case.v_GSD.clone()
    cos_TH, sin_TH = tables(case.heads.head_dim)
    kernels.rope_append(qkv_NE, cos_TH, sin_TH, case.plan, k_GSD, v_GSD)
    slots = case.plan.slots_N
    for after, before in ((k_GSD, case.k_GSD), (v_GSD, case.v_GSD)):
        untouched = torch.ones(after.shape[1], dtype=torch.bool)
        untouched[slots] = False
        torch.testing.assert_close(
            after[:, untouched], before[:, untouched], rtol=0, atol=0, equal_nan=True
        )
    num_q = case.heads.num_heads * case.heads.head_dim
    return qkv_NE[:, :num_q], k_GSD[:, slots].transpose(0, 1), v_GSD[:, slots].transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rope_append(name: str, dtype: torch.dtype, heads: Heads) -> None:
    kernels = kernels_named(name, dtype)
    case = make_pass(SEQUENCES, heads=heads, dtype=dtype)
    whole = roped(kernels, case)
    for rows in row_choices(100):
        for part, full in zip(roped(kernels, case.rows(host_ints(rows))), whole, strict=True):
            assert torch.equal(part, full[rows])
    cos_NH, sin_NH = (
        table_TH[case.plan.positions_N].double() for table_TH in tables(heads.head_dim)
    )
    heads_NAD = case.qkv_NE.double().view(100, -1, heads.head_dim)
    low, high = heads_NAD.chunk(2, dim=-1)
    cos, sin = cos_NH[:, None], sin_NH[:, None]
    exact_NAD = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    q_NO, k_NGD, v_NGD = whole
    num_kv, num_q = heads.num_kv_heads, heads.num_heads
    assert relative_error(q_NO, exact_NAD[:, :num_q].flatten(1)) < 1e-6
    rounding = 1e-6 if dtype == torch.float32 else 2**-8
    assert relative_error(k_NGD, exact_NAD[:, num_q : num_q + num_kv]) < rounding
    assert torch.equal(v_NGD, heads_NAD[:, num_q + num_kv :].to(dtype))


def test_values_that_are_keys_are_not_written(name: str) -> None:
    kernels, heads = kernels_named(name, torch.float32), Heads(4, 1, 24)
    case = make_pass(SEQUENCES, heads=heads, dtype=torch.float32)
    _, keys, _ = roped(kernels, case)
    qkv_NE, rows_GSD = case.qkv_NE.clone(), case.k_GSD.clone()
    kernels.rope_append(qkv_NE, *tables(24), case.plan, rows_GSD, rows_GSD)
    assert torch.equal(rows_GSD[:, case.plan.slots_N].transpose(0, 1), keys)


@pytest.mark.parametrize("size", SIZES)
def test_gelu_mul(name: str, size: int) -> None:
    kernels = kernels_named(name, torch.float32)

    def gated(gate_up_N2F: Tensor) -> Tensor:
        out_NF = torch.full((gate_up_N2F.shape[0], size), torch.nan)
        kernels.gelu_mul(gate_up_N2F, out_NF)
        return out_NF

    gate_up_N2F = randn(100, 2 * size) * 4
    assert_rows_alone(gated, gate_up_N2F)
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
    expected_NF = torch.empty_like(up_NF)
    kernels.gelu(gate_NF.contiguous(), expected_NF)
    assert torch.equal(gated(gate_up_N2F), expected_NF * up_NF)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_cap(name: str, size: int, cap: float) -> None:
    kernels = kernels_named(name, torch.float32)

    def capped(x_NF: Tensor) -> Tensor:
        out_NF = x_NF.clone()
        kernels.soft_cap(out_NF, cap)
        return out_NF

    x_NF = torch.cat([randn(50, size) * 20, randn(50, size) / 100])
    assert_rows_alone(capped, x_NF)
    exact_NF = cap * torch.tanh(x_NF.double() / cap)
    assert torch.allclose(capped(x_NF).double(), exact_NF, rtol=5e-7, atol=0)


def test_a_soft_cap_of_large_values(name: str) -> None:
    x_NF = torch.tensor([[-torch.inf, -1e9, -0.0, 0.0, 1e-30, 1e9, torch.inf, torch.nan]])
    kernels_named(name, torch.float32).soft_cap(x_NF, 4.0)
    expected = torch.tensor([[-4.0, -4.0, 0.0, 0.0, 1e-30, 4.0, 4.0, torch.nan]])
    assert torch.allclose(x_NF, expected, rtol=1e-6, atol=0, equal_nan=True)
