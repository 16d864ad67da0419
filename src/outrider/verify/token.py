"""Lossless acceptance for any draft tree.

One walk covers greedy decoding, chains, look-ups and sampled trees: descend from the root, offer
each child min(1, p/q), and after a refusal go on with the part of p that q did not cover.

Leviathan, Kalman, Matias 2023 (arXiv 2211.17192) for chains; siblings by recursive rejection
(SpecInfer, arXiv 2305.09781). Cost: one look at p and q a draft node, one residual a refusal.

Shapes:  V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.core.draft import Verdict
from outrider.core.protocols import JudgeRow
from outrider.core.rng import ROOT, Role
from outrider.core.sampling import PLAIN, Leftover, Sampling, draw, mass


@dataclass(frozen=True, slots=True)
class TokenRule:
    """Keeps the target's law, greedy and sampled, for chains and trees."""

    sampling: Sampling = PLAIN
    name = "token"
    exact = True

    def __call__(self, rows: Sequence[JudgeRow]) -> list[Verdict]:
        return [walk(row, self.sampling.leftover) for row in rows]


def walk(row: JudgeRow, leftover: Leftover = PLAIN.leftover) -> Verdict:
    """The verdict on one row of any shape."""
    draft, noise = row.draft, row.noise
    path: list[int] = []
    node = ROOT
    while True:
        law = row.laws.law(node + 1)
        for child in draft.children(node):
            token = draft.tokens[child]
            proposal = token if draft.probs_NV is None else draft.probs_NV[child]
            # A token that its own law gives no mass cannot have been drawn; refuse it.
            drawn = mass(proposal, token)
            ratio = mass(law, token) / drawn if drawn > 0 else 0.0
            if noise.coin(ratio, child, Role.ACCEPT):
                path.append(child)
                node = child
                break
            law = residual(law, proposal, leftover)
        else:
            return Verdict(tuple(path), draw(law, noise, node))


def residual(
    law: int | Tensor, proposal: int | Tensor, leftover: Leftover = PLAIN.leftover
) -> int | Tensor:
    """The mass of `law` that `proposal` did not cover, renormalised; `law` if nothing is left."""
    if isinstance(law, int):
        return law
    left_V, total = leftover(law, proposal)
    return left_V.div_(total) if total > 0 else law
