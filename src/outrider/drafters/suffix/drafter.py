"""Suffix lookup: go on as texts went on after the longest run that this one ends with.

Runs are those of the prompt, of the output so far, of other requests and of a corpus, in suffix
automata that grow by the token. How deep is drafted follows from counts: a node is kept with
probability

    P(child) = P(parent) r                             of the likeliest token, r by trust.py
    P(child) = P(parent) (1 - r) r n / (N - n1 + 1)    of another, seen n of N times

where the likeliest was seen n1 times: if it is not that one, it is one of those seen before no more
often than r, and new otherwise. A draft is the nodes with the highest P, as many as the budget has
and while P >= 0.04. A chain takes likeliest tokens only, while P >= 0.12. Where the text so far was
not foreseen, r falls and drafts end by themselves, both when the first token has P < 0.12: then a
token of text costs a few look-ups and no row. Oliaro et al. 2024, "SuffixDecoding" (arXiv
2411.04975).

What one request drafts depends on what others wrote, so a seed's text is the same in every run only
under the rules that tie it to the seed; its law is, under every exact rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from outrider.core.draft import Draft
from outrider.core.errors import ContractError
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.core.rng import ROOT as DRAFT_ROOT
from outrider.drafters.offers import LEAST_IN_TREE, LEAST_KEPT, NO_OFFER, Offer
from outrider.drafters.suffix.automaton import SuffixAutomaton
from outrider.drafters.suffix.cursor import next_edge
from outrider.drafters.suffix.memory import Context, Memory, Reader
from outrider.drafters.suffix.trust import Trust, bucket

# Tokens after one run that a tree looks at, newest first.
_MOST_CHILDREN = 32


@dataclass(frozen=True, slots=True, order=True)
class _Place:
    """A node that may be drafted next: in order of its probability, then of being found."""

    lost: float
    found: int
    token: int
    parent: int
    depth: int
    state: int
    length: int


class SuffixDrafter:
    """Deterministic chains and trees; holds no model. `num_tokens` bounds what is remembered, and
    `corpus` has texts to begin with."""

    name = "suffix"
    needs = DraftNeeds()

    def __init__(self, *, num_tokens: int = 65536, corpus: Sequence[Sequence[int]] = ()) -> None:
        if num_tokens <= 0:
            raise ContractError("one token or more is remembered")
        self._memory = Memory(num_tokens)
        self._readers: dict[int, Reader] = {}
        if corpus:
            self._memory.learn(corpus)

    @property
    def num_states(self) -> int:
        """Of all automata: what memory goes by."""
        memory = self._memory
        automata = (memory.corpus, memory.kept, memory.growing)
        return sum(a.num_states for a in automata if a is not None)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._readers[seq_id] = Reader(self._memory, len(prompt))

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [offer.draft for offer in self.offers(rows)]

    def offers(self, rows: Sequence[DraftRow]) -> list[Offer]:
        """Drafts, and how likely each of their tokens is to be kept."""
        return [self._offer(row) for row in rows]

    def close(self, seq_id: int) -> None:
        del self._readers[seq_id]

    def forget(self) -> None:
        """What requests wrote; the corpus stays."""
        if self._readers:
            raise ContractError("requests are open")
        self._memory.forget()

    def _offer(self, row: DraftRow) -> Offer:
        reader = self._readers[row.seq_id]
        context = reader.read(row.tokens)
        if context is None or not row.budget.depth:
            return NO_OFFER
        if reader.trust.rate(context.place) < LEAST_KEPT:
            return NO_OFFER
        if row.budget.size > row.budget.depth:
            return _tree(context, reader.trust, row.budget.depth, row.budget.size)
        return _chain(context, reader.trust, row.budget.depth)


def _chain(context: Context, trust: Trust, depth: int) -> Offer:
    tokens: list[int] = []
    kept: list[float] = []
    automaton, state, probability = context.automaton, context.state, 1.0
    for length in range(context.length, context.length + depth):
        found = next_edge(automaton, state)
        if found is None:
            break
        context_state, edge = found
        total = automaton.total(context_state)
        probability *= trust.rate(bucket(length, edge.times, total))
        if probability < LEAST_KEPT:
            break
        tokens.append(edge.token)
        kept.append(probability)
        state = edge.target
    return Offer(Draft.chain(tokens), tuple(kept)) if tokens else NO_OFFER


def _tree(context: Context, trust: Trust, depth: int, size: int) -> Offer:
    """The likeliest `size` nodes; a parent is likelier than its children, so it comes first."""
    automaton = context.automaton
    tokens: list[int] = []
    parents: list[int] = []
    kept: list[float] = []
    ahead: list[_Place] = []
    num_found = 0
    here = _Place(-1.0, 0, 0, DRAFT_ROOT, 0, context.state, context.length)
    while True:
        if here.depth < depth:
            parent = len(tokens) - 1
            for token, target, share in _children(automaton, here, trust):
                probability = -here.lost * share
                if probability >= LEAST_IN_TREE:
                    num_found += 1
                    place = _Place(
                        -probability,
                        num_found,
                        token,
                        parent,
                        here.depth + 1,
                        target,
                        here.length + 1,
                    )
                    heappush(ahead, place)
        if not ahead or len(tokens) == size:
            break
        here = heappop(ahead)
        tokens.append(here.token)
        parents.append(here.parent)
        kept.append(-here.lost)
    if not kept or kept[0] < LEAST_KEPT:
        return NO_OFFER
    return Offer(Draft(tuple(tokens), tuple(parents)), tuple(kept))


def _children(
    automaton: SuffixAutomaton, here: _Place, trust: Trust
) -> list[tuple[int, int, float]]:
    """(token, state, probability after `here`) of what followed, the likeliest first."""
    found = next_edge(automaton, here.state)
    if found is None:
        return []
    state, best = found
    total = automaton.total(state)
    rate = trust.rate(bucket(here.length, best.times, total))
    children = [(best.token, best.target, rate)]
    rest = (1 - rate) * rate / (total - best.times + 1)
    others = islice(automaton.edges(state), _MOST_CHILDREN)
    children += [(e.token, e.target, rest * e.times) for e in others if e.token != best.token]
    return children
