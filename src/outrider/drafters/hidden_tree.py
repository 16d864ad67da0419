"""Trees by blocks that read the target's hidden states: the loop that EAGLE and MTP share.

Text is read with the target's states and kept. A tree is staged below it with the net's own states,
a level of all texts a pass, and dropped when it is done. Node ids of the memory count what was
read; those of a draft count from its root.

Shapes:  N = packed tokens, M = packed logits rows, R = rows of one tree, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.protocols import DraftNeeds, DraftRow, StepRow
from outrider.core.sampling import Sampling
from outrider.core.tree_shape import ROOT
from outrider.drafters.growing_tree import ChosenTree, GrowingTree, SettledTree, settled_shape
from outrider.drafters.heads import HeadNet
from outrider.drafters.hidden_chain import Blocks, ChainLimits
from outrider.drafters.trees import DrawInTree

# A tree for one row, within its budget.
Plant: TypeAlias = Callable[[DraftRow], GrowingTree]


def planted(row: DraftRow, *, whose: str, draw: DrawInTree, sampling: Sampling) -> GrowingTree:
    """Greedy trees keep the net's likeliest paths; drawn ones have a shape settled before."""
    if row.params.greedy:
        return ChosenTree(row, whose)
    return SettledTree(row, settled_shape(row), draw=draw, sampling=sampling)


@dataclass(slots=True)
class _Staged:
    """A tree and where its nodes are: their `ids` in the net's memory, and, of those read last, the
    `places` of their states among those of the pass."""

    tree: GrowingTree
    ids: dict[int, int] = field(default_factory=dict[int, int])
    places: dict[int, int] = field(default_factory=dict[int, int])

    def feed(self, first: int, place: int) -> tuple[StepRow, list[int]]:
        """The nodes to be read next, which become nodes `first` and on of the memory, with states
        from `place` on; and the places of the states above them, of the pass before."""
        tree, nodes = self.tree, self.tree.feed()
        parents = [tree.parent(node) for node in nodes]
        step = StepRow(
            tree.row.seq_id,
            tuple(tree.token(node) for node in nodes),
            tuple(self.ids[parent] for parent in parents),
        )
        above = [self.places[parent] for parent in parents]
        self.ids |= {node: first + index for index, node in enumerate(nodes)}
        self.places = {node: place + index for index, node in enumerate(nodes)}
        return step, above


class HiddenTreeDrafter:
    """Drafts trees with one net, whose logits are over the target's ids, and nothing where
    `HiddenChainDrafter` drafts nothing."""

    def __init__(self, name: str, net: HeadNet, plant: Plant, limits: ChainLimits) -> None:
        self.name = name
        self.needs = DraftNeeds(hidden_layers=net.hidden_layers)
        self._net, self._blocks = net, Blocks([net], limits)
        self._plant = plant

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._blocks.open(seq_id, prompt)

    def close(self, seq_id: int) -> None:
        self._blocks.close(seq_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        depths = map(self._blocks.depth, rows)
        trees = {
            index: self._plant(replace(row, budget=replace(row.budget, depth=depth)))
            for index, (row, depth) in enumerate(zip(rows, depths, strict=True))
            if depth
        }
        if trees:
            with self._blocks.drafting([tree.row.seq_id for tree in trees.values()]):
                self._grow(list(trees.values()))
        return [trees[i].draft() if i in trees else Draft.empty() for i in range(len(rows))]

    def _grow(self, trees: Sequence[GrowingTree]) -> None:
        below = self._blocks.read(self._blocks.catch_up([tree.row for tree in trees]))
        state = self._net.state
        live = [
            _Staged(tree, {ROOT: state.num_staged(tree.row.seq_id) - 1}, {ROOT: place})
            for place, tree in enumerate(trees)
        ]
        logits_MV, states_ND = below.logits_MV, below.states[0]
        while True:
            counts = [len(one.tree.feed()) for one in live]
            for one, logits_RV in zip(live, torch.split(logits_MV, counts), strict=True):
                one.tree.grow(logits_RV)
            live = [one for one in live if one.tree.feed()]
            if not live:
                return
            logits_MV, states_ND = self._read(live, states_ND)

    def _read(self, live: Sequence[_Staged], states_ND: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over the next level of all trees; what follows its nodes, and their states."""
        steps: list[StepRow] = []
        above: list[int] = []
        for one in live:
            first = self._net.state.num_staged(one.tree.row.seq_id)
            step, own = one.feed(first, len(above))
            steps.append(step)
            above += own
        out = self._net.step(steps, states_ND[above])
        return out.logits_MV, out.hidden_ND
