"""Greedy trees of a batch in one native call, for draft models and for heads.

Not for drawn trees, nor for requests that shape their logits: these grow level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import CapacityError
from outrider.core.protocols import CausalLM, DraftRow
from outrider.drafters.growing_tree import chosen_draft, tree_limits
from outrider.drafters.head_pass import HeadPass
from outrider.drafters.hidden_chain import Part, target_states
from outrider.kernels.native.forward import NativeForward
from outrider.kernels.native.rounds import Feed, RoundModel
from outrider.kernels.native.trees import Grown, NativeTreeDrafts, most_fed
from outrider.models.heads import HeadMemory
from outrider.models.llama import LlamaModel


class TreePass:
    """Trees below texts of one memory. `prepare` is called when it is sure that a pass is made."""

    def __init__(self, model: RoundModel, state: HeadMemory, *, batch_size: int) -> None:
        self._state = state
        self._call = NativeTreeDrafts(model, batch_size=batch_size)

    def __call__(
        self,
        rows: Sequence[DraftRow],
        unread: Sequence[Sequence[int]],
        prepare: Callable[[], None] = lambda: None,
    ) -> list[Grown] | None:
        """By row, of which memory holds all but the tokens `unread`. None, with nothing done that
        counts, if trees have to grow level by level."""
        if not all(row.params.greedy and row.shaper is None for row in rows):
            return None
        limits = [tree_limits(row) for row in rows]
        if not self._call.fits(unread, limits):
            return None
        needed = {
            row.seq_id: len(tokens) + most_fed(limit)
            for row, tokens, limit in zip(rows, unread, limits, strict=True)
        }
        try:
            self._state.reserve(needed)
        except CapacityError:
            # Levels are seldom as wide as they may be.
            return None
        prepare()
        return self._call([self._feed(*one) for one in zip(rows, unread, strict=True)], limits)

    def _feed(self, row: DraftRow, unread: Sequence[int]) -> Feed:
        return Feed(self._state.length(row.seq_id), unread, self._state.pages(row.seq_id))


class ModelTrees:
    """Of a draft model; what was read for them stays staged."""

    def __init__(self, model: LlamaModel, forward: NativeForward, *, batch_size: int) -> None:
        self._model, self._forward = model, forward
        room = RoundModel(forward, model.logits, model.state.page_size)
        self._pass = TreePass(room, model.state, batch_size=batch_size)

    def grow(self, rows: Sequence[DraftRow], unread: Sequence[Sequence[int]]) -> list[Grown] | None:
        """As TreePass says."""
        # Kernels may have been exchanged since.
        if self._model.forward() is not self._forward:
            return None
        grown = self._pass(rows, unread)
        for row, one in zip(rows, grown or (), strict=bool(grown)):
            self._model.state.note_tree(row.seq_id, one.tokens, one.parents)
        return grown


class HeadTrees:
    """Of one block, whose states `fuse` makes of the target's."""

    def __init__(
        self, passes: HeadPass, fuse: Callable[[Tensor], Tensor], *, batch_size: int
    ) -> None:
        self._passes, self._fuse = passes, fuse
        self._pass = TreePass(passes.model, passes.state, batch_size=batch_size)

    def draft(self, parts: Sequence[Part]) -> list[Draft] | None:
        """Stage `parts`, the end of each text, and draft below it. None as TreePass says."""

        def prepare() -> None:
            states_ND = self._fuse(target_states(parts))
            with torch.inference_mode():
                self._passes.entrance.states_ND[: len(states_ND)].copy_(states_ND)

        grown = self._pass([part.row for part in parts], [part.tokens for part in parts], prepare)
        if grown is None:
            return None
        for part in parts:
            self._passes.state.note_chain(part.row.seq_id, part.tokens)
        return [chosen_draft(one.kept) for one in grown]


def model_trees(model: CausalLM, *, batch_size: int) -> ModelTrees | None:
    """None where a pass of `model` is no native call."""
    if not isinstance(model, LlamaModel):
        return None
    forward = model.forward()
    if not isinstance(forward, NativeForward):
        return None
    return ModelTrees(model, forward, batch_size=batch_size)


def head_trees(
    passes: HeadPass | None, fuse: Callable[[Tensor], Tensor], *, batch_size: int
) -> HeadTrees | None:
    """None where a pass of the block is no native call."""
    return None if passes is None else HeadTrees(passes, fuse, batch_size=batch_size)
