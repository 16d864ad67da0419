"""Drafts that a native call draws, enumerated: it draws with numbers of keys of its own, which no
test can choose, so it is asked under key after key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider.core.draft import Draft
from outrider.core.protocols import Drafter, DraftNeeds, DraftRow
from outrider.core.rng import KeyedRng, Pick, Role
from outrider.core.tree import ROOT

# Numbers of 32 bits are summed.
_ALL = 1 - 1e-5
_MANY = 20_000


@dataclass(slots=True)
class EveryDraft:
    """`inner`, whose drafts are enumerated by what they report. `pick` is its model's.

    The probability of a draft is the product of what its nodes' own distributions have for them;
    the drafts of a text are all found when their probabilities sum to one. How often each was drawn
    until then has to go with it.
    """

    inner: Drafter
    pick: Pick
    needs: DraftNeeds = field(default_factory=DraftNeeds)
    name: str = "every draft"
    _known: dict[tuple[int, ...], list[Draft]] = field(
        default_factory=dict[tuple[int, ...], list[Draft]]
    )

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.inner.open(seq_id, prompt)

    def close(self, seq_id: int) -> None:
        self.inner.close(seq_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        if all(row.params.greedy for row in rows):
            return self.inner.propose(rows)
        (row,) = rows
        drafts = self._known.get(tuple(row.tokens))
        if drafts is None:
            drafts = self._known[tuple(row.tokens)] = self._every(row)
        weights = torch.tensor([_probability(draft) for draft in drafts], dtype=torch.float64)
        return [drafts[row.rng.pick(weights, ROOT, Role.DRAFT)]]

    def _every(self, row: DraftRow) -> list[Draft]:
        found: dict[tuple[int, ...], Draft] = {}
        counts: dict[tuple[int, ...], int] = {}
        total, seed = 0.0, 0
        while total < _ALL:
            assert seed < _MANY, f"{total} of all drafts were found"
            rng = KeyedRng(seed, 0, len(row.tokens), self.pick)
            (draft,) = self.inner.propose([replace(row, rng=rng)])
            seed += 1
            counts[draft.tokens] = counts.get(draft.tokens, 0) + 1
            if draft.tokens not in found:
                found[draft.tokens] = draft
                total += _probability(draft)
        assert abs(total - 1) < 1e-5
        for tokens, draft in found.items():
            wanted = seed * _probability(draft)
            assert abs(counts[tokens] - wanted) < 6 * math.sqrt(wanted) + 6
        return list(found.values())


def _probability(draft: Draft) -> float:
    if draft.probs_NV is None:
        return 1.0
    probs_NV = draft.probs_NV.double()
    shares = (
        float(probs_V[token] / probs_V.sum())
        for token, probs_V in zip(draft.tokens, probs_NV, strict=True)
    )
    return math.prod(shares)
