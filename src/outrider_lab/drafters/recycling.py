"""Token recycling: drafts a tree from the target's own top-ranked candidates of earlier passes.

Every verified token's `WIDTH` likeliest successors are stored in a table, and overwritten when the
token is verified again. A draft is a tree through the table: child r of a node is entry r of its
token. Luo et al. 2024 (arXiv 2408.08696). The tree has one shape for all requests, the nodes with
the highest product of rates, entry r being right at the rate

    rate_r = f (W first_r + hits_r) / (W + trials)
    f      = (V + hits of the request) / (V + expected hits)

Nodes below 0.04 are left out, so where entries are never right nothing is proposed. A budget
without branches gets the first entries as a chain, down to 0.12. All requests share the table, so a
seed's text is the same in every run only under the rules that tie it to the seed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from outrider.core.draft import Draft
from outrider.core.errors import ContractError
from outrider.core.plugins import DrafterKind
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.core.tree import ROOT, Shape, best_shape
from outrider.drafters.common.context import NO_OFFER, BuildContext, ScoredDraft, least_kept
from outrider.estimate.acceptance import FadingRate

WIDTH = 8
_UNKNOWN = -1
# Prior rates of the entries, and their weight in trials.
_FIRST_RATES = (0.4, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01)
_FIRST_WEIGHT = 16.0
# The factor by which a new trial reduces old ones, of all requests and of one.
_FADE = 1 - 1 / 512
_OWN_FADE = 1 - 1 / 64
# V: the weight of the prior that requests are alike, in hits of the first entry.
_EVENNESS = 3.0
# Rates are rounded to so many parts of one before a shape is made for them, so that few shapes are
# made.
_PARTS = 50


@dataclass(slots=True)
class _RequestRate:
    """Hits of one request's first entries against the expected ones; counts fade."""

    num_read: int
    firsts: FadingRate = field(default_factory=lambda: FadingRate(_OWN_FADE))

    @property
    def factor(self) -> float:
        """The factor by which this request does better or worse than others."""
        return self.firsts.posterior(1.0, _EVENNESS)


class RecyclingDrafter:
    """A drafter of deterministic trees and chains from `WIDTH` ids per token; no model."""

    name = "recycling"

    def __init__(self, *, vocab_size: int) -> None:
        self.needs = DraftNeeds(num_likely=min(WIDTH, vocab_size))
        self._vocab_size = vocab_size
        self._requests: dict[int, _RequestRate] = {}
        self.forget()

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._requests[seq_id] = _RequestRate(len(prompt))

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [offer.draft for offer in self.offers(rows)]

    def offers(self, rows: Sequence[DraftRow]) -> list[ScoredDraft]:
        """Return drafts with the acceptance probability of each token."""
        for row in rows:
            self._learn(row)
        return [self._offer(row) for row in rows]

    def close(self, seq_id: int) -> None:
        del self._requests[seq_id]

    def forget(self) -> None:
        """Forget all requests. None may be open."""
        if self._requests:
            raise ContractError("requests are open")
        self._table = array("i", [_UNKNOWN]) * (self._vocab_size * WIDTH)
        # Every trial counts for all ranks.
        self._hits = [_FIRST_WEIGHT * rate for rate in _FIRST_RATES]
        self._trials = _FIRST_WEIGHT

    def entries(self, token: int) -> tuple[int, ...]:
        """Return the target's likeliest tokens after `token`, best first, if known."""
        found = self._table[token * WIDTH : (token + 1) * WIDTH].tolist()
        if found[-1] == _UNKNOWN:
            found = [token for token in found if token != _UNKNOWN]
        return tuple(found)

    def rates(self) -> tuple[float, ...]:
        """Return how often each entry was right, as a share of all tokens."""
        return tuple([hits / self._trials for hits in self._hits])

    def _learn(self, row: DraftRow) -> None:
        """Learn how often the table was right, then the candidates of the last pass."""
        tokens = row.tokens
        request = self._requests[row.seq_id]
        for at in range(max(request.num_read, 1), len(tokens)):
            self._judge(request, tokens[at - 1], tokens[at])
        request.num_read = len(tokens)
        last = row.last
        if last is None or not last.likely:
            return
        verified = (tokens[-1 - len(last.tokens)], *last.draft.tokens)
        for token, likely in zip(verified, last.likely, strict=True):
            self._store(token, likely)

    def _judge(self, request: _RequestRate, before: int, token: int) -> None:
        entries = self.entries(before)
        if not entries:
            return
        request.firsts.add(entries[0] == token, self._hits[0] / self._trials)
        self._hits = [_FADE * hits for hits in self._hits]
        self._trials = _FADE * self._trials + 1
        if token in entries:
            self._hits[entries.index(token)] += 1

    def _store(self, token: int, likely: Sequence[int]) -> None:
        kept = array("i", likely[:WIDTH])
        if len(kept) < WIDTH:
            kept.extend([_UNKNOWN] * (WIDTH - len(kept)))
        self._table[token * WIDTH : (token + 1) * WIDTH] = kept

    def _offer(self, row: DraftRow) -> ScoredDraft:
        budget = row.budget
        branches = budget.size > budget.depth
        parts = self._parts(self._requests[row.seq_id].factor, WIDTH if branches else 1)
        shape = _shape(parts, budget.depth, budget.size, least_kept(budget))
        tokens: list[int] = []
        parents: list[int] = []
        kept: list[float] = []
        # The draft node of each node of the shape, None if its entry is not known, and the entries
        # after it; those of the root come last, at ROOT.
        drafted: list[int | None] = [None] * len(shape)
        drafted.append(ROOT)
        entries: list[tuple[int, ...] | None] = [None] * len(shape)
        entries.append(self.entries(row.tokens[-1]))
        for node, parent in enumerate(shape.parents):
            above = drafted[parent]
            if above is None:
                continue
            found = entries[parent]
            if found is None:
                found = entries[parent] = self.entries(tokens[above])
            rank = shape.ranks[node]
            if rank < len(found):
                drafted[node] = len(tokens)
                tokens.append(found[rank])
                parents.append(above)
                kept.append(shape.worths[node])
        return ScoredDraft(tuple(tokens), tuple(kept), tuple(parents)) if tokens else NO_OFFER

    def _parts(self, factor: float, num_ranks: int) -> tuple[int, ...]:
        """Return how often the first entries are right, in parts of one."""
        parts: list[int] = []
        lowest = math.inf
        for hits in self._hits[:num_ranks]:
            # A tree is best where rates do not rise with the rank; if they do, it is noise.
            rate = factor * (hits / self._trials)
            if rate < lowest:
                lowest = rate
            part = round(_PARTS * lowest)
            parts.append(part if part < _PARTS else _PARTS)
        return tuple(parts)


@lru_cache(maxsize=256)
def _shape(parts: tuple[int, ...], depth: int, size: int, least: float) -> Shape:
    """Return the best tree of nodes worth `least` when entry r is right at rate `parts[r]`."""
    rates = [part / _PARTS for part in parts]
    shape = best_shape([rates] * depth, size)
    return shape.first(sum(worth >= least for worth in shape.worths))


def build(context: BuildContext) -> RecyclingDrafter:
    return RecyclingDrafter(vocab_size=context.models.target.spec.vocab_size)


KIND = DrafterKind(
    name="recycling",
    build=build,
    branches=True,
    accepted=0.3,
    drafted=0.8,
    advice="goes by which tokens followed which in this run: needs no model",
)
