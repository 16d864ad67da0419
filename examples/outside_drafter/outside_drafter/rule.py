"""An acceptance rule: draw the target's own token, and keep the draft where it is the same."""

from collections.abc import Sequence

from outrider.core.draft import Verdict
from outrider.core.plugins import RuleKind
from outrider.core.protocols import VerifyRow
from outrider.core.sampling import Sampling, draw
from outrider.core.tree import ROOT


class Lookalike:
    exact = True

    def __init__(self, sampling: Sampling) -> None:
        del sampling

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return [self._judge(row) for row in rows]

    def _judge(self, row: VerifyRow) -> Verdict:
        path, node = list[int](), ROOT
        while True:
            token = draw(row.distributions.at(node + 1), row.rng, node)
            drafted = row.draft.children(node)
            kept = [child for child in drafted if row.draft.tokens[child] == token]
            if not kept:
                return Verdict(tuple(path), token)
            node = kept[0]
            path.append(node)


KIND = RuleKind(name="lookalike", build=Lookalike, exact=True)
