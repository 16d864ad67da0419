from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.core.clock import host_ints
from outrider.kernels.plan import AttentionKind
from outrider.kernels.reference.attention import TorchAttention
from outrider.kernels.registry import Kernels
from unit.kernels.implementations import (
    DTYPES,
    IMPLEMENTATIONS,
    kernels_named,
    randn,
    relative_error,
    row_choices,
)
from unit.kernels.paged_cases import Heads, Pass, Sequenced, chain, make_pass

pytestmark = [
    pytest.mark.parametrize("name", IMPLEMENTATIONS),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
]

TREE = Sequenced(37, (-1, -1, 0, 0, 2, 1, 4))
HEADS = (
    Heads(4, 2, 64),
    Heads(2, 1, 64),
    Heads(3, 1, 32),
    Heads(8, 2, 128),
    Heads(2, 2, 80),
    Heads(5, 1, 6),
    Heads(4, 4, 16),
    Heads(2, 2, 40),
)


def run(kernels: Kernels, case: Pass, kind: AttentionKind | None = None) -> Tensor:
    heads = case.heads
    out_NO = torch.full((case.plan.num_tokens, heads.num_heads * heads.head_dim), torch.nan)
    how = kind or heads.head_dim**-0.5
    kernels.attention(case.qkv_NE, case.k_GSD, case.v_GSD, case.plan, how, out_NO)
    return out_NO


