"""Budgets of trees: what is a draft's length to a controller is a tree's depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.controllers import trace
from outrider.control.goodput import GoodputController
from outrider.core.draft import Budget, RoundTrace
from outrider.core.protocols import Controller
from outrider.estimate.cost import CostTable, Curve
from outrider.plugins.controllers import BandController, SloController

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


def settled(num_nodes: int, row: float, nodes_a_place: int = 3) -> Budget:
    """What goodput settles on where three of four tokens in a row are kept and a row costs `row` of
    a pass."""
    costs = CostTable(
        target=Curve(((1.0, 1.0), (101.0, 1.0 + 100 * row))),
        drafts=((1, Curve(((0.0, 0.0), (1.0, 0.001)))),),
    )
    controller = GoodputController(k=K, num_nodes=num_nodes, costs=costs)
    for turn in range(60):
        depth = controller.budgets([0])[0].depth
        kept = depth if turn % 4 else depth // 2
        nodes = nodes_a_place * depth if num_nodes else depth
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
    return controller.budgets([0])[0]


def test_goodput_counts_all_rows_of_a_tree_and_only_its_depth_as_kept() -> None:
    """Rows that cost nothing leave a tree as deep as a chain; dear ones make it shallower."""
    assert settled(NODES, 0.0).depth == settled(0, 0.0).depth == K
    assert 0 < settled(NODES, 0.1).depth < settled(0, 0.1).depth


@pytest.mark.parametrize("row", [0.005, 0.02, 0.06])
def test_a_node_must_bring_what_is_written_meanwhile(row: float) -> None:
    budget = settled(NODES, row)
    assert budget.choice is not None
    assert budget.choice.tokens is not None
    assert budget.choice.seconds is not None
    # A node takes a row, and a thousandth for drafting it.
    seconds = row + 0.001
    wanted = seconds * budget.choice.tokens / budget.choice.seconds
    assert budget.price == pytest.approx(wanted, rel=0.05)


def test_only_what_was_measured_is_a_price() -> None:
    """Not of chains either, which have no node to leave out."""
    assert GoodputController(k=K, num_nodes=NODES).budgets([0])[0].price is None
    assert settled(0, 0.02).price is None


def test_trees_of_few_nodes_a_place_are_taken_for_such() -> None:
    """Trees that leave out most nodes are as deep as chains where rows are dear."""

    def depth(nodes_a_place: int) -> int:
        return settled(NODES, 0.1, nodes_a_place).depth

    assert depth(1) == settled(0, 0.1).depth > depth(3)
