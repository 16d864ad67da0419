"""What rounds of one kind bring: how far a draft is kept, and how often there is one.

Of drafts of up to K tokens the chance that more than j are kept, for j from 0 to K - 1, is all that
tokens a round depend on: E = 1 + the sum of these chances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundLaw:
    """`kept` entry j is the chance that a round keeps more than j draft tokens. A share `drafting`
    of rounds drafts anything, and those draft `num_drafted` tokens."""

    kept: tuple[float, ...]
    drafting: float
    num_drafted: float

    @property
    def tokens(self) -> float:
        """E, the target's own token included."""
        return 1 + math.fsum(self.kept)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted."""
        drafted = self.drafting * self.num_drafted
        return (self.tokens - 1) / drafted if drafted else 0.0

    @property
    def variance(self) -> float:
        """Of the tokens of a round."""
        second = math.fsum((2 * place + 1) * kept for place, kept in enumerate(self.kept))
        return max(0.0, second - (self.tokens - 1) ** 2)

    def cut(self, depth: int) -> RoundLaw:
        """Of rounds that may draft no deeper: a tree loses nodes in proportion."""
        if depth >= len(self.kept):
            return self
        drafted = self.num_drafted * depth / len(self.kept)
        return RoundLaw(self.kept[:depth], self.drafting if depth else 0.0, drafted)


PLAIN = RoundLaw((), 0.0, 0.0)
