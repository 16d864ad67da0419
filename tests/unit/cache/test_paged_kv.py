"""The KV arena beyond rollback: what is copied, what is shared, and what a refusal leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from checks.memory import check_frames, check_freed
from checks.state import check_speculation_is_not_found
from doubles.tiny_attention import TinyAttentionLM, live_slots
from outrider.core.clock import host_ints
from outrider.core.errors import CapacityError
from outrider.core.protocols import DraftNeeds, StepRow

NEEDS = DraftNeeds()


class Operations(TorchDispatchMode):
    """Names of all tensor operations inside the `with` block."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def feed(model: TinyAttentionLM, seq_id: int, tokens: list[int]) -> None:
    """Read and commit a chain."""
    model.step([StepRow.chain(seq_id, tokens)], NEEDS)
    assert model.state.commit({seq_id: range(len(tokens))}) == 0


def test_committing_a_chain_runs_no_tensor_operation() -> None:
    model = TinyAttentionLM(page_size=2)
    model.state.open(0, ())
    for kept in (5, 2, 0):
        model.step([StepRow.chain(0, [1, 2, 3, 4, 5])], NEEDS)
        with Operations() as seen:
            assert model.state.commit({0: range(kept)}) == 0
        assert not seen.names
    assert model.state.length(0) == 7


def test_committing_a_branch_copies_only_rows_out_of_place() -> None:
    model = TinyAttentionLM(page_size=2)
    model.state.open(0, ())
    model.step([StepRow(0, (1, 2, 3, 4), (-1, -1, 0, 2))], NEEDS)
    with Operations() as seen:
        assert model.state.commit({0: (0, 2, 3)}) == 2
    assert "aten.index_copy_.default" in seen.names
    assert model.state.length(0) == 3


def test_chains_need_no_extra_keys_and_branches_name_theirs() -> None:
    store = TinyAttentionLM(page_size=2).state
    store.open(0, ())
    chain = store.plan([StepRow.chain(0, [1, 2, 3])])
    assert chain.extra_slots_E is None
    assert host_ints(chain.visible_N) == [1, 2, 3]
    assert host_ints(chain.positions_N) == [0, 1, 2]
    branch = store.plan([StepRow(0, (4, 5), (1, 3))])
    assert host_ints(branch.positions_N) == [2, 3]
    assert host_ints(branch.visible_N) == [2, 2]
    assert branch.extra_offsets_N1 is not None
    assert branch.extra_slots_E is not None
    assert host_ints(branch.extra_offsets_N1) == [0, 1, 3]
    assert host_ints(branch.extra_slots_E) == [
        *host_ints(branch.slots_N[:1]),
        *host_ints(branch.slots_N),
    ]


def test_every_plan_tensor_is_contiguous_int32() -> None:
    store = TinyAttentionLM(page_size=2).state
    store.open(0, ())
    plan = store.plan([StepRow(0, (1, 2, 3), (-1, -1, 1))])
    assert plan.num_tokens == 3
    for tensor in (plan.tokens_N, plan.positions_N, plan.slots_N, plan.seq_N, plan.visible_N):
        assert (tensor.dtype, tensor.is_contiguous()) == (torch.int32, True)
    for tensor in (plan.pages_BP, plan.extra_offsets_N1, plan.extra_slots_E):
        assert tensor is not None
        assert (tensor.dtype, tensor.is_contiguous()) == (torch.int32, True)


def test_a_shared_beginning_is_not_fed_again_while_free_or_in_use() -> None:
    model = TinyAttentionLM(page_size=4)
    model.state.open(0, [1, 2, 3, 4, 5, 6])
    feed(model, 0, [1, 2, 3, 4, 5, 6])
    assert model.state.open(1, [1, 2, 3, 4, 9]) == 4
    assert model.state.open(2, [1, 2, 3]) == 0
    for seq_id in (0, 1, 2):
        model.state.close(seq_id)
    assert model.state.num_free_tokens == 256
    assert model.state.open(3, [1, 2, 3, 4, 5, 6, 7, 8]) == 4
    model.state.check()


def test_speculated_tokens_are_never_found_as_a_beginning() -> None:
    check_speculation_is_not_found()


def test_a_full_arena_refuses_a_step_and_changes_nothing() -> None:
    """Even when earlier rows of the same step would still have found room."""
    model = TinyAttentionLM(page_size=4, num_slots=16)
    for seq_id in (0, 1):
        model.state.open(seq_id, ())
        feed(model, seq_id, [1, 2, 3])
    with pytest.raises(CapacityError) as caught:
        model.step([StepRow.chain(0, [1] * 5), StepRow.chain(1, [2] * 9)], NEEDS)
    assert caught.value.hint
    assert (model.state.num_staged(0), model.state.num_staged(1)) == (0, 0)
    assert model.state.num_free_tokens == 8
    model.state.check()
    model.step([StepRow.chain(0, [1] * 5), StepRow.chain(1, [2] * 5)], NEEDS)


def test_a_full_arena_refuses_a_fork_and_changes_nothing() -> None:
    model = TinyAttentionLM(page_size=4, num_slots=8)
    model.state.open(0, ())
    feed(model, 0, [1, 2, 3, 4, 5, 6])
    with pytest.raises(CapacityError):
        model.state.fork(0, 1)
    model.state.check()
    model.state.close(0)
    assert model.state.num_free_tokens == 8


def test_a_fork_at_a_page_boundary_shares_everything() -> None:
    model = TinyAttentionLM(page_size=4, num_slots=8)
    model.state.open(0, ())
    feed(model, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    with Operations() as seen:
        model.state.fork(0, 1)
    assert not seen.names
    assert model.state.length(1) == 8
    model.state.check()


def test_live_slots_are_those_of_committed_rows() -> None:
    model = TinyAttentionLM(page_size=4)
    model.state.open(0, ())
    feed(model, 0, [1, 2, 3, 4, 5])
    model.step([StepRow.chain(0, [6, 7])], NEEDS)
    model.state.fork(0, 1)
    (_, own), (_, copied) = model.state.pages(0), model.state.pages(1)
    assert live_slots(model.state) == [0, 1, 2, 3, 4 * own, 4 * copied]


def test_pages_that_no_later_token_sees_are_given_back() -> None:
    check_freed()


def test_a_layer_with_a_window_holds_it_where_another_sees_all() -> None:
    check_frames()


def test_the_arena_is_allocated_once_in_whole_pages() -> None:
    store = TinyAttentionLM(page_size=4, num_slots=10).state
    assert store.arena.shape == (2, 2, 1, 12, 4)
    assert store.num_free_tokens == 12
    assert all(k.data_ptr() != v.data_ptr() for k, v in store.layers)
    assert (
        store.layers[1][0].untyped_storage().data_ptr() == store.arena.untyped_storage().data_ptr()
    )


def test_texts_that_grow_beside_each_other_lie_in_a_row_each() -> None:
    """Also when all of the arena was written before."""
    model = TinyAttentionLM(page_size=4, num_slots=512)
    for first in range(3, 7):
        model.state.open(0, ())
        for token in range(30):
            feed(model, 0, [first, *(token % 3 + 1,) * 15])
        model.state.close(0)
    for seq_id in (1, 2):
        model.state.open(seq_id, ())
    for _ in range(20):
        for seq_id in (1, 2):
            feed(model, seq_id, [seq_id, 5, 5])
    for seq_id in (1, 2):
        pages = model.state.pages(seq_id)
        assert list(pages) == list(range(pages[0], pages[0] + 15))
