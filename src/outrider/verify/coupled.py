"""The match rule with shared races: text tied to the seed, and more of the draft kept.

At each absolute position every token id has an exponential number of its own (`race_at` in
core/rng.py). The target's token is the winner of the race under p, a coupled drafter's is the
winner of the same race under q, and the draft is kept as long as the two agree. Each emitted token
is the target's own draw at its position, so the text is a function of seed, prompt and p alone: the
same with any drafter, any draft length and with none. q is never read.

Both races have the same winner i with probability 1 / sum over j of max(p_j / p_i, q_j / q_i), in
all at least (1 - TV) / (1 + TV), TV the distance of p and q.

Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative
Decoding" (arXiv 2408.07978). Cost: an exponential number for every id of non-zero weight, for each
token emitted.

Shapes:  V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.core.draft import Verdict
from outrider.core.protocols import JudgeRow
from outrider.core.rng import Noise
from outrider.verify.match import follow


class CoupledRule:
    """Keeps the target's law, and the seed's text. Pair it with a drafter that draws by races."""

    name = "coupled"
    exact = True

    def __call__(self, rows: Sequence[JudgeRow]) -> list[Verdict]:
        return [follow(row, race) for row in rows]


def race(law: int | Tensor, noise: Noise, depth: int) -> int:
    """The target's own token `depth` places after the round's start."""
    return law if isinstance(law, int) else noise.race_at(law, depth)
