"""Shapes of trees: the best by an independent dynamic program, and what is drawn in them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from checks.trees import best_expected, check_shape
from doubles.every_branch import EveryBranch, Tokens, distribution
from outrider.core.draft import Budget
from outrider.core.rng import KeyedRng, race_node
from outrider.core.tree import (
    ROW_TILE,
    Shape,
    best_shape,
    chain_shape,
    fill_rows,
    guessed_chances,
)
from outrider.drafters.common.growth import SampledNodes, chosen_tree, settled_shape, without
from outrider.estimate.cost import worthwhile

falling = st.lists(st.floats(0, 0.4), min_size=1, max_size=4).map(
    lambda shares: tuple(sorted(shares, reverse=True))
)
chances = st.lists(falling, min_size=1, max_size=4)


def test_worked_examples() -> None:
    check_shape(best_shape)


@examples(60)
@given(chances=chances, num_nodes=st.integers(1, 10))
def test_no_tree_is_better(chances: list[tuple[float, ...]], num_nodes: int) -> None:
    shape = best_shape(chances, num_nodes)
    assert shape.expected == pytest.approx(best_expected(chances, num_nodes))


@examples(60)
@given(chances=chances, num_nodes=st.integers(0, 30), width=st.integers(1, 3))
def test_shapes_hang_together(chances: list[tuple[float, ...]], num_nodes: int, width: int) -> None:
    whole = best_shape(chances, num_nodes)
    assert len(whole) <= num_nodes
    for shape in (whole, whole.first(3), whole.by_depth(), whole.narrowed(width)):
        for node, parent in enumerate(shape.parents):
            assert -1 <= parent < node
            elder = [
                r for p, r in zip(shape.parents[:node], shape.ranks, strict=False) if p == parent
            ]
            assert elder == list(range(shape.ranks[node]))
        assert max(shape.depths, default=0) < len(chances)
    assert sorted(whole.by_depth().worths) == sorted(whole.worths)
    assert list(whole.by_depth().depths) == sorted(whole.depths)
    narrow = whole.narrowed(width)
    for depth in set(narrow.depths):
        above = {p for p, d in zip(narrow.parents, narrow.depths, strict=True) if d == depth}
        assert len(above) <= width


def test_a_chain_is_the_tree_of_one_candidate_a_place() -> None:
    assert best_shape([(0.9,), (0.5,), (0.1,)], 5).parents == chain_shape(3).parents


def test_nodes_fill_the_last_tile_of_rows() -> None:
    assert fill_rows(0, 40) == ROW_TILE - 1
    assert fill_rows(15, 40) == 15
    assert fill_rows(16, 40) == 31
    assert fill_rows(16, 20) == 20
    assert fill_rows(3, 0) == 0
    shape = best_shape([tuple([0.3] * 3 + [0.001] * 60)], 63)
    assert len(shape) == 63
    assert len(worthwhile(shape)) == ROW_TILE - 1


def test_guesses_are_chances() -> None:
    for shares in guessed_chances(6):
        assert sum(shares) <= 1
        assert list(shares) == sorted(shares, reverse=True)


def test_nodes_that_bring_less_than_their_price_are_left_out() -> None:
    """However many rows a tile has; but never all of them."""
    shape = best_shape(guessed_chances(4), 24)
    for price in (0.001, 0.05, 0.2, 0.6):
        kept = worthwhile(shape, price)
        assert kept == shape.first(sum(worth >= price for worth in shape.worths))
        assert len(kept) > 0
    assert len(worthwhile(shape, 0.05)) < ROW_TILE - 1
    assert len(worthwhile(shape, 2.0)) == 1
    assert len(worthwhile(Shape((), (), ()), 2.0)) == 0


def test_a_drawn_tree_has_the_shape_of_its_budget() -> None:
    chances = guessed_chances(6)
    for budget in (Budget(6, num_nodes=20), Budget(6, num_nodes=20, price=0.1)):
        wanted = worthwhile(best_shape(chances, 20), budget.price).by_depth()
        assert settled_shape(budget) == wanted
    assert len(settled_shape(Budget(6, num_nodes=20, price=0.1))) < 15


def test_a_distribution_without_a_token() -> None:
    probs_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    left_V = without(probs_V, 0)
    assert left_V is not None
    assert torch.allclose(left_V, torch.tensor([0.0, 0.6, 0.4], dtype=torch.float64))
    assert without(torch.tensor([0.0, 1.0]), 1) is None
    assert float(probs_V.sum()) == 1


def test_candidates_of_a_depth_are_the_same_below_every_node() -> None:
    shape = Shape((-1, -1, 0, 1), (0, 1, 0, 0), (0.5, 0.3, 0.2, 0.1))
    draft = chosen_tree(shape, [(7, 8), (3, 4)])
    assert (draft.tokens, draft.parents, draft.probs_NV) == ((7, 8, 3, 3), shape.parents, None)


DISTRIBUTIONS = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]], dtype=torch.float64)
BRANCHING = Shape((-1, -1, 0, 0, 1), (0, 1, 0, 1, 0), (0.5, 0.4, 0.3, 0.2, 0.1))


def drawn(shape: Shape, rng: EveryBranch, probs_KV: torch.Tensor) -> SampledNodes:
    tree = SampledNodes(shape, rng)
    for depth in shape.depths:
        tree.grow(probs_KV[depth])
    return tree


def test_draws_follow_the_distributions_that_are_reported() -> None:
    """Enumerated: each tree comes as often as the product of its nodes' reported distributions
    says."""
    reports: dict[Tokens, torch.Tensor] = {}

    def drawing(rng: EveryBranch) -> Tokens:
        draft = drawn(BRANCHING, rng, DISTRIBUTIONS).draft()
        assert draft.probs_NV is not None
        reports[draft.tokens] = draft.probs_NV
        return draft.tokens

    found = distribution(drawing)
    assert sum(found.values()) == pytest.approx(1)
    for tokens, probs_NV in reports.items():
        wanted = 1.0
        for token, probs_V in zip(tokens, probs_NV, strict=True):
            wanted *= float(probs_V[token])
        assert found[tokens] == pytest.approx(wanted)
        # Siblings differ.
        assert tokens[0] != tokens[1]
        assert tokens[2] != tokens[3]


def test_what_cannot_be_drawn_is_left_out_with_all_below_it() -> None:
    one_hot = torch.eye(3, dtype=torch.float64)[:2]
    tree = drawn(BRANCHING, EveryBranch(), one_hot)
    draft = tree.draft()
    assert (draft.tokens, draft.parents) == ((0, 1), (-1, 0))
    assert tree.drawn == [0, None, 1, None, None]
    assert len(SampledNodes(BRANCHING, EveryBranch()).draft()) == 0


def test_a_younger_sibling_is_the_runner_up_of_the_race() -> None:
    rng = KeyedRng(3, 0, 11)
    tree = SampledNodes(Shape((-1, -1), (0, 1), (0.5, 0.5)), rng, race_node)
    for _ in range(2):
        tree.grow(DISTRIBUTIONS[0])
    draft = tree.draft()
    assert draft.tokens[0] == rng.race_at(DISTRIBUTIONS[0], 0)
    left_V = without(DISTRIBUTIONS[0], draft.tokens[0])
    assert left_V is not None
    assert draft.tokens[1] == rng.race_at(left_V, 0)
