"""Match and coupled rules: draw from the target, keep the draft while it agrees; seed-tied.

Draws are keyed by absolute position, so the text depends on seed and target alone: it is the same
with any drafter and with none. Neither rule reads the drafter's probabilities q, so a drafter that
misreports them cannot bias the output. At temperature > 0 both accept less than the token rule.

Shapes:  V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from outrider.core.draft import Verdict
from outrider.core.protocols import VerifyRow
from outrider.core.rng import Rng
from outrider.core.sampling import draw_at
from outrider.core.tree import ROOT


class MatchRule:
    """Keeps the target's distribution, and the seed's text."""

    name = "match"
    exact = True

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return [follow(row, draw_at) for row in rows]


def follow(row: VerifyRow, own: Callable[[int | Tensor, Rng, int], int]) -> Verdict:
    """Down the tree along the target's `own` tokens: `own(distribution, rng, depth)` is drawn at
    each place that the walk comes to, once."""
    path: list[int] = []
    node = ROOT
    while True:
        token = own(row.distributions.at(node + 1), row.rng, len(path))
        agreeing = (c for c in row.draft.children(node) if row.draft.tokens[c] == token)
        child = next(agreeing, None)
        if child is None:
            return Verdict(tuple(path), token)
        node = child
        path.append(node)


class CoupledRule:
    """Keeps the target's distribution, and the seed's text. Pair it with a drafter that draws by
    races.

    At each absolute position every token id has an exponential number of its own (`race_at` in
    core/rng.py). The target's token is the winner of the race under p, a coupled drafter's is the
    winner of the same race under q, and the draft is kept as long as the two agree.

    Both races have the same winner i with probability 1 / sum over j of max(p_j / p_i, q_j / q_i),
    in all at least (1 - TV) / (1 + TV), TV the distance of p and q.

    Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative
    Decoding" (arXiv 2408.07978). Cost: an exponential number for every id of non-zero weight, for
    each token emitted.
    """

    name = "coupled"
    exact = True

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return [follow(row, race) for row in rows]


def race(distribution: int | Tensor, rng: Rng, depth: int) -> int:
    """The target's own token `depth` places after the round's start."""
    return distribution if isinstance(distribution, int) else rng.race_at(distribution, depth)
