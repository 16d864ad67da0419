"""The lane timeline: bars where jobs were, cut into the stages of their rounds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given

from doubles.timelines import job, timelines, trace
from outrider.core.draft import JobTrace
from outrider_lab.bench.charts import JobBar, Lines, Span, TimelineChart
from outrider_lab.bench.lanes import MAX_JOBS, LanePicture, lane_chart

JOBS = [
    job("prefill", "prefill", 100, 102, 1),
    job("decode", "draft", 101, 103, 0),
    job("verify", "verify", 103, 107, 0),
]


def drawn(picture: LanePicture) -> tuple[TimelineChart, Lines]:
    ((bars,), (depths,)) = lane_chart(picture).panels
    assert isinstance(bars, TimelineChart)
    assert isinstance(depths, Lines)
    return bars, depths


def spans(jobs: Sequence[JobBar]) -> list[Span]:
    """Beginning and end of every bar, in milliseconds; a job first, then its parts."""
    return [(round(one.span[0], 6), round(one.span[1], 6)) for one in jobs]


def test_a_job_is_a_bar_on_its_lane_from_its_beginning_to_its_end() -> None:
    bars, _ = drawn(LanePicture(JOBS))
    assert spans(bars.jobs)[::2] == [(0, 2000), (1000, 3000), (3000, 7000)]
    assert [one.row for one in bars.jobs[::2]] == [0, 1, 2]
    assert bars.rows == ["prefill\n29 %", "decode\n29 %", "verify\n57 %"]


def test_rounds_cut_a_job_into_stages() -> None:
    bars, _ = drawn(LanePicture(JOBS, [trace(0, 1), trace(1, 0, prompt=3)]))
    assert spans(bars.jobs)[-3:] == [(3000, 7000), (3000, 5000), (5000, 5500)]
    assert {one.name for one in bars.jobs} == {"prefill", "draft", "verify", "accept", "other"}


def test_a_long_run_is_drawn_from_its_beginning() -> None:
    many = [job("main", "draft+verify", i, i + 1) for i in range(5 * MAX_JOBS)]
    assert len(drawn(LanePicture(many))[0].jobs) == 2 * MAX_JOBS
    short = LanePicture(many, seconds=10.0)
    assert len(drawn(short)[0].jobs) == 2 * 10
    assert lane_chart(short).foot.startswith("the first 10000 ms, 10 of 400 jobs")


def test_no_job_is_no_picture() -> None:
    with pytest.raises(ValueError, match="no job"):
        lane_chart(LanePicture([]))


@given(timelines().filter(bool))
def test_any_timeline_has_a_chart(jobs: list[JobTrace]) -> None:
    bars, depths = drawn(LanePicture(jobs))
    assert len(bars.jobs) == 2 * len(jobs)
    assert all(began <= ended for began, ended in spans(bars.jobs))
    assert all(len(line.points) == len(jobs) + 1 for line in depths.lines)