def oracle(case: Pass, kind: AttentionKind | None = None) -> Tensor:
    heads, rows = case.heads, list[Tensor]()
    kind = kind or AttentionKind(heads.head_dim**-0.5)
    for q_E, keys in zip(case.qkv_NE.double(), case.keys, strict=True):
        index = torch.tensor(keys[-kind.window :])
        q_GRD = q_E[: heads.num_heads * heads.head_dim].view(heads.num_kv_heads, -1, heads.head_dim)
        k_GTD, v_GTD = case.k_GSD[:, index].double(), case.v_GSD[:, index].double()
        scores_GRT = q_GRD @ k_GTD.transpose(1, 2) * kind.scale
        if kind.cap:
            scores_GRT = kind.cap * torch.tanh(scores_GRT / kind.cap)
        if kind.sinks_H is not None:
            sinks_GR1 = kind.sinks_H.double().view(heads.num_kv_heads, -1, 1)
            scores_GRT = torch.cat([scores_GRT, sinks_GR1], dim=-1)
        weights_GRT = scores_GRT.softmax(-1)[..., : len(index)]
        rows.append((weights_GRT @ v_GTD).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_row_does_not_depend_on_the_pass(name: str, dtype: torch.dtype, heads: Heads) -> None:
    kernels = kernels_named(name, dtype)
    case = make_pass([chain(0, 60), TREE, chain(70, 33)], heads=heads, dtype=dtype)
    alone_NO = torch.cat([run(kernels, case.rows([row])) for row in range(100)])
    assert torch.equal(run(kernels, case), alone_NO)
    for rows in row_choices(100):
        assert torch.equal(run(kernels, case.rows(host_ints(rows))), alone_NO[rows])


def test_only_named_slots_are_read(name: str, dtype: torch.dtype) -> None:
    kernels = kernels_named(name, dtype)
    case = make_pass([chain(20, 9), TREE], dtype=dtype)
    whole_NO = run(kernels, case)
    assert not whole_NO.isnan().any()
    for row in range(16):
        assert torch.equal(run(kernels, case.rows([row]).poisoned())[0], whole_NO[row])


def test_page_placement_changes_nothing(name: str, dtype: torch.dtype) -> None:
    kernels = kernels_named(name, dtype)
    sequences = [chain(50, 5), TREE]
    here, there = (make_pass(sequences, dtype=dtype, seed=seed) for seed in (0, 1))
    assert not torch.equal(here.plan.pages_BP, there.plan.pages_BP)
    assert torch.equal(run(kernels, here), run(kernels, there))
    other_pages = make_pass(sequences, dtype=dtype, page_size=7)
    assert torch.equal(run(kernels, here), run(kernels, other_pages))


def test_a_chain_named_key_by_key_is_the_same_chain(name: str, dtype: torch.dtype) -> None:
    kernels = kernels_named(name, dtype)
    sequences = [chain(50, 9), chain(0, 3)]
    as_chain = make_pass(sequences, dtype=dtype)
    as_tree = make_pass(sequences, dtype=dtype, as_tree=True)
    assert as_tree.plan.extra_slots_E is not None
    assert torch.equal(run(kernels, as_chain), run(kernels, as_tree))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_is_near_the_float64_softmax(
    name: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    def number(least: int, most: int) -> int:
        return data.draw(st.integers(least, most))

    heads = Heads((groups := number(1, 3)) * number(1, 5), groups, 2 * number(1, 40))
    sequences: list[Sequenced] = []
    for _ in range(number(1, 3)):
        parents = tuple(number(-1, node - 1) for node in range(number(1, 6)))
        sequences.append(Sequenced(number(0, 90), parents))
    case = make_pass(sequences, heads=heads, dtype=dtype, page_size=number(1, 40))
    assert relative_error(run(kernels_named(name, dtype), case), oracle(case)) < 2e-6


def test_scores_of_any_size_are_finite(name: str, dtype: torch.dtype) -> None:
    kernels = kernels_named(name, dtype)
    case = make_pass([chain(300, 4)], dtype=dtype)
    case.qkv_NE.mul_(100)
    out_NO = run(kernels, case)
    assert relative_error(out_NO, oracle(case)) < 2e-3
    assert out_NO.isfinite().all()


def test_a_long_context_keeps_its_precision(name: str, dtype: torch.dtype) -> None:
    case = make_pass([chain(5000, 2)], dtype=dtype)
    assert relative_error(run(kernels_named(name, dtype), case), oracle(case)) < 1e-5


def test_the_grouped_definition_agrees(name: str, dtype: torch.dtype) -> None:
    """What runs on other devices: one group a sequence, with masks."""
    del name
    case = make_pass([chain(50, 9), TREE, chain(0, 20)], dtype=dtype)
    out_NO = torch.full((36, 256), torch.nan)
    attention = TorchAttention(alone=False)
    attention(case.qkv_NE, case.k_GSD, case.v_GSD, case.plan, 0.125, out_NO)
    assert relative_error(out_NO, oracle(case)) < 2e-6


def kinds(heads: Heads) -> list[AttentionKind]:
    """Windows that begin before, among and behind what neighbours share, caps and sinks."""
    sinks_H, scale = 3 * randn(heads.num_heads), heads.head_dim**-0.5
    windows = [AttentionKind(scale, window) for window in (1, 2, 5, 16, 45, 1000)]
    return [
        *windows,
        AttentionKind(scale, cap=2.0),
        AttentionKind(2 * scale, cap=50.0),
        AttentionKind(scale, sinks_H=sinks_H),
        AttentionKind(scale, 20, 1.5, sinks_H),
    ]


@pytest.mark.parametrize("heads", HEADS[:4], ids=str)
def test_windows_caps_and_sinks(name: str, dtype: torch.dtype, heads: Heads) -> None:
    kernels = kernels_named(name, dtype)
    case = make_pass([chain(0, 60), TREE, chain(70, 33)], heads=heads, dtype=dtype)
    for kind in kinds(heads):
        whole_NO = run(kernels, case, kind)
        assert relative_error(whole_NO, oracle(case, kind)) < 2e-6, kind
        alone_NO = torch.cat([run(kernels, case.rows([row]), kind) for row in range(100)])
        assert torch.equal(whole_NO, alone_NO), kind


def test_a_window_reads_no_other_slots(name: str, dtype: torch.dtype) -> None:
    kernels, kind = kernels_named(name, dtype), AttentionKind(0.125, window=6)
    case = make_pass([chain(20, 9)], dtype=dtype)
    whole_NO = run(kernels, case, kind)
    last = case.keys[-1]
    case.k_GSD[:, last[:-6]] = torch.nan
    case.v_GSD[:, last[:-6]] = torch.nan
    assert torch.equal(run(kernels, case.rows([8]), kind)[0], whole_NO[8])


def test_the_grouped_definition_of_kinds_agrees(name: str, dtype: torch.dtype) -> None:
    del name
    heads = HEADS[0]
    case = make_pass([chain(50, 9), TREE, chain(0, 20)], heads=heads, dtype=dtype)
    attention = TorchAttention(alone=False)
    for kind in kinds(heads):
        out_NO = torch.full((36, 256), torch.nan)
        attention(case.qkv_NE, case.k_GSD, case.v_GSD, case.plan, kind, out_NO)
        assert relative_error(out_NO, oracle(case, kind)) < 2e-6, kind
