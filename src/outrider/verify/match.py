"""Draw from the target and keep the draft while it agrees: exact under any law.

The draws are keyed by absolute position, so the text depends on the seed and the target alone: it
is the same with any drafter and with none. It accepts less than the exact rule at temperature > 0.

Wherever the exact rule divides by the drafter's law, this one does not look at it, so a drafter
that misreports its law cannot bias the output.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.draft import Verdict
from outrider.core.laws import draw_at
from outrider.core.noise import ROOT
from outrider.core.protocols import JudgeRow


class MatchRule:
    """Keeps the target's law, and the seed's text."""

    exact = True

    def __call__(self, rows: Sequence[JudgeRow]) -> list[Verdict]:
        return [_judge(row) for row in rows]


def _judge(row: JudgeRow) -> Verdict:
    path: list[int] = []
    node = ROOT
    while True:
        token = draw_at(row.laws.law(node + 1), row.noise, len(path))
        agreeing = (c for c in row.draft.children(node) if row.draft.tokens[c] == token)
        child = next(agreeing, None)
        if child is None:
            return Verdict(tuple(path), token)
        node = child
        path.append(node)
