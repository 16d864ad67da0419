"""Traces of every node of a draft, with probabilities and verdicts, for requests that want them.

Shapes:  N = draft nodes and the root, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from outrider.core.draft import Draft, NodeTrace, NodeVerdict, Outcome, Verdict
from outrider.core.protocols import VerifyRow
from outrider.core.rng import NotingRng
from outrider.core.sampling import mass, probs_at
from outrider.core.tree import ROOT


def node_traces(
    row: VerifyRow, verdict: Verdict, outcome: Outcome, log_NV: Tensor | None
) -> tuple[NodeTrace, ...]:
    """Return traces of the draft's nodes and of the target's own token. `outcome` is `verdict` up
    to the text's end. `log_NV` are greedy decoding's log-probabilities at temperature 1."""
    draft, num_tokens = row.draft, len(outcome.tokens)
    kept = verdict.path[:num_tokens]
    tokens, parents = [*draft.tokens], [*draft.parents]
    verdicts: list[NodeVerdict] = verdicts_of(draft, kept, ended=num_tokens == len(kept))
    if num_tokens > len(kept):
        tokens.append(verdict.next_token)
        parents.append(kept[-1] if kept else ROOT)
        verdicts.append(_own_verdict(draft, parents[-1]))
    rows = [parent + 1 for parent in parents]
    p: Sequence[float]
    if row.distributions.probs_NV is not None:
        p = probs_at(row.distributions.probs_NV, rows, tokens)
    else:
        p = [
            mass(row.distributions.at(index), token)
            for index, token in zip(rows, tokens, strict=True)
        ]
    q: list[float | None] = [None] * len(tokens)
    if draft.probs_NV is not None and len(draft):
        q[: len(draft)] = probs_at(draft.probs_NV, range(len(draft)), draft.tokens)
    soft: Sequence[float | None] = [None] * len(tokens)
    if log_NV is not None:
        soft = [math.exp(value) for value in probs_at(log_NV, rows, tokens)]
    coins = _coins(row, len(tokens))
    each = zip(tokens, parents, p, q, verdicts, soft, *coins, strict=True)
    return tuple(NodeTrace(*fields) for fields in each)


def _coins(row: VerifyRow, num_nodes: int) -> tuple[list[float | None], list[float | None]]:
    """Return the probability and the random number that judged each node, if any."""
    chances: list[float | None] = [None] * num_nodes
    draws: list[float | None] = [None] * num_nodes
    rng = row.rng
    if not isinstance(rng, NotingRng):
        return chances, draws
    for node, (chance, draw) in rng.coins.items():
        chances[node], draws[node] = chance, draw
    if rng.picks and num_nodes > len(row.draft):
        draws[-1] = rng.picks[-1]
    return chances, draws


def verdicts_of(draft: Draft, kept: Sequence[int], *, ended: bool) -> list[NodeVerdict]:
    """Return the verdict on each drafted token, if the nodes `kept` became text. Children of an
    accepted node were tried in order until one was accepted; none where the text `ended`."""
    follower = dict(zip((ROOT, *kept), kept, strict=False))
    tried = {ROOT, *kept} - ({kept[-1]} if ended and kept else set())
    verdicts: list[NodeVerdict] = []
    for node, parent in enumerate(draft.parents):
        if follower.get(parent) == node:
            verdicts.append("accepted")
        elif parent in tried and node < follower.get(parent, len(draft)):
            verdicts.append("refused")
        else:
            verdicts.append("unused")
    return verdicts


def _own_verdict(draft: Draft, leaf: int) -> NodeVerdict:
    if not len(draft):
        return "plain"
    return "recovered" if draft.children(leaf) else "bonus"
