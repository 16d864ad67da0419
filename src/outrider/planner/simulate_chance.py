"""What chance decides in a simulation: verdicts, hits, lengths and arrivals.

The number of draft tokens that a verification keeps is drawn with one uniform number u: it is the
number of places j with u < a_1 a_2 ... a_j, where a_j is the probability that the j-th token is
kept given that all before it were. So P(n >= j) is what it should be, and a longer draft keeps what
a shorter one would have.

Numbers are keyed by (seed, sequence, tokens that it has, what is decided), as an engine's are. So
every engine of a comparison meets the same verdicts, and what differs is the schedule alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from outrider.core.errors import ConfigError
from outrider.core.rng import philox_uniform
from outrider.estimate.theory import expected_by_place, prefix_products


class Decides(IntEnum):
    """What a number is for; part of its key, so that none serves twice."""

    VERDICT = 0
    HIT = 1
    PROMPT = 2
    OUTPUT = 3
    GAP = 4


def uniform(seed: int, decides: Decides, seq_id: int, start: int = 0) -> float:
    """In [0, 1)."""
    return philox_uniform(seed, (0, start, seq_id, int(decides)))


@dataclass(frozen=True, slots=True)
class Chance:
    """`rates` is a_1, a_2, ...; what lies beyond the last of them is kept as often as that one.
    `p_hit` is how often a verdict is among those that were drafted for. Raises ConfigError for
    what is no probability."""

    rates: tuple[float, ...]
    p_hit: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for value in (*self.rates, self.p_hit):
            if not 0 <= value <= 1:
                raise ConfigError(
                    f"{value:g} is no probability.", hint="name numbers from 0 to 1, as in .8"
                )
        if not self.rates:
            raise ConfigError(
                "nothing says how often drafts are kept.", hint="--alpha .8, or --places .8,.7"
            )

    def rates_of(self, depth: int) -> tuple[float, ...]:
        """a_1 to a_depth."""
        return (*self.rates, *[self.rates[-1]] * depth)[:depth]

    def tokens_per_round(self, depth: int) -> float:
        """E of a draft of `depth` tokens, the target's own included."""
        return expected_by_place(self.rates_of(depth))

    def num_kept(self, seq_id: int, start: int, depth: int) -> int:
        """Of a draft of `depth` tokens for a sequence that has `start` tokens; at most `depth`."""
        if depth == 0:
            return 0
        drawn = uniform(self.seed, Decides.VERDICT, seq_id, start)
        return sum(drawn < chance for chance in prefix_products(self.rates_of(depth)))

    def is_hit(self, seq_id: int, start: int) -> bool:
        """Whether the verdict that left a sequence with `start` tokens was drafted for."""
        return uniform(self.seed, Decides.HIT, seq_id, start) < self.p_hit
