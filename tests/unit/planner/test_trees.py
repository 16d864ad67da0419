"""Trees: their stats, their sizes at tile edges, and which pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from doubles.planned import costs, flat
from outrider.core.tree import best_shape, chain_shape
from outrider.estimate.cost import Curve
from outrider_lab.planner.calibration import PassCosts
from outrider_lab.planner.overlap import MOST_NODES, best_tree, chances_of, sizes_to_try, tree_stats
from outrider_lab.planner.rounds import DecodeLoad, Rates, forecast, round_stats

falling = st.lists(st.floats(0, 0.4), min_size=1, max_size=3).map(
    lambda shares: tuple(sorted(shares, reverse=True))
)


@examples(20)
@given(chances=st.lists(falling, min_size=1, max_size=4), num_nodes=st.integers(1, 12))
def test_a_tree_keeps_what_its_nodes_are_worth(
    chances: list[tuple[float, ...]], num_nodes: int
) -> None:
    stats, shape = tree_stats(chances, num_nodes), best_shape(chances, num_nodes)
    assert stats.tokens == pytest.approx(1 + shape.expected)
    assert stats.num_drafted == len(shape)
    assert len(stats.kept) <= len(chances)
    more = tree_stats(chances, num_nodes + 1)
    assert more.tokens >= stats.tokens - 1e-12


@examples(20)
@given(beta=st.floats(0.01, 1), k=st.integers(1, 8))
def test_a_tree_of_one_candidate_a_place_is_a_chain(beta: float, k: int) -> None:
    stats = tree_stats([(beta,)] * k, k)
    assert stats.tokens == pytest.approx(round_stats(Rates((beta,)), k).tokens)
    assert best_shape([(beta,)] * k, k).parents == chain_shape(k).parents


@examples(20)
@given(batch=st.integers(1, 12), least=st.integers(1, 20), most=st.integers(1, 100))
def test_sizes_fill_their_tiles(batch: int, least: int, most: int) -> None:
    for size in sizes_to_try(batch, least=least, most=most):
        assert least <= size <= most
        tiles = -(-batch * (size + 1) // 16)
        assert size == most or batch * (size + 2) > 16 * tiles


def test_the_tree_ends_where_the_next_tile_begins() -> None:
    """16 rows cost 1 second, the next 16 ten times as much."""
    rows = Curve(((1.0, 1.0), (16.0, 1.0), (17.0, 10.0), (64.0, 11.0)))
    calibration = replace(flat(costs(0.01)), target=PassCosts(rows))
    counted = replace(costs(0.01), chances=((0.6, 0.2, 0.1),) * 5)
    for batch, nodes in ((1, 15), (2, 7)):
        found = best_tree(calibration, counted, DecodeLoad(batch), Rates((0.6,)), depth=5)
        assert found is not None
        assert found.tokens > round_stats(Rates((0.6,)), 5).tokens
        stats = tree_stats(counted.chances, nodes)
        depth = len(stats.kept)
        assert (found.num_nodes, found.depth, found.is_guess) == (nodes, depth, False)
        long = forecast(calibration, counted, DecodeLoad(batch), stats, depth=depth)
        assert found.speed_up == pytest.approx(long.speed_up)
    guessed = best_tree(calibration, costs(0.01), DecodeLoad(), Rates((0.6,)), depth=5)
    assert guessed is not None
    assert guessed.is_guess
    assert (
        best_tree(calibration, costs(0.01), DecodeLoad(), Rates((0.6,)), depth=MOST_NODES) is None
    )


def test_siblings_are_guessed_where_nobody_counted_them() -> None:
    drafter = costs(0.1)
    guessed = chances_of(drafter, Rates((0.8, 0.5)), 3)
    assert [ranks[0] for ranks in guessed] == [0.8, 0.5, 0.5]
    assert all(sum(ranks) <= 1 for ranks in guessed)
    counted = replace(drafter, chances=((0.7, 0.2), (0.6, 0.1)))
    assert chances_of(counted, Rates((0.8,)), 1) == ((0.7, 0.2),)


def test_no_candidate_no_tree() -> None:
    assert tree_stats([(0.0,)], 4).tokens == 1
