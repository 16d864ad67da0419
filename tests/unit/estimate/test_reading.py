"""What a drafter has not read, and what reading it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checks.controllers import trace
from outrider.estimate.cost import LEAST_READ, Reading


def test_prompts_and_what_the_target_wrote_alone_are_read_with_the_next_draft() -> None:
    reading = Reading()
    prompt = replace(trace(0, 0, 0, reading=True), num_prompt_tokens=100)
    assert [reading.ended([one]) for one in (prompt, trace(0, 0, 0), trace(0, 4, 2))] == [0, 0, 101]
    assert not reading.is_due(0)
    assert reading.ended([trace(0, 4, 4), trace(7, 4, 0)]) == 1
    reading.ended([trace(0, 0, 0)])
    assert reading.is_due(0)


def test_nothing_is_known_before_a_long_reading_was_measured() -> None:
    reading = Reading()
    reading.ended([replace(trace(0, 0, 0, reading=True), num_prompt_tokens=50)])
    reading.add(9.0, LEAST_READ - 1)
    assert reading.seconds([0]) == 0
    reading.add(LEAST_READ / 10, LEAST_READ)
    assert reading.seconds([0, 1]) == pytest.approx(5.0)
    # A draft that took less than it is thought to says that reading costs nothing.
    reading.add(-1.0, LEAST_READ)
    assert reading.seconds([0]) == 0
