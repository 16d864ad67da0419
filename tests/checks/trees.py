"""The best tree by dynamic programming, as Sequoia finds it: the oracle of `best_shape`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from outrider.core.tree import Shape


def best_expected(chances: Sequence[Sequence[float]], num_nodes: int) -> float:
    """The most accepted tokens that any tree of so many nodes is expected to bring.

    A node's subtrees share the nodes that are left among them, rank by rank.
    """

    @cache
    def below(left: int, depth: int, rank: int) -> float:
        if not left or depth == len(chances) or rank == len(chances[depth]):
            return 0.0
        return max(
            chances[depth][rank] * (1 + below(size - 1, depth + 1, 0))
            + below(left - size, depth, rank + 1)
            for size in range(1, left + 1)
        )

    return below(num_nodes, 0, 0)


def check_shape(make: Callable[[Sequence[Sequence[float]], int], Shape]) -> None:
    """Worked examples."""
    even = [(0.5, 0.25), (0.5, 0.25)]
    # Worths: .5, then .25 twice (child and sibling), then .125 twice.
    shape = make(even, 3)
    assert sorted(zip(shape.parents, shape.ranks, strict=True)) == [(-1, 0), (-1, 1), (0, 0)]
    assert shape.expected == 1.0
    sure = [(1.0,)] * 3
    assert make(sure, 5).parents == (-1, 0, 1)
    assert make([(0.3, 0.3, 0.3, 0.1)], 3).parents == (-1, -1, -1)
    assert len(make([], 4)) == len(make(even, 0)) == 0
