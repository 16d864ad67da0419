"""Draw from the target and keep the draft while it agrees: exact under any law.

The draws are keyed by absolute position, so the text depends on the seed and the target alone: it
is the same with any drafter and with none. It accepts less than the token rule at temperature > 0.

Wherever the token rule divides by the drafter's law, this one does not look at it, so a drafter
that misreports its law cannot bias the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from outrider.core.draft import Verdict
from outrider.core.protocols import JudgeRow
from outrider.core.rng import ROOT, Noise
from outrider.core.sampling import draw_at


class MatchRule:
    """Keeps the target's law, and the seed's text."""

    name = "match"
    exact = True

    def __call__(self, rows: Sequence[JudgeRow]) -> list[Verdict]:
        return [follow(row, draw_at) for row in rows]


def follow(row: JudgeRow, own: Callable[[int | Tensor, Noise, int], int]) -> Verdict:
    """Down the tree along the target's `own` tokens: `own(law, noise, depth)` is drawn at each
    place that the walk comes to, once."""
    path: list[int] = []
    node = ROOT
    while True:
        token = own(row.laws.law(node + 1), row.noise, len(path))
        agreeing = (c for c in row.draft.children(node) if row.draft.tokens[c] == token)
        child = next(agreeing, None)
        if child is None:
            return Verdict(tuple(path), token)
        node = child
        path.append(node)
