"""What a copy of the target could bring at most by its cost and acceptance, beside what it brought.

A round with K tokens of a copy takes K of its passes and one of the target's, which verifies more
rows than a plain pass does. Without the time of those rows it brings

    (1 + P_1 + ... + P_K) / (1 + c K)

times plain decoding's tokens a second, P_i being the share of drafts that kept i tokens and c the
time of a draft token beside a plain one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from outrider.bench.frame import Ratio, spoken
from outrider.bench.studies.drafters_lineup import OFF
from outrider.core.drafter_kinds import KINDS


class CellOfCopy(Protocol):
    """What a comparison of drafters found of a contestant in a domain (drafters_report.py)."""

    @property
    def domain(self) -> str: ...
    @property
    def contestant(self) -> str: ...
    @property
    def speedup(self) -> Ratio | None: ...
    @property
    def tokens_per_second(self) -> float | None: ...
    @property
    def tokens_per_round(self) -> float | None: ...
    @property
    def acceptance(self) -> float | None: ...
    @property
    def by_position(self) -> tuple[float | None, ...]: ...
    @property
    def draft_share(self) -> float | None: ...
    @property
    def most_nodes(self) -> int: ...


def bounds_of_copies(cells: Sequence[CellOfCopy]) -> Iterator[str]:
    """Of copies of the target, what they can bring at most beside what they brought."""
    plain = {cell.domain: cell.tokens_per_second for cell in cells if cell.contestant == OFF}
    for cell in cells:
        kind = KINDS.get(re.split("[=:+]", cell.contestant)[0])
        if kind is None or kind.source != "copy" or cell.speedup is None:
            continue
        found = best_of_copy(cell, plain[cell.domain])
        if found is not None:
            cost, k, most = found
            yield (
                f"{cell.domain}: a draft token of {cell.contestant} takes {cost:.2f} of a plain "
                f"token's time. With what is accepted and verification for nothing, {most:.2f}× at "
                f"K = {k} is the most that could be reached; {spoken(cell.speedup)} is."
            )


_MOST_K = 64


def best_of_copy(
    cell: CellOfCopy, plain_tokens_per_second: float | None
) -> tuple[float, int, float] | None:
    """The time of a draft token beside a plain one, the best K and its speed-up if a round took no
    longer than its drafts and a plain pass; None where something is not known. Tokens beyond the
    measured positions are kept as the last ones are."""
    tokens, rate, accepted = cell.tokens_per_round, cell.tokens_per_second, cell.acceptance
    kept = [share for share in cell.by_position if share is not None]
    if not (tokens and rate and accepted and plain_tokens_per_second and kept):
        return None
    if cell.draft_share is None or tokens <= 1 or cell.most_nodes > len(cell.by_position):
        return None
    drafted = (tokens - 1) / accepted
    cost = cell.draft_share * tokens / rate / drafted * plain_tokens_per_second
    last = kept[-1] ** (1 / len(kept))
    kept += [kept[-1] * last**more for more in range(1, _MOST_K - len(kept) + 1)]
    speed_ups = [
        (1 + sum(kept[:k])) / (1 + cost * k) for k in range(1, min(len(kept), _MOST_K) + 1)
    ]
    most = max(speed_ups)
    return cost, 1 + speed_ups.index(most), most
