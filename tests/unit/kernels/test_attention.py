from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.core.clock import host_ints
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import AttentionKind
from outrider.kernels.reference.attention import TorchAttention
from unit.kernels.implementations import (
    DTYPES,
    IMPLEMENTATIONS,
    on_vectors,
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
    Heads(3, 3, 10),
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


# Any two of implementation, dtype and heads meet, here and below; other products are `deep`.
@pytest.mark.sample(5)
@pytest.mark.covering(2)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_row_does_not_depend_on_the_pass(name: str, dtype: torch.dtype, heads: Heads) -> None:
    kernels = on_vectors(name, dtype)
    case = make_pass([chain(0, 60), TREE, chain(70, 33)], heads=heads, dtype=dtype)
    alone_NO = torch.cat([run(kernels, case.rows([row])) for row in range(100)])
    assert torch.equal(run(kernels, case), alone_NO)
    for rows in row_choices(100):
        assert torch.equal(run(kernels, case.rows(host_ints(rows))), alone_NO[rows])


def test_only_named_slots_are_read(name: str, dtype: torch.dtype) -> None:
    kernels = on_vectors(name, dtype)
    case = make_pass([chain(20, 9), TREE], dtype=dtype)
    whole_NO = run(kernels, case)
    assert not whole_NO.isnan().any()
    for row in range(16):
        assert torch.equal(run(kernels, case.rows([row]).poisoned())[0], whole_NO[row])


@pytest.mark.sample(5)
@pytest.mark.covering(2)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_page_placement_changes_nothing(name: str, dtype: torch.dtype, heads: Heads) -> None:
    """Nor whether pages lie in a row, for any kind of layer."""
    kernels = on_vectors(name, dtype)
    sequences = [chain(50, 5), TREE]
    here = make_pass(sequences, heads=heads, dtype=dtype)
    others = [
        make_pass(sequences, heads=heads, dtype=dtype, seed=1),
        make_pass(sequences, heads=heads, dtype=dtype, seed=None),
        make_pass(sequences, heads=heads, dtype=dtype, page_size=7),
        make_pass(sequences, heads=heads, dtype=dtype, page_size=7, seed=None),
    ]
    for kind in (AttentionKind(0.125), *kinds(heads)):
        wanted_NO = run(kernels, here, kind)
        for other in others:
            assert not torch.equal(here.plan.pages_BP, other.plan.pages_BP)
            assert torch.equal(wanted_NO, run(kernels, other, kind)), kind


def test_a_chain_named_key_by_key_is_the_same_chain(name: str, dtype: torch.dtype) -> None:
    kernels = on_vectors(name, dtype)
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
    assert relative_error(run(on_vectors(name, dtype), case), oracle(case)) < 2e-6


def test_scores_of_any_size_are_finite(name: str, dtype: torch.dtype) -> None:
    kernels = on_vectors(name, dtype)
    case = make_pass([chain(300, 4)], dtype=dtype)
    case.qkv_NE.mul_(100)
    out_NO = run(kernels, case)
    assert relative_error(out_NO, oracle(case)) < 2e-3
    assert out_NO.isfinite().all()


def test_a_long_context_keeps_its_precision(name: str, dtype: torch.dtype) -> None:
    case = make_pass([chain(5000, 2)], dtype=dtype)
    assert relative_error(run(on_vectors(name, dtype), case), oracle(case)) < 1e-5


@pytest.mark.parametrize("seed", [0, None])
def test_the_grouped_definition_agrees(name: str, dtype: torch.dtype, seed: int | None) -> None:
    """What runs on other devices: one group a sequence, with masks."""
    del name
    case = make_pass([chain(50, 9), TREE, chain(0, 20)], dtype=dtype, seed=seed)
    out_NO = torch.full((36, 256), torch.nan)
    attention = TorchAttention(alone=False)
    attention(case.qkv_NE, case.k_GSD, case.v_GSD, case.plan, 0.125, out_NO)
    assert relative_error(out_NO, oracle(case)) < 2e-6


class Gathered(TorchDispatchMode):
    """Elements of new tensors that were made from the arena by anything but the attention."""

    def __init__(self, arena: Tensor) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._arena = arena.untyped_storage().data_ptr()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        of_arena = any(self._is_arena(arg) for arg in args)
        if of_arena and "attention" not in str(func) and not self._is_arena(out):
            self.count += out.numel()
        return out

    def _is_arena(self, x: object) -> bool:
        return isinstance(x, Tensor) and x.untyped_storage().data_ptr() == self._arena


@pytest.mark.sample(2)
@pytest.mark.covering(2)
@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("alone", [True, False])
def test_what_is_copied(name: str, dtype: torch.dtype, alone: bool, seed: int | None) -> None:
    """Nothing of float32 pages in a row, but a tree's where rows are computed one by one; else
    what a sequence's rows read, once."""
    del name
    for sequence, is_tree in ((chain(50, 9), False), (TREE, True)):
        case = make_pass([sequence], dtype=dtype, seed=seed)
        num_rows, out_NO = len(case.keys), torch.empty(len(case.keys), 256)
        with Gathered(case.k_GSD) as gathered:
            TorchAttention(alone=alone)(
                case.qkv_NE, case.k_GSD, case.v_GSD, case.plan, 0.125, out_NO
            )
        tails = sum(len(keys) - sequence.committed for keys in case.keys) if alone else 0
        most = 2 * 2 * 64 * (sequence.committed + num_rows + (tails if is_tree else 0))
        is_view = seed is None and dtype == torch.float32 and not (alone and is_tree)
        assert gathered.count == 0 if is_view else 0 < gathered.count <= most


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


@pytest.mark.sample(2)
@pytest.mark.covering(2)
@pytest.mark.parametrize("heads", HEADS[:4], ids=str)
def test_windows_caps_and_sinks(name: str, dtype: torch.dtype, heads: Heads) -> None:
    kernels = on_vectors(name, dtype)
    case = make_pass([chain(0, 60), TREE, chain(70, 33)], heads=heads, dtype=dtype)
    for kind in kinds(heads):
        whole_NO = run(kernels, case, kind)
        assert relative_error(whole_NO, oracle(case, kind)) < 2e-6, kind
        alone_NO = torch.cat([run(kernels, case.rows([row]), kind) for row in range(100)])
        assert torch.equal(whole_NO, alone_NO), kind


def test_a_window_reads_no_other_slots(name: str, dtype: torch.dtype) -> None:
    kernels, kind = on_vectors(name, dtype), AttentionKind(0.125, window=6)
    case = make_pass([chain(20, 9)], dtype=dtype)
    whole_NO = run(kernels, case, kind)
    last = case.keys[-1]
    case.k_GSD[:, last[:-6]] = torch.nan
    case.v_GSD[:, last[:-6]] = torch.nan
    assert torch.equal(run(kernels, case.rows([8]), kind)[0], whole_NO[8])


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", [0, None])
def test_the_grouped_definition_of_kinds_agrees(
    name: str, dtype: torch.dtype, seed: int | None
) -> None:
    del name
    heads = HEADS[0]
    case = make_pass([chain(50, 9), TREE, chain(0, 20)], heads=heads, dtype=dtype, seed=seed)
    attention = TorchAttention(alone=False)
    for kind in kinds(heads):
        out_NO = torch.full((36, 256), torch.nan)
        attention(case.qkv_NE, case.k_GSD, case.v_GSD, case.plan, kind, out_NO)
        assert relative_error(out_NO, oracle(case, kind)) < 2e-6, kind
