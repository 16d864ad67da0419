"""Parts of drafters without a model, and their offers: drafts with acceptance probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from outrider.core.budget import Budget
from outrider.core.draft import Draft
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.estimate.cost import LEAST_IN_TREE, LEAST_KEPT


class Stateless:
    """A base of drafters without state of a sequence."""

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def close(self, seq_id: int) -> None: ...


class ScoredDraft(NamedTuple):
    """A draft with scores: `kept` has for each token the probability that it and its ancestors are
    accepted. Without `parents` it is a chain. Of several offers one becomes a draft."""

    tokens: tuple[int, ...] = ()
    kept: tuple[float, ...] = ()
    parents: tuple[int, ...] | None = None

    @property
    def num_expected(self) -> float:
        """The expected number of accepted draft tokens."""
        return sum(self.kept)

    @property
    def draft(self) -> Draft:
        return self.made_by("")

    def made_by(self, name: str) -> Draft:
        """Return the draft as that of `name`, one of several drafters."""
        if not self.tokens:
            return Draft.empty()
        if self.parents is None:
            return Draft.chain(self.tokens, by=name, accept_probs=self.kept)
        return Draft(self.tokens, self.parents, by=name, accept_probs=self.kept)


def least_kept(budget: Budget) -> float:
    """Return the probability of acceptance below which no token is drafted."""
    return LEAST_IN_TREE if budget.size > budget.depth else LEAST_KEPT


NO_OFFER = ScoredDraft()


# Tokens, acceptance probabilities and parents, as in a ScoredDraft.
Found: TypeAlias = tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...] | None]


class Texts(Protocol):
    """Texts of requests and their continuations from what each contains: the definition in Python,
    or native code (kernels/native/lookups.py) with the same results."""

    def open(self, seq_id: int, prompt_length: int) -> None: ...
    def offer(self, seq_id: int, tokens: Sequence[int], budget: Budget) -> Found | None:
        """Catch up with the grown text; return None if no draft is worth it."""
        ...

    def close(self, seq_id: int) -> None: ...


class TextDrafter:
    """A ScoredDrafter over `texts`: deterministic, and without a model."""

    needs = DraftNeeds()

    def __init__(self, name: str, texts: Texts) -> None:
        self.name, self._texts = name, texts

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._texts.open(seq_id, len(prompt))

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [offer.draft for offer in self.offers(rows)]

    def offers(self, rows: Sequence[DraftRow]) -> list[ScoredDraft]:
        """Return drafts with the acceptance probability of each token."""
        offer = self._texts.offer
        offers: list[ScoredDraft] = []
        for row in rows:
            found = offer(row.seq_id, row.tokens, row.budget)
            offers.append(NO_OFFER if found is None else ScoredDraft._make(found))
        return offers

    def close(self, seq_id: int) -> None:
        self._texts.close(seq_id)


class ScoredDrafter(Protocol):
    """A drafter that scores its drafts. It learns of the text from the rows that it gets."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> DraftNeeds: ...
    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...
    def offers(self, rows: Sequence[DraftRow]) -> list[ScoredDraft]: ...
    def close(self, seq_id: int) -> None: ...
