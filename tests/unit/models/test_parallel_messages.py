"""What ranks are told is what was planned."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.plan import PackedPlan
from outrider.plugins.parallel import messages
from outrider.plugins.parallel.ranks import HEADER, encode

numbers = st.integers(0, 2**31 - 1)
lists = st.lists(numbers, max_size=6)


class CallLog:
    """A share that writes down what it is asked."""

    def __init__(self) -> None:
        self.passes: list[tuple[PackedPlan, Tensor]] = []
        self.copies: list[tuple[Sequence[int], Sequence[int]]] = []

    def follow(self, plan: PackedPlan, wanted_M: Tensor) -> None:
        self.passes.append((plan, wanted_M))

    def copy_slots(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.copies.append((source, target))


def received(message: list[int]) -> CallLog:
    data = encode(message)
    numbers = array("q", data[HEADER.size :])
    assert HEADER.unpack(data[: HEADER.size]) == (len(numbers),)
    log = CallLog()
    messages.apply(numbers.tolist(), log, torch.device("cpu"))
    return log


@given(
    nodes=st.lists(st.tuples(*[numbers] * 5), min_size=1, max_size=6),
    table=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=3),
    extra=st.none() | lists,
    wanted=lists,
)
def test_a_pass_is_the_one_that_was_planned(
    nodes: list[tuple[int, ...]],
    table: list[tuple[int, ...]],
    extra: list[int] | None,
    wanted: list[int],
) -> None:
    tokens, positions, slots, seq, visible = torch.tensor(nodes, dtype=torch.int32).T.contiguous()
    offsets_N1, extra_E = None, None
    if extra is not None:
        offsets_N1 = torch.arange(len(nodes) + 1, dtype=torch.int32)
        extra_E = torch.tensor(extra, dtype=torch.int32)
    plan = PackedPlan(
        page_size=16,
        tokens_N=tokens,
        positions_N=positions,
        slots_N=slots,
        seq_N=seq,
        visible_N=visible,
        pages_BP=torch.tensor(table, dtype=torch.int32),
        extra_offsets_N1=offsets_N1,
        extra_slots_E=extra_E,
    )
    wanted_M = torch.tensor(wanted, dtype=torch.int32)
    ((got, got_M),) = received(messages.pass_message(plan, wanted_M)).passes
    assert torch.equal(got_M, wanted_M)
    for item in fields(plan):
        mine, theirs = getattr(plan, item.name), getattr(got, item.name)
        if isinstance(mine, Tensor):
            assert torch.equal(theirs, mine)
            assert theirs.dtype == torch.int32
            assert theirs.is_contiguous()
        else:
            assert theirs == mine


@given(source=lists, target=lists)
def test_a_copy_is_the_one_that_was_made(source: list[int], target: list[int]) -> None:
    log = received(messages.copy_message(source, target))
    assert log.copies == [(source, target)]
