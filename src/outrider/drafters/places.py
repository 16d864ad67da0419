"""Drafts from laws of several places that are known at once, each whatever the others will be.

That is what Medusa heads and block nets give: a law for each place behind the pending token, the
same below every node of that depth. Greedy trees are shaped by these laws themselves (`confident`)
or by counts of how often text was found at each rank (`calibrated`). Drawn trees always have a
shape that was settled before, by those counts; siblings are drawn without replacement.

A tree ends where nodes are worth too little, but fills the rows of a tile that is paid for anyway.

Shapes:  K = places, V = vocabulary, R = ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outrider.core.clock import host_floats, host_rows
from outrider.core.draft import Draft
from outrider.core.errors import NumericsError, blaming
from outrider.core.protocols import DraftRow
from outrider.core.sampling import PLAIN, Sampling, processed_probs
from outrider.core.tree import Chances, best_shape, chain_shape, guessed_chances, worthwhile
from outrider.core.tree_nodes import sharp_shares
from outrider.drafters.growing import drawn_params
from outrider.drafters.trees import (
    DrawInTree,
    DrawnTree,
    chosen_tree,
    pick_in_tree,
)

TreeKind = Literal["confident", "calibrated"]

_NUM_RANKS = 16
# A place's law is a mean over the tokens before it that are not known, so its doubts are real: on
# the embedded target trees of 15 nodes keep 1.44 tokens a round at 1, 1.36 at 1.5, 1.33 at 2.
_SHARPNESS = 1.0


@dataclass(frozen=True, slots=True)
class Places:
    """How drafts are made of the logits of `whose` places: `argmax` has the first maximum, `draw`
    takes a token from a law at temperature > 0, which `sampling` makes. `chances` are those of
    calibrated trees; without any they are guessed."""

    argmax: Callable[[Tensor], list[int]]
    whose: str
    draw: DrawInTree = pick_in_tree
    sampling: Sampling = PLAIN
    trees: TreeKind = "confident"
    chances: Chances = ()

    def draft(self, row: DraftRow, logits_KV: Tensor) -> Draft:
        """At most as deep as there are places; the first place's logits are shaped in place.

        Raises NumericsError for logits that are no numbers.
        """
        _shape(row, logits_KV)
        branches = row.budget.size > row.budget.depth
        if row.params.greedy:
            return self._chosen(row, logits_KV) if branches else self._chain(logits_KV)
        shape = chain_shape(len(logits_KV))
        if branches:
            shape = worthwhile(best_shape(self._counted(len(logits_KV)), row.budget.size))
        laws_KV = processed_probs(logits_KV, drawn_params(row), self.sampling)
        tree = DrawnTree(shape, row.noise, self.draw)
        for place in shape.depths:
            tree.grow(laws_KV[place])
        return tree.draft()

    def _chain(self, logits_KV: Tensor) -> Draft:
        tokens = self.argmax(logits_KV.contiguous())
        if -1 in tokens:
            raise NumericsError(self.whose)
        return Draft.chain(tokens)

    def _chosen(self, row: DraftRow, logits_KV: Tensor) -> Draft:
        num_ranks = min(_NUM_RANKS, row.budget.size, logits_KV.shape[-1])
        best_KR, ids_KR = logits_KV.topk(num_ranks)
        if bool(best_KR.isnan().any()):
            raise NumericsError(self.whose)
        chances = self._counted(len(logits_KV))
        if self.trees == "confident":
            shares_KR = sharp_shares(best_KR, logits_KV, _SHARPNESS)
            chances = [host_floats(shares_R) for shares_R in shares_KR]
        shape = worthwhile(best_shape(chances, row.budget.size))
        return chosen_tree(shape, host_rows(ids_KR))

    def _counted(self, num_places: int) -> Chances:
        """For as many places; guessed where fewer were counted."""
        chances = self.chances or guessed_chances(num_places)
        return chances[:num_places]


def _shape(row: DraftRow, logits_KV: Tensor) -> None:
    """Shape the first place's logits as the target's will be there. What later places follow is
    not known yet."""
    if row.shaper is not None:
        with blaming(row.seq_id), torch.inference_mode():
            logits_KV[0].copy_(row.shaper.shape(logits_KV[:1], row.tokens, [()])[0])
