"""The tests of every attention (unit/kernels/test_attention.py), in sizes for the interpreter."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.plugins.gpu.kernels import attention
from outrider.plugins.gpu.kernels.scratch import PART
from outrider.plugins.gpu.kernels.tiles import launch
from unit.kernels.implementations import relative_error
from unit.kernels.paged_cases import Heads, Pass, Sequenced, chain, make_pass
from unit.kernels.test_attention import oracle
from unit.kernels.triton.interpreted import cut_attention_small, triton_ops

pytestmark = pytest.mark.wide

BUILDER: Any = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
TREE = Sequenced(21, (-1, -1, 0, 0, 2))
HEADS, SMALL = Heads(4, 2, 16), Heads(2, 1, 16)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_attention_small(monkeypatch, part=16, keys=8)


def run(case: Pass) -> Tensor:
    heads = case.heads
    out_NO = torch.full((case.plan.num_tokens, heads.num_heads * heads.head_dim), torch.nan)
    scale = heads.head_dim**-0.5
    triton_ops().attention(case.qkv_NE, case.k_GSD, case.v_GSD, case.plan, scale, out_NO)
    return out_NO


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "heads"), [(torch.float32, HEADS), (torch.bfloat16, SMALL)], ids=str
)
def test_a_row_does_not_depend_on_the_pass(dtype: torch.dtype, heads: Heads) -> None:
    case = make_pass([chain(17, 6), TREE, chain(0, 2)], heads=heads, dtype=dtype)
    whole_NO = run(case)
    assert relative_error(whole_NO, oracle(case)) < 2e-6
    for rows in ([0], [8], [12, 1, 9]):
        assert torch.equal(run(case.rows(rows)), whole_NO[rows])


def test_only_named_slots_are_read() -> None:
    case = make_pass([chain(10, 2), TREE], heads=SMALL)
    whole_NO = run(case)
    assert not whole_NO.isnan().any()
    for row in (0, 1, 4, 6):
        assert torch.equal(run(case.rows([row]).poisoned())[0], whole_NO[row])


def test_a_neighbour_that_is_not_a_number_stays_alone() -> None:
    """A key of a later token of the chain holds NaN; earlier tokens do not see it."""
    case = make_pass([chain(10, 4)], heads=SMALL)
    whole_NO = run(case)
    slot = case.keys[3][-1]
    case.k_GSD[:, slot] = torch.nan
    case.v_GSD[:, slot] = torch.nan
    out_NO = run(case)
    assert torch.equal(out_NO[:3], whole_NO[:3])
    assert out_NO[3].isnan().all()


def test_page_placement_changes_nothing() -> None:
    sequences = [chain(18, 1), Sequenced(9, (-1, 0))]
    here, there = (make_pass(sequences, heads=SMALL, seed=seed) for seed in (0, 1))
    assert not torch.equal(here.plan.pages_BP, there.plan.pages_BP)
    out_NO = run(here)
    assert torch.equal(out_NO, run(there))
    assert torch.equal(out_NO, run(make_pass(sequences, heads=SMALL, page_size=7)))


def test_a_chain_named_key_by_key_is_the_same_chain() -> None:
    sequences = [chain(20, 5), chain(0, 3)]
    as_tree = make_pass(sequences, heads=SMALL, as_tree=True)
    assert as_tree.plan.extra_slots_E is not None
    assert torch.equal(run(make_pass(sequences, heads=SMALL)), run(as_tree))


@settings(max_examples=2)
@given(data=st.data())
def test_any_shape_is_near_the_float64_softmax(data: st.DataObject) -> None:
    def number(least: int, most: int) -> int:
        return data.draw(st.integers(least, most))

    heads = Heads((groups := number(1, 2)) * number(1, 20), groups, 2 * number(1, 20))
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    parents = tuple(number(-1, node - 1) for node in range(number(1, 3)))
    sequences = [Sequenced(number(0, 30), parents), chain(number(0, 9), 1)]
    case = make_pass(sequences, heads=heads, dtype=dtype, page_size=number(1, 40))
    assert relative_error(run(case), oracle(case)) < 2e-6


def test_scores_of_any_size_are_finite() -> None:
    case = make_pass([chain(30, 2)], heads=HEADS)
    case.qkv_NE.mul_(100)
    out_NO = run(case)
    assert relative_error(out_NO, oracle(case)) < 2e-3
    assert out_NO.isfinite().all()


def test_float16_meets_numbers_that_tf32_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a product is exact on the matrix units, which read the first 11 bits of a number."""
    dots: list[tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
    dot = BUILDER.create_dot

    def watched(builder: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        dots.append((precision, a.data, b.data))
        return dot(builder, a, b, d, precision, *rest)

    monkeypatch.setattr(BUILDER, "create_dot", watched)
    case = make_pass([chain(10, 2)], heads=SMALL, dtype=torch.float16)
    assert relative_error(run(case), oracle(case)) < 2e-6
    assert {str(precision) for precision, *_ in dots} == {"INPUT_PRECISION.TF32"}
    for _, *operands in dots:
        assert not any((one.view(np.uint32) & 0x1FFF).any() for one in operands)
    # Queries and weights come in three parts, the last of which has what the first two left.
    assert len(dots) % 3 == 0
    assert any(low.any() for _, low, _ in dots[::3])


def test_a_long_context_is_merged_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """128k positions are 512 parts: one after the other they would wait for memory 512 times."""
    num_parts, size, numbers = 512, 16, torch.Generator().manual_seed(3)
    best_P = torch.randn(num_parts, generator=numbers)
    total_P = torch.rand(num_parts, generator=numbers) + 1
    mixed_PD = torch.randn(num_parts, size, generator=numbers)
    out_ND = torch.full((1, size), torch.nan)
    # The last part is not full.
    visible_N = torch.tensor([num_parts * PART - 3], dtype=torch.int32)
    num_loads, load = 0, BUILDER.create_masked_load

    def counted(*arguments: Any) -> Any:
        nonlocal num_loads
        num_loads += 1
        return load(*arguments)

    monkeypatch.setattr(BUILDER, "create_masked_load", counted)
    merge: Any = vars(attention)["merge_kernel"]
    launch(
        merge, (1, 1), visible_N, visible_N, best_P, total_P, mixed_PD, out_ND, 0, num_parts, size,
        LISTED=False, HEAD_DIM=size, DIMS=size, PART=PART, PARTS=32, num_warps=4,
    )  # fmt: skip
    share_P = (best_P - best_P.max()).double().exp()
    expected_D = (mixed_PD * share_P[:, None]).sum(0) / (total_P * share_P).sum()
    assert relative_error(out_ND[0], expected_D) < 2e-6
    assert num_loads <= 1 + 4 * num_parts // 32


def test_a_token_of_no_keys_gets_zeros() -> None:
    """What a captured graph makes of a row that it leaves out."""
    case = make_pass([chain(10, 2)], heads=HEADS)
    case.plan.visible_N[1] = 0
    out_NO = run(case)
    assert out_NO[0].any()
    assert not out_NO[1].any()
