"""Merging: the drafts that several drafters chose for one text become one tree, or one chain.

Drafts share the nodes of their common beginnings. A node's probability is pooled from all members
that drafted there. A member gives its node x the probability p_x, given the parent, and leaves m to
tokens that it did not draft; pooled,

    P(x | parent) = w_x / (1 + sum of w)

with w_x the product of p_x / m over the members that drafted x. So one member's own estimates stay
as they are, agreement raises them, and those of siblings add up to less than 1. Only tokens that
were chosen, and not drawn, are merged: every exact rule accepts such a node x with the target's own
probability p(x), and siblings are different tokens. Judged like that, a token drawn from q would be
accepted less often: with the sum of p q, not of min(p, q).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from outrider.core.draft import Budget, Draft, DraftPart
from outrider.core.tree import ROOT
from outrider.drafters.common.context import ScoredDraft
from outrider.estimate.cost import LEAST_WORTH, ROW_COST

# The least probability that a member leaves to the tokens that it did not draft.
_LEAST_LEFT = 0.005
# A probability of 0 is none to divide by.
_TINY = 1e-12


class Proposal(NamedTuple):
    """The offer of the member `name`."""

    name: str
    offer: ScoredDraft


class _Nodes(NamedTuple):
    """The nodes of all proposals, parents first: their tokens, parents, and the probabilities that
    they and their ancestors are accepted. `own` has the nodes of each proposal."""

    tokens: Sequence[int]
    parents: Sequence[int]
    worths: Sequence[float]
    own: Sequence[Sequence[int]]


def merged(proposals: Sequence[Proposal], budget: Budget) -> Draft:
    """Return the draft of all `proposals` together, the likeliest nodes first: as many as the
    budget holds and as seem to pay. A budget without branches gets the path of highest goodput.
    One proposal stays as it is."""
    if len(proposals) == 1:
        name, offer = proposals[0]
        return offer.made_by(name)
    nodes = _agreed(proposals) or _united(proposals)
    worths = nodes.worths
    if budget.size > budget.depth:
        order = sorted(range(len(worths)), key=worths.__getitem__, reverse=True)[: budget.size]
    else:
        order = _best_path(nodes, budget)[: budget.depth]
    likeliest = [worths[node] for node in order]
    # A controller that gave a price cuts drafts itself, with what it learns of their acceptance.
    least = sum(worth >= LEAST_WORTH for worth in likeliest)
    count = least if budget.price is not None else num_paying(likeliest, None)[0]
    numbers = {node: number for number, node in enumerate(order[:count])}
    numbers[ROOT] = ROOT
    parts = tuple(
        DraftPart(name, tuple(sorted(numbers[node] for node in own if node in numbers)))
        for (name, _), own in zip(proposals, nodes.own, strict=True)
    )
    return Draft(
        tuple(nodes.tokens[node] for node in order[:count]),
        tuple(numbers[nodes.parents[node]] for node in order[:count]),
        by="+".join(part.name for part in parts if part.nodes),
        accept_probs=tuple(likeliest[:count]),
        parts=parts,
    )


def made_by(draft: Draft, name: str, seconds: float = 0.0, *, trial: bool = False) -> Draft:
    """Return the draft as that of the member `name` alone, which took `seconds` for it."""
    part = DraftPart(name, tuple(range(len(draft))), seconds, trial)
    return replace(draft, by=name, parts=(part,))


def _united(proposals: Sequence[Proposal]) -> _Nodes:
    """Return the nodes of all proposals with their pooled probabilities."""
    united, above_all, worths, every = list[int](), list[int](), list[float](), list[list[int]]()
    # The product of p / m of the members that have a node.
    weights: list[float] = []
    known: dict[tuple[int, int], int] = {}
    for _, (tokens, kept, given) in proposals:
        parents = given or range(ROOT, len(tokens) - 1)
        shares = [
            worth / max(kept[parent], _TINY) if parent != ROOT else worth
            for parent, worth in zip(parents, kept, strict=True)
        ]
        left: dict[int, float] = {}
        for parent, share in zip(parents, shares, strict=True):
            left[parent] = left.get(parent, 1.0) - share
        own: list[int] = []
        for token, parent, share in zip(tokens, parents, shares, strict=True):
            above = ROOT if parent == ROOT else own[parent]
            node = known.setdefault((above, token), len(weights))
            if node == len(weights):
                united.append(token)
                above_all.append(above)
                weights.append(1.0)
            weights[node] *= _odds(share, left[parent])
            own.append(node)
        every.append(own)
    totals: dict[int, float] = {}
    for parent, weight in zip(above_all, weights, strict=True):
        totals[parent] = totals.get(parent, 1.0) + weight
    for parent, weight in zip(above_all, weights, strict=True):
        worths.append((1.0 if parent == ROOT else worths[parent]) * weight / totals[parent])
    return _Nodes(united, above_all, worths, every)


def _agreed(proposals: Sequence[Proposal]) -> _Nodes | None:
    """Return the same nodes sooner, if the two proposals are chains of which one begins with the
    other, the usual case of look-ups; else None."""
    if len(proposals) != 2:
        return None
    long, short = sorted((one.offer for one in proposals), key=lambda offer: -len(offer.tokens))
    common = len(short.tokens)
    if short.tokens != long.tokens[:common] or not (_is_chain(long) and _is_chain(short)):
        return None
    worths: list[float] = []
    worth = above = other = 1.0
    for depth, kept in enumerate(long.kept):
        share = kept / max(above, _TINY)
        weight = _odds(share, 1.0 - share)
        if depth < common:
            share = short.kept[depth] / max(other, _TINY)
            weight *= _odds(share, 1.0 - share)
            other = short.kept[depth]
        above = kept
        worth *= weight / (1.0 + weight)
        worths.append(worth)
    own = [range(len(one.offer.tokens)) for one in proposals]
    return _Nodes(long.tokens, range(ROOT, len(worths) - 1), worths, own)


def _is_chain(offer: ScoredDraft) -> bool:
    return offer.parents is None or offer.parents == tuple(range(ROOT, len(offer.tokens) - 1))


def _odds(share: float, left: float) -> float:
    """Return p / m of a token with this `share`, if the member leaves `left` to other tokens."""
    return share / max(left, _LEAST_LEFT)


def _best_path(nodes: _Nodes, budget: Budget) -> list[int]:
    """Return the path from the root that has the highest goodput; of equals the first."""
    best: list[int] = []
    value = 0.0
    inner = {*nodes.parents}
    for leaf in range(len(nodes.parents)):
        if leaf in inner:
            continue
        path = [leaf]
        while nodes.parents[path[0]] != ROOT:
            path.insert(0, nodes.parents[path[0]])
        _, found = num_paying([nodes.worths[node] for node in path], budget.price)
        if found > value:
            best, value = path, found
    return best


def num_paying(worths: Sequence[float], price: float | None) -> tuple[int, float]:
    """Return how many of the likeliest nodes raise the goodput, the tokens in the time of a pass
    without drafts, and that goodput. A row costs `price` of a pass, if known."""
    cost = price_of(price)
    total, best = 1.0, 1.0
    for count, worth in enumerate(worths, start=1):
        total += worth
        found = total / (1 + cost * count)
        if found <= best:
            return count - 1, best
        best = found
    return len(worths), best


def price_of(known: float | None) -> float:
    """Return the price of a row: a usual one before it is known."""
    return ROW_COST if known is None else known
