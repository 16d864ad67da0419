"""Trees drafted from the target's hidden states: the loop that EAGLE and MTP share.

Text is read with the target's states and kept. A tree is staged below it with the net's own states,
one pass a level for all texts, and dropped when the draft is done. Node ids of the memory count the
nodes that were read; node ids of a draft count from its root.

Shapes:  N = packed tokens, M = packed logits rows, R = rows of one tree, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.protocols import DraftNeeds, DraftRow, StepRow
from outrider.core.sampling import Sampling
from outrider.drafters.growth import DrawInTree, GreedyTree, GrowingTree, SettledTree, settled_shape
from outrider.drafters.heads import HeadNet
from outrider.drafters.hidden import Blocks, ChainLimits, Part

# A tree for one row, within its budget.
Plant: TypeAlias = Callable[[DraftRow], GrowingTree]


def planted(row: DraftRow, *, whose: str, draw: DrawInTree, sampling: Sampling) -> GrowingTree:
    """Greedy trees keep the net's likeliest paths; drawn ones have a shape settled before."""
    if row.params.greedy:
        return GreedyTree(row, whose, sampling)
    return SettledTree(row, settled_shape(row), draw=draw, sampling=sampling)


class FusedTrees(Protocol):
    """Trees of one block that are made at once."""

    def draft(self, parts: Sequence[Part]) -> Sequence[Draft] | None:
        """Stage `parts`, the end of each text, and draft below it. None, with nothing done that
        counts, if that takes a pass for each level."""
        ...


@dataclass(slots=True)
class _Staged:
    """A tree, and where what it was last told about is: nodes `first` and on of the net's memory,
    with states from `place` on among those of the pass."""

    tree: GrowingTree
    first: int
    place: int

    def feed(self, first: int, place: int) -> tuple[StepRow, list[int]]:
        """The next level, which becomes nodes `first` and on of the memory, with states from
        `place` on; and the places of the states above it, of the pass before."""
        level = self.tree.level
        parents = tuple(self.first + above for above in level.above)
        states = [self.place + above for above in level.above]
        self.first, self.place = first, place
        return StepRow(self.tree.row.seq_id, tuple(level.tokens), parents), states


class HiddenTreeDrafter:
    """Drafts trees with one net, whose logits are over the target's ids, and nothing where
    `HiddenChainDrafter` drafts nothing. With `whole`, trees are drafted at once where that can
    be."""

    def __init__(
        self,
        name: str,
        net: HeadNet,
        plant: Plant,
        limits: ChainLimits,
        whole: FusedTrees | None = None,
    ) -> None:
        self.name, self._whole = name, whole
        self.needs = DraftNeeds(hidden_layers=net.hidden_layers)
        self._net, self._blocks = net, Blocks([net], limits)
        self._plant = plant

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._blocks.open(seq_id, prompt)

    def close(self, seq_id: int) -> None:
        self._blocks.close(seq_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        depths = map(self._blocks.depth, rows)
        asked = {
            index: replace(row, budget=replace(row.budget, depth=depth))
            for index, (row, depth) in enumerate(zip(rows, depths, strict=True))
            if depth
        }
        if not asked:
            return [Draft.empty()] * len(rows)
        with self._blocks.drafting([row.seq_id for row in asked.values()]):
            drafts = self._drafts(self._blocks.catch_up(list(asked.values())))
        made = dict(zip(asked, drafts, strict=True))
        return [made.get(index, Draft.empty()) for index in range(len(rows))]

    def _drafts(self, parts: Sequence[Part]) -> Sequence[Draft]:
        made = None if self._whole is None else self._whole.draft(parts)
        if made is not None:
            self._blocks.note(parts)
            return made
        trees = [self._plant(part.row) for part in parts]
        self._grow(trees, parts)
        return [tree.draft() for tree in trees]

    def _grow(self, trees: Sequence[GrowingTree], parts: Sequence[Part]) -> None:
        below = self._blocks.read(parts)
        state = self._net.state
        live = [
            _Staged(tree, state.num_staged(tree.row.seq_id) - 1, place)
            for place, tree in enumerate(trees)
        ]
        logits_MV, states_ND = below.logits_MV, below.states[0]
        counts = [1] * len(live)
        while True:
            for one, logits_RV in zip(live, torch.split(logits_MV, counts), strict=True):
                one.tree.grow(logits_RV)
            live = [one for one in live if one.tree.level.tokens]
            if not live:
                return
            counts = [len(one.tree.level.tokens) for one in live]
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
