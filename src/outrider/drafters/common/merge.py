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
from dataclasses import dataclass, replace
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
    """The offer of the member `name`. `seconds` and `trial` are those of a `DraftPart`."""

    name: str
    offer: ScoredDraft
    seconds: float = 0.0
    trial: bool = False


@dataclass(slots=True)
class _Node:
    """A node of all proposals: its token, its parent, and p / m of each proposal that has it."""

    token: int
    parent: int
    odds: dict[int, float]
    worth: float = 0.0


def goodput(
    num_expected: float, num_rows: int, share: float = 0.0, price: float | None = None
) -> float:
    """Return tokens per pass time: `num_expected` draft tokens and the target's own, for `num_rows`
    of drafts that took `share` of a pass to make. A row costs `price` of a pass, if known."""
    cost = ROW_COST if price is None else price
    return (1 + num_expected) / (1 + cost * num_rows + share)


def merged(proposals: Sequence[Proposal], budget: Budget) -> Draft:
    """Return the draft of all `proposals` together, the likeliest nodes first: as many as the
    budget holds and as seem to pay. A budget without branches gets the path of highest goodput.
    One proposal stays as it is."""
    if len(proposals) == 1:
        name, offer, seconds, trial = proposals[0]
        return made_by(offer.made_by(name), name, seconds, trial=trial)
    agreed = _agreed(proposals, budget)
    if agreed is not None:
        return agreed
    nodes = _united(proposals)
    _value(nodes)
    if budget.size > budget.depth:
        order = sorted(range(len(nodes)), key=lambda node: (-nodes[node].worth, node))
        order = order[: budget.size]
    else:
        order = _best_path(nodes, budget)[: budget.depth]
    worths = [nodes[node].worth for node in order]
    # A controller that gave a price cuts drafts itself, with what it learns of their acceptance.
    least = sum(worth >= LEAST_WORTH for worth in worths)
    count = least if budget.price is not None else num_paying(worths, None)[0]
    return _drafted(nodes, order[:count], proposals)


def _agreed(proposals: Sequence[Proposal], budget: Budget) -> Draft | None:
    """Return the same draft without a tree, if the two proposals are chains of which one begins
    with the other, the usual case of look-ups; else None."""
    if len(proposals) != 2 or budget.price is None or budget.size <= budget.depth:
        return None
    long, short = sorted((one.offer for one in proposals), key=lambda offer: -len(offer.tokens))
    common = len(short.tokens)
    if short.tokens != long.tokens[:common] or not (_is_chain(long) and _is_chain(short)):
        return None
    worths: list[float] = []
    worth = above = other = 1.0
    for depth, kept in enumerate(long.kept[: budget.size]):
        share = kept / max(above, _TINY)
        weight = _odds(share, 1.0 - share)
        if depth < common:
            share = short.kept[depth] / max(other, _TINY)
            weight *= _odds(share, 1.0 - share)
            other = short.kept[depth]
        above = kept
        worth *= weight / (1.0 + weight)
        if worth < LEAST_WORTH:
            break
        worths.append(worth)
    nodes, count = tuple(range(len(worths))), len(worths)
    parts = tuple(
        DraftPart(name, nodes[: len(offer.tokens)], seconds, trial)
        for name, offer, seconds, trial in proposals
    )
    by = "+".join(part.name for part in parts if part.nodes)
    draft = Draft.chain(long.tokens[:count], by=by, accept_probs=tuple(worths))
    return replace(draft, parts=parts)


def _is_chain(offer: ScoredDraft) -> bool:
    return offer.parents is None or offer.parents == tuple(range(ROOT, len(offer.tokens) - 1))


def _odds(share: float, left: float) -> float:
    """Return p / m of a token with this `share`, if the member leaves `left` to other tokens."""
    return share / max(left, _LEAST_LEFT)


