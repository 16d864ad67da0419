"""Drafts of a block net: one pass, and the draft ends where the net stops being sure.

A chain is as long as the product of confidences stays above a threshold. Laws and confidences are
known before the first token is drawn, so where a draft ends tells nothing about what was drawn.

Shapes:  B = sequences, K = places, L = captured layers, C = context tokens, D = hidden size,
         V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.core.clock import host_floats
from outrider.core.draft import Draft
from outrider.core.errors import ContractError
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters.block.net import Context, Guess
from outrider.drafters.places import Places


class Block(Protocol):
    """What guesses places by the states of a few tokens (net.py)."""

    @property
    def num_places(self) -> int: ...
    @property
    def num_context(self) -> int: ...
    @property
    def hidden_layers(self) -> tuple[int, ...]: ...
    def guess(self, contexts: list[Context], num_places: int) -> Guess: ...


class BlockDrafter:
    """Keeps nothing of a sequence. Drafts nothing while the target has not read all but the pending
    token, that is in a text's first round. `least` is the threshold; 0 never ends a draft early."""

    name = "block"

    def __init__(self, net: Block, places: Places, *, least: float = 0.0) -> None:
        self._net, self._places, self._least = net, places, least
        self.needs = DraftNeeds(hidden_layers=net.hidden_layers)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def close(self, seq_id: int) -> None: ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        drafts = [Draft.empty()] * len(rows)
        asked = [index for index, row in enumerate(rows) if self._depth(row)]
        if not asked:
            return drafts
        contexts = [self._context(rows[index]) for index in asked]
        deepest = max(self._depth(rows[index]) for index in asked)
        guess = self._net.guess(contexts, deepest)
        for place, index in enumerate(asked):
            confidence_K = guess.confidence_BK[place, : self._depth(rows[index])]
            depth = num_sure(host_floats(confidence_K), self._least)
            if depth:
                logits_KV = guess.logits_BKV[place, :depth]
                drafts[index] = self._places.draft(rows[index], logits_KV)
        return drafts

    def _depth(self, row: DraftRow) -> int:
        if row.hidden is None or not 0 < len(row.tokens) - 1 <= row.hidden.length:
            return 0
        return min(row.budget.depth, self._net.num_places)

    def _context(self, row: DraftRow) -> Context:
        if row.hidden is None:
            raise ContractError("the row has no hidden states")
        end = len(row.tokens) - 1
        start = max(end - self._net.num_context, 0)
        following = tuple(row.tokens[start + 1 : end + 1])
        return Context(row.hidden.read(start, end), following)


def num_sure(confidences: Sequence[float], least: float) -> int:
    """How many places come before the product of confidences falls below `least`."""
    product = 1.0
    for count, confidence in enumerate(confidences):
        product *= confidence
        if product < least:
            return count
    return len(confidences)
