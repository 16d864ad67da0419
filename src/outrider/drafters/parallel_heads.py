"""Drafts of Medusa heads and block nets, which predict all positions at once and independently.

Each position after the pending token has one distribution, the same below every node of its depth.
Greedy trees are shaped by these distributions (`confident`) or by counts of how often text was
found at each rank (`calibrated`). Drawn trees have a shape that was fixed before by these counts;
siblings are drawn without replacement. A tree ends where nodes are worth too little, but fills the
rows of a tile that is paid for anyway.

Shapes:  B = sequences, K = positions, L = captured layers, C = context tokens, D = hidden size,
         V = vocabulary, R = ranks, H = heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from outrider.core.clock import host_floats, host_rows
from outrider.core.draft import Draft
from outrider.core.errors import NumericsError, blaming, given
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.core.sampling import processed_probs
from outrider.core.tree import Chances, best_shape, chain_shape, guessed_chances
from outrider.core.tree_nodes import sharp_shares
from outrider.drafters.block import BlockContext, Guess
from outrider.drafters.growth import DraftSampler, drawn_params
from outrider.drafters.none import Stateless
from outrider.drafters.tree_drafts import SampledNodes, chosen_tree
from outrider.estimate.cost import worthwhile

TreeKind = Literal["confident", "calibrated"]

_NUM_RANKS = 16
# A position's distribution is a mean over the unknown tokens before it, so its uncertainty is real:
# on the embedded target trees of 15 nodes have 1.44 tokens accepted a round at 1, 1.36 at 1.5, 1.33
# at 2.
_SHARPNESS = 1.0


@dataclass(frozen=True, slots=True)
class ParallelHeadSampler:
    """A maker of drafts from the logits of several positions, whose tokens `sampler` chooses.
    `chances` are those of calibrated trees; without any they are guessed."""

    sampler: DraftSampler
    trees: TreeKind = "confident"
    chances: Chances = ()

    def draft(self, row: DraftRow, logits_KV: Tensor) -> Draft:
        """Return a draft within the positions; the first one's logits are shaped in place.

        Raises NumericsError for logits that are no numbers.
        """
        _shape(row, logits_KV)
        branches = row.budget.size > row.budget.depth
        if row.params.greedy:
            if branches:
                return self._chosen(row, logits_KV)
            return Draft.chain(self.sampler.best(logits_KV.contiguous()))
        shape = chain_shape(len(logits_KV))
        if branches:
            best = best_shape(self._counted(len(logits_KV)), row.budget.size)
            shape = worthwhile(best, row.budget.price)
        probs_KV = processed_probs(logits_KV, drawn_params(row), self.sampler.sampling)
        draw, leftover = self.sampler.draw_for(row.params), self.sampler.sampling.leftover
        nodes = SampledNodes(shape, row.rng, draw, leftover)
        for position in shape.depths:
            nodes.grow(probs_KV[position])
        return nodes.draft()

    def _chosen(self, row: DraftRow, logits_KV: Tensor) -> Draft:
        num_ranks = min(_NUM_RANKS, row.budget.size, logits_KV.shape[-1])
        best_KR, ids_KR = logits_KV.topk(num_ranks)
        if bool(best_KR.isnan().any()):
            raise NumericsError(self.sampler.model_name)
        chances = self._counted(len(logits_KV))
        if self.trees == "confident":
            shares_KR = sharp_shares(best_KR, logits_KV, _SHARPNESS)
            chances = [host_floats(shares_R) for shares_R in shares_KR]
        shape = worthwhile(best_shape(chances, row.budget.size), row.budget.price)
        return chosen_tree(shape, host_rows(ids_KR))

    def _counted(self, num_positions: int) -> Chances:
        """Return chances of as many positions; guessed if none were counted."""
        chances = self.chances or guessed_chances(num_positions)
        return chances[:num_positions]


def _shape(row: DraftRow, logits_KV: Tensor) -> None:
    """Shape the first position's logits as the target's will be there. The tokens before later
    positions are not known yet."""
    if row.shaper is not None:
        with blaming(row.seq_id), torch.inference_mode():
            logits_KV[0].copy_(row.shaper.shape(logits_KV[:1], row.tokens, [()])[0])


class _ParallelDrafter(Stateless):
    """A drafter that drafts nothing before the target has read all but the pending token, that is,
    in a text's first round. At most `most` positions are predicted."""

    def __init__(
        self, sampler: ParallelHeadSampler, most: int, hidden_layers: tuple[int, ...]
    ) -> None:
        self._sampler, self._most = sampler, most
        self.needs = DraftNeeds(hidden_layers=hidden_layers)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        depths = {index: depth for index, row in enumerate(rows) if (depth := self._depth(row))}
        drafts = [Draft.empty()] * len(rows)
        if not depths:
            return drafts
        guesses = self._guesses([rows[index] for index in depths], list(depths.values()))
        for index, logits_KV in zip(depths, guesses, strict=True):
            if len(logits_KV):
                drafts[index] = self._sampler.draft(rows[index], logits_KV)
        return drafts

    def _depth(self, row: DraftRow) -> int:
        """Return a draft's depth; 0 before the target has read all but the pending token."""
        if row.hidden is None or not 0 < len(row.tokens) - 1 <= row.hidden.length:
            return 0
        return min(row.budget.depth, self._most)

    def _guesses(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> list[Tensor]:
        """Return logits_KV of each row, at most as deep as its draft."""
        raise NotImplementedError


class Block(Protocol):
    """A net that predicts positions from the states of a few tokens (block.py)."""

    @property
    def num_places(self) -> int: ...
    @property
    def num_context(self) -> int: ...
    @property
    def hidden_layers(self) -> tuple[int, ...]: ...
    def guess(self, contexts: list[BlockContext], num_places: int) -> Guess: ...


class BlockDrafter(_ParallelDrafter):
    """A drafter with a block net. A chain is as long as the product of confidences stays above the
    threshold `least`; 0 never ends a draft early. Distributions and confidences are known before
    the first token is drawn, so the end of a draft is independent of the drawn tokens."""

    name = "block"

    def __init__(self, net: Block, sampler: ParallelHeadSampler, *, least: float = 0.0) -> None:
        super().__init__(sampler, net.num_places, net.hidden_layers)
        self._net, self._least = net, least

    def _guesses(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> list[Tensor]:
        guess = self._net.guess([self._context(row) for row in rows], max(depths))
        sure = [
            num_sure(host_floats(confidence_K[:depth]), self._least)
            for confidence_K, depth in zip(guess.confidence_BK, depths, strict=True)
        ]
        return [logits_KV[:n] for logits_KV, n in zip(guess.logits_BKV, sure, strict=True)]

    def _context(self, row: DraftRow) -> BlockContext:
        end = len(row.tokens) - 1
        start = max(end - self._net.num_context, 0)
        following = tuple(row.tokens[start + 1 : end + 1])
        return BlockContext(given(row.hidden, "hidden state").read(start, end), following)


def num_sure(confidences: Sequence[float], least: float) -> int:
    """Return the number of positions before the product of confidences falls below `least`."""
    product = 1.0
    for count, confidence in enumerate(confidences):
        product *= confidence
        if product < least:
            return count
    return len(confidences)


class Heads(Protocol):
    """Heads that predict several positions at once from one state of the target (medusa.py)."""

    @property
    def num_heads(self) -> int: ...
    @property
    def hidden_layers(self) -> tuple[int, ...]: ...
    def logits(self, hidden_BD: Tensor, num_heads: int) -> Tensor:
        """Return logits_HBV of the first `num_heads` heads."""
        ...


class MedusaDrafter(_ParallelDrafter):
    """A drafter with Medusa heads. They read the state of the last token that the target has read,
    so predictions do not depend on the pending token; the more random it is, the worse."""

    def __init__(self, heads: Heads, sampler: ParallelHeadSampler, *, name: str = "medusa") -> None:
        super().__init__(sampler, heads.num_heads, heads.hidden_layers)
        self._heads, self.name = heads, name

    def _guesses(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> list[Tensor]:
        states_BD = torch.stack([_last_state(row) for row in rows])
        logits_HBV = self._heads.logits(states_BD, max(depths))
        return [logits_HBV[:depth, index] for index, depth in enumerate(depths)]


def _last_state(row: DraftRow) -> Tensor:
    end = len(row.tokens) - 1
    return given(row.hidden, "hidden state").read(end - 1, end)[0, 0]
