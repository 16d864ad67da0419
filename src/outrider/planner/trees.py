"""Which tree to draft: the expected tokens of the best of N nodes, and the N that pays.

The best tree of N nodes has the N worthiest (`core/tree.py`), so place j is kept with the sum
of the worths of its nodes at depth j. Rows cost by whole tiles, so of all sizes only those are of
use that end at the edge of one: with b sequences the largest N for which b (N + 1) rows still fit.

Where only first candidates were counted, what their siblings bring is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.tree import ROW_TILE, Chances, best_shape, with_siblings
from outrider.estimate.calibration import Calibration, DrafterCosts
from outrider.estimate.theory import RoundLaw
from outrider.planner.places import Rates
from outrider.planner.rounds import Load, forecast

# Nodes of the largest tree that is tried.
MOST_NODES = 63


def chances_of(drafter: DrafterCosts, rates: Rates, depth: int) -> Chances:
    """[place][rank], counted or guessed, down to `depth`."""
    if drafter.chances:
        return drafter.chances[:depth]
    return with_siblings([rates.kept_at(place) for place in range(1, depth + 1)])


def tree_law(chances: Chances, num_nodes: int) -> RoundLaw:
    """Of rounds that draft the best tree of at most `num_nodes`."""
    shape = best_shape(chances, num_nodes)
    if not len(shape):
        return RoundLaw((), 0.0, 0.0)
    kept = [0.0] * (max(shape.depths) + 1)
    for depth, worth in zip(shape.depths, shape.worths, strict=True):
        kept[depth] += worth
    return RoundLaw(tuple(min(1.0, one) for one in kept), 1.0, float(len(shape)))


def sizes_to_try(batch: int, *, least: int, most: int = MOST_NODES) -> list[int]:
    """Nodes a tree of each of `batch` sequences, from `least` to `most`, that fill their tiles."""
    edges: set[int] = set()
    rows = ROW_TILE
    while rows // batch - 1 <= most:
        edges.add(rows // batch - 1)
        rows += ROW_TILE
    return sorted(size for size in {*edges, most} if least <= size <= most)


@dataclass(frozen=True, slots=True)
class Tree:
    """The best tree of a drafter: at most `num_nodes`, at most `depth` deep. `speed_up` is of long
    texts, with `tokens` a round; `is_guess` says that nobody counted what siblings bring."""

    drafter: str
    num_nodes: int
    depth: int
    tokens: float
    speed_up: float
    is_guess: bool


def best_tree(
    calibration: Calibration, drafter: DrafterCosts, load: Load, rates: Rates, *, depth: int
) -> Tree | None:
    """That with the largest speed-up, of more nodes than a chain of `depth`. Choosing its nodes is
    taken to cost no more than drafting the chain."""
    chances = chances_of(drafter, rates, depth)
    found: list[Tree] = []
    for size in sizes_to_try(load.batch, least=len(chances) + 1):
        law = tree_law(chances, size)
        speed_up = forecast(calibration, drafter, load, law, depth=len(law.kept)).speed_up
        guess = not drafter.chances
        found.append(Tree(drafter.name, size, len(law.kept), law.tokens, speed_up, guess))
    return max(found, key=lambda one: one.speed_up, default=None)