def made_by(draft: Draft, name: str, seconds: float = 0.0, *, trial: bool = False) -> Draft:
    """Return the draft as that of the member `name` alone, which took `seconds` for it."""
    if not seconds and not trial:
        return draft if draft.by == name else replace(draft, by=name)
    part = DraftPart(name, tuple(range(len(draft))), seconds, trial)
    return replace(draft, by=name, parts=(part,))


def levels_of(draft: Draft) -> list[float]:
    """Return the probability, for each depth, that some node of the draft there is accepted."""
    levels: list[float] = []
    depths: list[int] = []
    for parent, worth in zip(draft.parents, draft.accept_probs, strict=False):
        depth = 0 if parent == ROOT else depths[parent] + 1
        depths.append(depth)
        if depth == len(levels):
            levels.append(0.0)
        levels[depth] += worth
    return levels


def _united(proposals: Sequence[Proposal]) -> list[_Node]:
    """Return the nodes of all proposals, parents first."""
    nodes: list[_Node] = []
    known: dict[tuple[int, int], int] = {}
    for member, (_, offer, _, _) in enumerate(proposals):
        parents = offer.parents or range(ROOT, len(offer.tokens) - 1)
        shares = [
            worth / max(offer.kept[parent], _TINY) if parent != ROOT else worth
            for parent, worth in zip(parents, offer.kept, strict=True)
        ]
        left: dict[int, float] = {}
        for parent, share in zip(parents, shares, strict=True):
            left[parent] = left.get(parent, 1.0) - share
        united: list[int] = []
        for token, parent, share in zip(offer.tokens, parents, shares, strict=True):
            above = ROOT if parent == ROOT else united[parent]
            node = known.setdefault((above, token), len(nodes))
            if node == len(nodes):
                nodes.append(_Node(token, above, {}))
            nodes[node].odds[member] = _odds(share, left[parent])
            united.append(node)
    return nodes


def _value(nodes: Sequence[_Node]) -> None:
    """Compute the pooled probability of each node and its ancestors to be accepted."""
    weights: list[float] = []
    totals: dict[int, float] = {}
    for node in nodes:
        weight = 1.0
        for odds in node.odds.values():
            weight *= odds
        weights.append(weight)
        totals[node.parent] = totals.get(node.parent, 1.0) + weight
    for node, weight in zip(nodes, weights, strict=True):
        above = 1.0 if node.parent == ROOT else nodes[node.parent].worth
        node.worth = above * weight / totals[node.parent]


def _best_path(nodes: Sequence[_Node], budget: Budget) -> list[int]:
    """Return the path from the root that has the highest goodput; of equals the first."""
    best: list[int] = []
    value = 0.0
    inner = {node.parent for node in nodes}
    for leaf in range(len(nodes)):
        if leaf in inner:
            continue
        path = [leaf]
        while nodes[path[0]].parent != ROOT:
            path.insert(0, nodes[path[0]].parent)
        _, found = num_paying([nodes[node].worth for node in path], budget.price)
        if found > value:
            best, value = path, found
    return best


def num_paying(worths: Sequence[float], price: float | None) -> tuple[int, float]:
    """Return how many of the likeliest nodes raise the goodput, and that goodput."""
    total, best = 0.0, 1.0
    for count, worth in enumerate(worths, start=1):
        total += worth
        found = goodput(total, count, 0.0, price)
        if found <= best:
            return count - 1, best
        best = found
    return len(worths), best


def _drafted(nodes: Sequence[_Node], order: Sequence[int], proposals: Sequence[Proposal]) -> Draft:
    numbers = {node: number for number, node in enumerate(order)}
    parts = tuple(
        DraftPart(
            proposal.name,
            tuple(number for number, node in enumerate(order) if member in nodes[node].odds),
            proposal.seconds,
            proposal.trial,
        )
        for member, proposal in enumerate(proposals)
    )
    return Draft(
        tuple(nodes[node].token for node in order),
        tuple(numbers.get(nodes[node].parent, ROOT) for node in order),
        by="+".join(part.name for part in parts if part.nodes),
        accept_probs=tuple(nodes[node].worth for node in order),
        parts=parts,
    )
