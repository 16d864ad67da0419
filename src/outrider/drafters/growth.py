"""Draft trees and chains that grow level by level from a model's distributions.

A greedy tree keeps the worthiest of all nodes that it has looked at (core/tree_nodes.py): each
level feeds only nodes whose children may still be among them. At temperature > 0 the shape is
settled before the first token is drawn, and siblings are drawn without replacement. Probabilities
of ranks come from the drafter's own distributions, or from a tally over text (`RankTally`).

Shapes:  V = vocabulary, M = nodes that were fed or chains that grow together, N = nodes of a chain
         or nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import NumericsError, blaming
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftRow
from outrider.core.rng import DrawNode, Rng, Role, pick_node
from outrider.core.sampling import PLAIN, Sampling, empty_laws, processed_probs
from outrider.core.tree import (
    ROOT,
    Chances,
    Shape,
    best_shape,
    falling,
    guessed_chances,
)
from outrider.core.tree_nodes import KeptNodes, Level, TreeLimits
from outrider.estimate.worth import LEAST_WORTH, num_worthwhile, worthwhile
from outrider.models.heads import MAX_WIDTH

# The highest that a request may ask for.
MAX_TEMPERATURE = 100.0
# (laws_NV, node): change the laws of a chain's node `node` in place; what comes out is reported.
ChangeLaws: TypeAlias = Callable[[Tensor, int], None]


@dataclass(frozen=True, slots=True)
class Growth:
    """How tokens are chosen: `argmax` where decoding is greedy, else `draw` from a law that
    `sampling` makes and `change`, if given, changes. `whose` logits they are is told where those
    are no numbers."""

    argmax: Callable[[Tensor], list[int]]
    whose: str
    draw: DrawNode = pick_node
    sampling: Sampling = PLAIN
    change: ChangeLaws | None = None

    def extend(self, chains: Sequence[ChainBuilder], logits_MV: Tensor) -> None:
        """Add to each chain a token by its row of logits, which are shaped in place.

        Raises NumericsError for logits that are no numbers."""
        _shape(chains, logits_MV)
        best = self.argmax(logits_MV)
        if -1 in best:
            raise NumericsError(self.whose)
        for index, chain in enumerate(chains):
            if chain.row.params.greedy:
                chain.tokens.append(best[index])
            else:
                self._draw(chain, logits_MV[index])

    def _draw(self, chain: ChainBuilder, logits_V: Tensor) -> None:
        if chain.laws_NV is None:
            chain.laws_NV = empty_laws(chain.depth, logits_V)
        node = len(chain.tokens)
        law_1V = chain.laws_NV[node][None]
        law_V = processed_probs(logits_V[None], chain.row.params, self.sampling, law_1V)[0]
        if self.change is not None:
            self.change(law_1V, node)
        chain.tokens.append(self.draw(law_V, chain.row.noise, node))


@dataclass(slots=True)
class ChainBuilder:
    """A draft of `depth` tokens under construction. Laws are made in the place where they are
    reported."""

    row: DraftRow
    depth: int
    tokens: list[int] = field(default_factory=list[int])
    laws_NV: Tensor | None = None

    def __post_init__(self) -> None:
        self.row = _heated(self.row)

    @property
    def complete(self) -> bool:
        return len(self.tokens) >= self.depth

    def draft(self) -> Draft:
        return Draft.chain(self.tokens, self.laws_NV)


def drawn_params(row: DraftRow) -> SamplingParams:
    """The request's, with the temperature that drafts are drawn at."""
    temperature = row.params.temperature * row.budget.temperature
    return replace(row.params, temperature=min(temperature, MAX_TEMPERATURE))


def _heated(row: DraftRow) -> DraftRow:
    """With the temperature that its drafts are drawn at. Greedy drafts are not drawn."""
    if row.budget.temperature == 1 or row.params.greedy:
        return row
    return replace(row, params=drawn_params(row))


def _shape(chains: Sequence[ChainBuilder], logits_MV: Tensor) -> None:
    """Shape each chain's logits in place as the target's will be, after the text drafted so far."""
    for chain, logits_V in zip(chains, logits_MV, strict=True):
        row = chain.row
        if row.shaper is not None:
            with blaming(row.seq_id), torch.inference_mode():
                logits_V.copy_(row.shaper.shape(logits_V[None], row.tokens, [chain.tokens])[0])


