"""Drafts with Medusa heads, which read the state of the last token that the target has read.

The pending token is not among those, so nothing that a head says depends on it: a head knows what
the target will choose as a rule, and is the worse, the more the pending token was drawn by chance.

Shapes:  B = sequences, H = heads, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import ContractError
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters.places import Places


class Heads(Protocol):
    """What guesses several places at once from one state of the target (net.py)."""

    @property
    def num_heads(self) -> int: ...
    @property
    def hidden_layers(self) -> tuple[int, ...]: ...
    def logits(self, hidden_BD: Tensor, num_heads: int) -> Tensor:
        """logits_HBV of the first `num_heads` heads."""
        ...


class MedusaDrafter:
    """Keeps nothing of a sequence. Drafts nothing while the target has not read all but the pending
    token, that is in a text's first round."""

    def __init__(self, heads: Heads, places: Places, *, name: str = "medusa") -> None:
        self._heads, self._places = heads, places
        self.name = name
        self.needs = DraftNeeds(hidden_layers=heads.hidden_layers)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def close(self, seq_id: int) -> None: ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        drafts = [Draft.empty()] * len(rows)
        asked = [index for index, row in enumerate(rows) if self._depth(row)]
        if not asked:
            return drafts
        states_BD = torch.stack([_last_state(rows[index]) for index in asked])
        deepest = max(self._depth(rows[index]) for index in asked)
        logits_HBV = self._heads.logits(states_BD, deepest)
        for place, index in enumerate(asked):
            logits_HV = logits_HBV[: self._depth(rows[index]), place]
            drafts[index] = self._places.draft(rows[index], logits_HV)
        return drafts

    def _depth(self, row: DraftRow) -> int:
        """How many heads are asked."""
        if row.hidden is None or not 0 < len(row.tokens) - 1 <= row.hidden.length:
            return 0
        return min(row.budget.depth, self._heads.num_heads)


def _last_state(row: DraftRow) -> Tensor:
    if row.hidden is None:
        raise ContractError("the row has no hidden states")
    end = len(row.tokens) - 1
    return row.hidden.read(end - 1, end)[0, 0]
