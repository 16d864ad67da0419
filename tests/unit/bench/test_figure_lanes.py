"""The lane timeline: bars where jobs were, for both kinds of page, the same bytes each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from doubles.timelines import job, timelines, trace
from outrider.bench.figure_lanes import MAX_JOBS, LanePicture, draw_lanes, lanes
from outrider.bench.figure_style import LIGHT, themed
from outrider.core.budget import JobTrace

JOBS = [
    job("prefill", "prefill", 100, 102, 1),
    job("decode", "draft", 101, 103, 0),
    job("verify", "verify", 103, 107, 0),
]


def drawn(picture: LanePicture) -> Any:
    with themed(LIGHT):
        return lanes(picture, LIGHT)


def bars(figure: Any) -> list[tuple[float, float]]:
    """Beginning and end of every bar, in milliseconds; a job first, then its parts."""
    boxes = [c.get_paths()[0].get_extents() for c in figure.axes[0].collections]
    return [(round(box.x0, 6), round(box.x1, 6)) for box in boxes]


def test_a_job_is_a_bar_on_its_lane_from_its_beginning_to_its_end() -> None:
    figure = drawn(LanePicture(JOBS))
    assert bars(figure)[::2] == [(0, 2000), (1000, 3000), (3000, 7000)]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["prefill\n29 %", "decode\n29 %", "verify\n57 %"]


def test_rounds_cut_a_job_into_stages() -> None:
    figure = drawn(LanePicture(JOBS, [trace(0, 1), trace(1, 0, prompt=3)]))
    assert bars(figure)[-3:] == [(3000, 7000), (3000, 5000), (5000, 5500)]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["prefill", "draft", "verify", "accept", "other"]


def test_a_long_run_is_drawn_from_its_beginning() -> None:
    many = [job("main", "draft+verify", i, i + 1) for i in range(5 * MAX_JOBS)]
    assert len(bars(drawn(LanePicture(many)))) == 2 * MAX_JOBS
    assert len(bars(drawn(LanePicture(many, seconds=10.0)))) == 2 * 10
    small_print = drawn(LanePicture(many, seconds=10.0)).get_supxlabel()
    assert small_print.startswith("the first 10000 ms, 10 of 400 jobs")


def test_no_job_is_no_picture() -> None:
    with pytest.raises(ValueError, match="no job"):
        drawn(LanePicture([]))


@pytest.mark.slow
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(timelines().filter(bool))
def test_any_timeline_can_be_drawn(jobs: list[JobTrace]) -> None:
    figure = drawn(LanePicture(jobs))
    assert len(bars(figure)) == 2 * len(jobs)


@pytest.mark.slow
def test_a_picture_drawn_again_is_the_same_bytes(tmp_path: Path) -> None:
    picture = LanePicture(JOBS, [trace(0, 1)], small_print="pdv")
    first = {path: path.read_bytes() for path in draw_lanes(picture, tmp_path, "lanes")}
    assert {path.name for path in first} == {
        f"lanes{theme}.{kind}" for theme in ("", "-dark") for kind in ("svg", "png")
    }
    again = {path: path.read_bytes() for path in draw_lanes(picture, tmp_path, "lanes")}
    assert again == first