class RankTally:
    """Counts at which rank among a drafter's candidates the text's own token stood.

    A place counts only where the text's tokens before it were candidates, so that products of
    chances are chances of paths.
    """

    def __init__(self, num_places: int, num_ranks: int) -> None:
        self._hits = [[0] * num_ranks for _ in range(num_places)]
        self._seen = [0] * num_places

    def note(self, ranks: Sequence[int | None]) -> None:
        """The ranks at places 0, 1, ... after one position of a text; None is none of those
        counted, and nothing behind it counts."""
        for place, rank in enumerate(ranks[: len(self._seen)]):
            self._seen[place] += 1
            if rank is None or rank >= len(self._hits[place]):
                return
            self._hits[place][rank] += 1

    def chances(self) -> Chances:
        """Shares, made not to rise with the rank: a few counts more of a later one are noise."""
        return [
            falling([hit / max(seen, 1) for hit in hits])
            for hits, seen in zip(self._hits, self._seen, strict=True)
        ]


# (law_V, noise, node, depth): a token from the law of draft node `node`, `depth` tokens below the
# pending one.
DrawInTree: TypeAlias = Callable[[Tensor, Rng, int, int], int]


def pick_in_tree(law_V: Tensor, noise: Rng, node: int, depth: int) -> int:
    """With a number of the node's own, as rules that compare p with q need it."""
    del depth
    return noise.pick(law_V, node, Role.DRAFT)


def race_in_tree(law_V: Tensor, noise: Rng, node: int, depth: int) -> int:
    """With the numbers that the coupled rule will draw with at the node's position. A younger
    sibling is the runner-up of the same race."""
    del node
    return noise.race_at(law_V, depth)


def without(law_V: Tensor, tokens: Sequence[int]) -> Tensor | None:
    """`law_V` given that none of `tokens` was drawn; None if they are all it has."""
    if not tokens:
        return law_V
    left_V = law_V.clone()
    left_V[list(tokens)] = 0
    total = left_V.sum(dtype=torch.float64)
    return left_V.div_(total) if float(total) > 0 else None


class SampledTree:
    """A tree of the shape given, drawn node by node, siblings without replacement.

    A node for which its law has no token left is not drawn, nor is anything below it. That depends
    on the laws alone and on earlier siblings, so what the rule keeps follows the target's law.
    """

    def __init__(self, shape: Shape, noise: Rng, draw: DrawInTree = pick_in_tree) -> None:
        self.shape, self._noise, self._draw = shape, noise, draw
        self._depths = shape.depths
        # For each node of the shape: its node of the draft, None if it could not be drawn.
        self.nodes: list[int | None] = []
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._laws: list[Tensor] = []

    def grow(self, law_V: Tensor | None) -> None:
        """Draw the shape's next node from what follows its parent, None if that was not drawn."""
        index = len(self.nodes)
        parent = self._parent(index)
        left_V = None
        if law_V is not None and parent is not None:
            left_V = without(law_V, self._drawn_below(parent))
        if left_V is None or parent is None:
            self.nodes.append(None)
            return
        node = len(self.tokens)
        self.tokens.append(self._draw(left_V, self._noise, node, self._depths[index]))
        self.parents.append(parent)
        self._laws.append(left_V)
        self.nodes.append(node)

    def draft(self) -> Draft:
        if not self.tokens:
            return Draft.empty()
        return Draft(tuple(self.tokens), tuple(self.parents), torch.stack(self._laws))

    def _parent(self, index: int) -> int | None:
        parent = self.shape.parents[index]
        return ROOT if parent == ROOT else self.nodes[parent]

    def _drawn_below(self, parent: int) -> list[int]:
        return [t for t, p in zip(self.tokens, self.parents, strict=True) if p == parent]


def chosen_tree(shape: Shape, candidates: Sequence[Sequence[int]]) -> Draft:
    """A greedy tree whose candidates depend on the depth alone: `candidates[depth][rank]`."""
    tokens = [candidates[d][rank] for d, rank in zip(shape.depths, shape.ranks, strict=True)]
    return Draft(tuple(tokens), shape.parents)


