"""What drafting ahead of the verdict brings, in closed form.

While the target verifies a round, a drafter with resources of its own prepares for verdicts that it
foresees. In units of T_verify, with E tokens a round after a hit or a miss, T_p the time of
drafting ahead, T_b that of drafting after a miss and s of handing over,

    S = (p E_hit + (1 - p) E_miss) / (p max(1, T_p) + (1 - p)(1 + T_b) + s)

tokens in a time of T_verify. In a batch of b that verifies together a round waits for its slowest
row: the denominator has p^b instead of p, the numerator still p. (Kumar, Dao, May, "Speculative
speculative decoding", Theorem 7, which has s = 0.)

Where both share one memory, neither is as fast beside the other. Of the time in which they run
together a share `contention` is lost: 0 with a device each, 1 where nothing is gained by running
at once.

Hits come in runs: after a hit the draft was a full one and the next verdict is likelier foreseen.
With p_hh the share of hits after a hit and p_mh after a miss, in the long run

    p = p_mh / (1 - p_hh + p_mh)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AheadTimes:
    """The inputs: times in units of T_verify, `batch` sequences that verify together."""

    p_hit: float
    tokens_hit: float
    tokens_miss: float
    ahead: float
    fallback: float
    batch: float = 1.0
    sync: float = 0.0
    contention: float = 0.0

    @property
    def tokens(self) -> float:
        """A round of one sequence."""
        return self.p_hit * self.tokens_hit + (1 - self.p_hit) * self.tokens_miss

    @property
    def round_time(self) -> float:
        """Of a batch that verifies together."""
        all_hit = self.p_hit**self.batch
        lost = self.contention * min(1.0, self.ahead)
        taken = all_hit * max(1.0, self.ahead) + (1 - all_hit) * (1 + self.fallback)
        return taken + lost + self.sync

    @property
    def speed(self) -> float:
        """Tokens of one sequence in a time of T_verify."""
        return self.tokens / self.round_time


def steady_hits(after_hit: float, after_miss: float) -> float:
    """The share of rounds that are hits in the long run; 1 where neither ever changes."""
    leaving = 1 - after_hit + after_miss
    return after_miss / leaving if leaving else 1.0
