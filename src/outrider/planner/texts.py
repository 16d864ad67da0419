"""How much texts differ in what is kept of their drafts.

Each text has a rate of its own, drawn from Beta(u, v). Easy texts end early and leave smaller
batches to the hard ones, so this is in what a job takes (`endings.py`).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

from outrider.estimate.calibration import PlaceCount
from outrider.estimate.theory import expected_tokens
from outrider.planner.places import MIN_REQUESTS

# Texts that are drawn to see how much they differ.
_NUM_TEXTS = 64


def likeness(requests: Sequence[Sequence[PlaceCount]]) -> tuple[float, float] | None:
    """Beta(u, v), from which each text's own rate seems to be drawn, by moments weighed by
    judgements. None of fewer than MIN_REQUESTS, or where they differ no more than chance makes them
    (Kleinman 1973, Proportions with extraneous variance)."""
    counts = [(sum(p.accepted for p in one), sum(p.drafted for p in one)) for one in requests]
    judged = [(accepted, drafted) for accepted, drafted in counts if drafted]
    total = sum(drafted for _, drafted in judged)
    if len(judged) < MIN_REQUESTS:
        return None
    mean = sum(accepted for accepted, _ in judged) / total
    if not 0 < mean < 1:
        return None
    spread = math.fsum(n * (x / n - mean) ** 2 for x, n in judged)
    free = mean * (1 - mean) * (len(judged) - 1)
    most = total - math.fsum(n * n for _, n in judged) / total - len(judged) + 1
    most *= mean * (1 - mean)
    alike = (spread - free) / most if most > 0 else 0.0
    if not 0 < alike < 1:
        return None
    weight = 1 / alike - 1
    return mean * weight, (1 - mean) * weight


def texts_differ(requests: Sequence[Sequence[PlaceCount]], k: int) -> float:
    """The relative deviation between texts of the tokens a round of `k` emits for them; 0 where
    their counts show none."""
    found = likeness(requests)
    if found is None:
        return 0.0
    chance = random.Random(0)
    drawn = [expected_tokens(chance.betavariate(*found), k) for _ in range(_NUM_TEXTS)]
    return statistics.pstdev(drawn) / statistics.fmean(drawn)
