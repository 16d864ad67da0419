"""What every Controller must keep to."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.controllers import trace
from checks.effort import examples
from outrider.control.goodput import GoodputController
from outrider.control.heuristics import FixedController, Watchdog
from outrider.core.draft import Budget, RoundTrace
from outrider.core.protocols import Controller
from outrider.estimate.acceptance import MOST_SEQUENCES
from outrider.plugins.controllers import BandController, SloController

# Nodes of a tree for each token of its depth.
TREE = 3
MakeController = Callable[[int, int], Controller]
CONTROLLERS: Mapping[str, MakeController] = {
    "fixed": lambda k, min_k: FixedController(Budget(k)),
    "band": lambda k, min_k: BandController(k=k, min_k=min_k, target=0.7),
    "band of trees": lambda k, min_k: BandController(
        k=k, min_k=min_k, target=0.7, num_nodes=TREE * k
    ),
    "slo": lambda k, min_k: SloController(k=k, min_k=min_k, target_ms=20.0),
    "slo of trees": lambda k, min_k: SloController(
        k=k, min_k=min_k, target_ms=20.0, num_nodes=TREE * k
    ),
    "goodput": lambda k, min_k: GoodputController(k=k),
    "goodput of trees": lambda k, min_k: GoodputController(k=k, num_nodes=TREE * k),
    "watched": lambda k, min_k: Watchdog(FixedController(Budget(k))),
    "watched together": lambda k, min_k: Watchdog(FixedController(Budget(k)), shared=True),
}
every_controller = pytest.mark.parametrize("make", CONTROLLERS.values(), ids=CONTROLLERS.keys())


@st.composite
def traces(draw: st.DrawFn) -> RoundTrace:
    drafted = draw(st.integers(0, 8))
    accepted = draw(st.integers(0, drafted))
    return trace(
        draw(st.integers(0, 3)),
        drafted,
        accepted,
        ms=draw(st.sampled_from([1.0, 30.0, 500.0])),
        num_waiting=draw(st.sampled_from([0, 7, 20])),
        reading=drafted == 0 and draw(st.booleans()),
    )


@every_controller
@examples(40)
@given(k=st.integers(0, 64), data=st.data(), seen=st.lists(traces(), max_size=80))
def test_budgets_stay_within_bounds(
    make: MakeController, k: int, data: st.DataObject, seen: list[RoundTrace]
) -> None:
    controller = make(k, data.draw(st.integers(0, k)))
    for record in [None, *seen]:
        if record is not None:
            controller.observe(record)
        for seq_id in (0, 1, 99):
            budget = controller.budgets([seq_id])[0]
            assert 0 <= budget.depth <= k
            # Trees are as wide whatever their depth.
            assert budget.num_nodes in (0, TREE * budget.depth)


@every_controller
@examples(40)
@given(seen=st.lists(traces(), max_size=80), k=st.integers(0, 9))
def test_the_same_traces_give_the_same_budgets(
    make: MakeController, seen: list[RoundTrace], k: int
) -> None:
    """Asking changes nothing, however often: only what was observed counts."""
    asked, told = make(k, 0), make(k, 0)
    for record in seen:
        asked.budgets([record.seq_id])
        asked.budgets([5])
        for controller in (asked, told):
            controller.observe(record)
        assert asked.budgets([record.seq_id]) == told.budgets([record.seq_id])


@every_controller
def test_memory_does_not_grow_with_the_number_of_requests(make: MakeController) -> None:
    def size_after(num_sequences: int) -> int:
        controller = make(8, 1)
        for seq_id in range(num_sequences):
            controller.budgets([seq_id])
            for _ in range(3):
                controller.observe(trace(seq_id, 4, 2))
        return _reachable_bytes(controller)

    assert size_after(3 * MOST_SEQUENCES) <= 1.2 * size_after(MOST_SEQUENCES)


def _reachable_bytes(root: object) -> int:
    """All that `root` holds on to, but for classes, modules and functions."""
    seen: dict[int, object] = {}
    found: list[object] = [root]
    while found:
        thing = found.pop()
        if id(thing) not in seen and not isinstance(thing, type) and not callable(thing):
            seen[id(thing)] = thing
            found += gc.get_referents(thing)
    return sum(sys.getsizeof(thing) for thing in seen.values())
