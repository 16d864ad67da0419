"""Stretches of time as half-open intervals, and how long they last together.

Nothing is sampled: every answer is a sum of differences of the given ends, so it is exact for
numbers whose differences are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals, in order; empty ones are left out."""
    found: list[Interval] = []
    for began, ended in sorted(intervals):
        if ended <= began:
            continue
        if found and began <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], ended))
        else:
            found.append((began, ended))
    return found


def seconds(intervals: Iterable[Interval]) -> float:
    """How long they cover, moments in several of them counted once."""
    return sum(ended - began for began, ended in union(intervals))


def shared_seconds(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """How long both cover."""
    return sum(seconds_by_depth([list(first), list(second)])[2:])


def seconds_by_depth(tracks: Sequence[Iterable[Interval]]) -> list[float]:
    """Entry n: how long exactly n of the tracks cover, between the first beginning and the last
    end. There are `len(tracks) + 1` entries."""
    changes: list[tuple[float, int]] = []
    for track in tracks:
        for began, ended in union(track):
            changes += [(began, 1), (ended, -1)]
    changes.sort()
    found = [0.0] * (len(tracks) + 1)
    depth = 0
    for (moment, change), (following, _) in pairwise(changes):
        depth += change
        if following > moment:
            found[depth] += following - moment
    return found
