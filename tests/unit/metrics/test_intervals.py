"""Interval arithmetic against counting cells of a grid."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from doubles.timelines import cells, intervals
from outrider_lab.metrics.timeline import Interval, seconds, seconds_by_depth, shared_seconds, union


@given(intervals())
def test_a_union_covers_the_same_moments_in_disjoint_order(given_ones: list[Interval]) -> None:
    found = union(given_ones)
    assert cells(found) == cells(given_ones)
    assert all(began < ended for began, ended in found)
    assert all(before[1] < after[0] for before, after in pairwise(found))
    assert seconds(given_ones) == len(cells(given_ones))


@given(intervals(), intervals())
def test_shared_time_is_the_common_cells(first: list[Interval], second: list[Interval]) -> None:
    assert shared_seconds(first, second) == len(cells(first) & cells(second))
    assert shared_seconds(first, second) == shared_seconds(second, first)


@given(st.lists(intervals(), max_size=4))
def test_time_by_depth_is_counted_cell_by_cell(tracks: list[list[Interval]]) -> None:
    covered = [cells(track) for track in tracks]
    everything = set[int]().union(*covered)
    span = range(min(everything), max(everything) + 1) if everything else ()
    expected = [0] * (len(tracks) + 1)
    for cell in span:
        expected[sum(cell in track for track in covered)] += 1
    assert seconds_by_depth(tracks) == expected
