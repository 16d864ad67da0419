"""Budgets of trees: what is a draft's length to a controller is a tree's depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.controllers import trace
from outrider.control.goodput import GoodputController
from outrider.control.heuristics import BandController, SloController
from outrider.core.budget import Budget, RoundTrace
from outrider.core.protocols import Controller
from outrider.estimate.cost import CostTable, Curve

K, NODES = 8, 24

COUNTING: dict[str, Callable[[int], Controller]] = {
    "band": lambda nodes: BandController(k=K, min_k=1, target=0.7, num_nodes=nodes),
    "slo": lambda nodes: SloController(k=K, min_k=1, target_ms=1e6, num_nodes=nodes),
}


def tree(depth: int, num_accepted: int) -> RoundTrace:
    """A round with a tree of so deep, as large as it may be."""
    return replace(trace(0, NODES * depth // K, num_accepted), draft_depth=depth)


@given(depth=st.integers(0, 64), num_nodes=st.integers(0, 256), data=st.data())
def test_a_shallower_budget_is_smaller_in_proportion(
    depth: int, num_nodes: int, data: st.DataObject
) -> None:
    budget = Budget(depth, 1.5, num_nodes, "why")
    cut = budget.cut(data.draw(st.integers(0, depth)))
    assert (cut.temperature, cut.why) == (1.5, "why")
    assert cut.size <= budget.size
    if depth:
        assert cut.num_nodes <= num_nodes * cut.depth / depth < cut.num_nodes + 1
    assert budget.cut(depth) == budget


@pytest.mark.parametrize("name", COUNTING)
@given(kept=st.lists(st.floats(0, 1), max_size=70))
def test_a_tree_is_as_long_as_a_chain_of_its_depth(name: str, kept: list[float]) -> None:
    chains, trees = COUNTING[name](0), COUNTING[name](NODES)
    for share in kept:
        depth = chains.budgets([0])[0].depth
        assert trees.budgets([0])[0] == Budget(depth, num_nodes=NODES * depth // K)
        num_accepted = round(share * depth)
        chains.observe(trace(0, depth, num_accepted))
        trees.observe(tree(depth, num_accepted))


def settled(num_nodes: int, row: float) -> int:
    """The depth that goodput settles on where three of four tokens in a row are kept and a row
    costs `row` of a pass."""
    costs = CostTable(
        target=Curve(((1.0, 1.0), (101.0, 1.0 + 100 * row))),
        drafts=((1, Curve(((0.0, 0.0), (1.0, 0.001)))),),
    )
    controller = GoodputController(k=K, num_nodes=num_nodes, costs=costs)
    for turn in range(60):
        depth = controller.budgets([0])[0].depth
        kept = depth if turn % 4 else depth // 2
        nodes = num_nodes * depth // K or depth
        seconds = 1.0 + row * nodes
        told = trace(0, nodes, kept)
        controller.observe(
            replace(
                told,
                pass_index=turn,
                draft_depth=depth,
                draft_seconds=0.001 * nodes,
                verify_seconds=seconds,
                accept_seconds=0.0,
            )
        )
    return controller.budgets([0])[0].depth


def test_goodput_counts_all_rows_of_a_tree_and_only_its_depth_as_kept() -> None:
    """Rows that cost nothing leave a tree as deep as a chain; dear ones make it shallower."""
    assert settled(NODES, 0.0) == settled(0, 0.0) == K
    assert 0 < settled(NODES, 0.06) < settled(0, 0.06)
