"""The joint law of two races over the same exponential numbers, in closed form.

Each token k has a number E_k, exponential with mean 1. The winner under weights p is the k with the
least E_k / p_k. Let i win under p and j under q. With r = E_j / E_i,

    P(i, i) = 1 / sum over k of max(p_k / p_i, q_k / q_i)
    P(i, j) = integral of dr / S(r)^2 over p_j / p_i <= r <= q_j / q_i
    S(r)    = sum over k of max(p_k / p_i, r q_k / q_j)

and S is a straight line between its kinks, so the integral is a short sum. The first line is that
of Daliri, Musco, Suresh 2024 (arXiv 2408.07978); the second follows by integrating out the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def joint_winner(p: Sequence[float], q: Sequence[float], i: int, j: int) -> float:
    """The probability that `i` wins under `p` and `j` under `q`. Both sum to anything above 0."""
    if p[i] <= 0 or q[j] <= 0:
        return 0.0
    if i == j:
        return 1 / math.fsum(max(a / p[i], b / q[i]) for a, b in zip(p, q, strict=True))
    low = p[j] / p[i]
    high = q[j] / q[i] if q[i] > 0 else math.inf
    if high <= low:
        return 0.0
    lines = [(a / p[i], b / q[j]) for a, b in zip(p, q, strict=True)]
    kinks = sorted({flat / slope for flat, slope in lines if slope > 0})
    ends = [low, *(kink for kink in kinks if low < kink < high), high]
    return math.fsum(_piece(lines, start, end) for start, end in pairwise(ends))


def _piece(lines: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """The integral of 1 / S^2 between two neighbouring kinks."""
    inside = start + 1 if end == math.inf else (start + end) / 2
    flat = math.fsum(a for a, b in lines if a > inside * b)
    slope = math.fsum(b for a, b in lines if a <= inside * b)
    last = 0.0 if end == math.inf else 1 / (flat + slope * end)
    return max(0.0, 1 / (flat + slope * start) - last) / slope
