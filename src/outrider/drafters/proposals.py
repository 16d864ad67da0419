"""Offers of drafters that cost nothing: a draft with how likely each token is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.core.budget import Budget
from outrider.core.draft import Draft
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.estimate.worth import LEAST_IN_TREE, LEAST_KEPT


@dataclass(frozen=True, slots=True)
class ScoredDraft:
    """`kept` has for each node of `draft` the probability that it and its ancestors are kept."""

    draft: Draft
    kept: tuple[float, ...] = ()

    @property
    def num_expected(self) -> float:
        """Draft tokens that are kept, in the mean."""
        return sum(self.kept)


def least_kept(budget: Budget) -> float:
    """The probability to be kept below which no token is drafted."""
    return LEAST_IN_TREE if budget.size > budget.depth else LEAST_KEPT


NO_OFFER = ScoredDraft(Draft.empty())


class ScoredDrafter(Protocol):
    """A drafter of the kind. It hears of the text by the rows that it is asked for."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> DraftNeeds: ...
    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...
    def offers(self, rows: Sequence[DraftRow]) -> list[ScoredDraft]: ...
    def close(self, seq_id: int) -> None: ...
