"""Rounds find their jobs, and jobs are cut into stages."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from doubles.timelines import job, trace
from outrider_lab.metrics.chrome_trace import Slice, rounds_of, slices


def test_rounds_find_their_jobs_although_lanes_interleave() -> None:
    jobs = [
        job("verify", "verify", 3, 6, 0, 1),
        job("prefill", "prefill", 0, 5, 2),
        job("decode", "draft", 0, 3, 0, 1),
        job("verify", "verify", 7, 9, 1),
    ]
    rounds = [trace(0, 5), trace(1, 5), trace(1, 6), trace(2, 4, prompt=8)]
    found = rounds_of(jobs, rounds)
    assert found == [(rounds[0], rounds[1]), (rounds[3],), (), (rounds[2],)]


def test_a_job_that_failed_takes_no_round_of_its_retry() -> None:
    failed = job("main", "draft+verify", 0, 1, 0, 1)
    retry = job("main", "draft+verify", 1, 2, 0)
    other = job("main", "draft+verify", 2, 3, 1)
    assert rounds_of([failed, retry], [trace(0, 3)]) == [(), (trace(0, 3),)]
    one_by_one = [trace(0, 3), trace(1, 4)]
    found = rounds_of([failed, retry, other], one_by_one)
    assert found == [(), (trace(0, 3),), (trace(1, 4),)]


def test_records_that_were_not_kept_leave_a_job_alone() -> None:
    jobs = [job("main", "verify", 0, 1, 0, 1)]
    assert rounds_of(jobs, []) == [()]
    assert rounds_of(jobs, [trace(0, 3)]) == [()]
    assert rounds_of(jobs, [trace(0, 3), trace(1, 4)]) == [()]


def test_a_round_is_cut_into_draft_pass_and_verdict() -> None:
    found = slices(job("main", "draft+verify", 10, 14), [trace(0, 0)])
    assert found == [
        Slice("draft", 10, 11),
        Slice("verify", 11, 13),
        Slice("accept", 13, 13.5),
    ]


def test_a_draft_of_another_lane_is_not_shown_twice() -> None:
    found = slices(job("verify", "verify", 10, 14), [trace(0, 0)])
    assert [one.stage for one in found] == ["verify", "accept"]


def test_a_pass_that_reads_a_prompt_is_prefill_whatever_else_it_does() -> None:
    alone = slices(job("prefill", "prefill", 0, 2), [trace(0, 0, prompt=8)])
    assert alone == [Slice("prefill", 0, 2)]
    both = [trace(0, 0), trace(1, 0, prompt=8)]
    beside = slices(job("main", "draft+prefill+verify", 0, 4, 0, 1), both)
    assert [one.stage for one in beside] == ["draft", "prefill", "accept"]


@given(
    st.floats(0, 5),
    st.sampled_from(["draft", "ahead", "prefill", "verify", "draft+verify"]),
    st.booleans(),
)
def test_slices_are_disjoint_and_inside_the_job(length: float, kinds: str, known: bool) -> None:
    whole = job("main", kinds, 10, 10 + length)
    found = slices(whole, [trace(0, 0)] if known else [])
    assert found
    assert found[0].began == whole.began
    assert found[-1].ended <= whole.ended
    assert all(before.ended <= after.began for before, after in pairwise(found))
    assert all(one.began <= one.ended for one in found)