class GrowingTree(Protocol):
    """One sequence's draft. It is told what follows the root, and then, as long as there is a next
    level, what follows its nodes."""

    @property
    def row(self) -> DraftRow: ...
    @property
    def level(self) -> Level:
        """The nodes that are to be read next; none when the tree is done."""
        ...

    def grow(self, logits_MV: Tensor) -> None:
        """By the logits after what was read; they may be written over."""
        ...

    def draft(self) -> Draft: ...


class GreedyTree:
    """Greedy. `whose` logits they are is told where those are no numbers."""

    def __init__(self, row: DraftRow, whose: str, sampling: Sampling = PLAIN) -> None:
        self.row, self._whose = row, whose
        self._nodes = sampling.nodes(tree_limits(row))
        self._paths = _Paths(row)

    @property
    def level(self) -> Level:
        return self._nodes.level

    def grow(self, logits_MV: Tensor) -> None:
        self._paths.shape(self.level, logits_MV)
        if not self._nodes.grow(logits_MV):
            raise NumericsError(self._whose)

    def draft(self) -> Draft:
        return chosen_draft(self._nodes.kept())


class SettledTree:
    """Drawn from the model's laws in a shape that was settled before."""

    def __init__(
        self,
        row: DraftRow,
        shape: Shape,
        *,
        draw: DrawInTree = pick_in_tree,
        sampling: Sampling = PLAIN,
    ) -> None:
        self.row, self.level = row, Level()
        self._params, self._sampling = drawn_params(row), sampling
        self._shape = shape.by_depth()
        self._tree = SampledTree(self._shape, row.noise, draw)
        self._has_children = set(self._shape.parents)
        self._reading: Sequence[int] = (ROOT,)
        self._paths = _Paths(row)

    def grow(self, logits_MV: Tensor) -> None:
        self._paths.shape(self.level, logits_MV)
        laws_MV = processed_probs(logits_MV, self._params, self._sampling)
        laws = dict(zip(self._reading, laws_MV, strict=True))
        tree, parents = self._tree, self._shape.parents
        level: list[int] = []
        while (index := len(tree.nodes)) < len(parents):
            above = parents[index]
            drawn = ROOT if above == ROOT else tree.nodes[above]
            if drawn is not None and drawn not in laws:
                break
            tree.grow(None if drawn is None else laws[drawn])
            node = tree.nodes[index]
            if node is not None and index in self._has_children:
                level.append(node)
        places = {node: place for place, node in enumerate(self._reading)}
        self._reading = level
        self.level = Level(
            [tree.tokens[node] for node in level], [places[tree.parents[node]] for node in level]
        )

    def draft(self) -> Draft:
        return self._tree.draft()


def tree_limits(row: DraftRow) -> TreeLimits:
    """Of a greedy tree for `row`. What is not worth a row of the target's is not worth one of the
    draft's either: children are worth less still."""
    return TreeLimits(row.budget.size, row.budget.depth, MAX_WIDTH, LEAST_WORTH)


def chosen_draft(kept: KeptNodes) -> Draft:
    """Those of a greedy tree that are worth a row."""
    count = num_worthwhile(kept.worths)
    return Draft(tuple(kept.tokens[:count]), tuple(kept.parents[:count]))


def settled_shape(row: DraftRow, chances: Chances = ()) -> Shape:
    """The shape of a drawn tree: by counts, or by guesses where nobody counted."""
    chances = (chances or guessed_chances(row.budget.depth))[: row.budget.depth]
    return worthwhile(best_shape(chances, row.budget.size)).narrowed(MAX_WIDTH)


class _Paths:
    """Shapes logits as the target's will be, after the path of each node of a level."""

    def __init__(self, row: DraftRow) -> None:
        self._row = row
        self._paths: list[list[int]] = [[]]

    def shape(self, level: Level, logits_MV: Tensor) -> None:
        """Shape `logits_MV` in place: those after `level`, or after the root at first."""
        row = self._row
        if row.shaper is None:
            return
        if level.tokens:
            above = (self._paths[place] for place in level.above)
            self._paths = [[*path, t] for path, t in zip(above, level.tokens, strict=True)]
        with blaming(row.seq_id), torch.inference_mode():
            logits_MV.copy_(row.shaper.shape(logits_MV, row.tokens, self._paths))
