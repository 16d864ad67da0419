"""What a drafter has not read, and what reading it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checks.controllers import trace
from outrider.estimate.cost import HORIZON, LEAST_READ, Reading


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


def test_what_another_drafter_had_right_is_read_as_well() -> None:
    reading = Reading("model")
    assert reading.ended([trace(0, 4, 2)]) == 1
    reading.ended([replace(trace(0, 8, 7), drafter="suffix")])
    assert reading.is_due(0)
    assert reading.ended([trace(0, 4, 0)]) == 8


def test_a_few_tokens_take_the_time_of_one_short_pass() -> None:
    reading = Reading()
    reading.add(0.5, LEAST_READ)
    reading.add(0.25, 5)
    reading.ended([replace(trace(0, 0, 0), num_emitted=2)])
    assert reading.seconds([0]) == pytest.approx(0.25)
    reading.ended([replace(trace(0, 0, 0), num_emitted=2 * LEAST_READ - 2)])
    assert reading.seconds([0]) == pytest.approx(1.0)


def test_a_reading_is_repaid_by_the_tokens_before_the_next() -> None:
    """Where look-ups draft every other round, these are few."""
    alone, often = Reading("model"), Reading("model")
    assert often.horizon == HORIZON
    for _ in range(200):
        for one in (alone, often):
            one.ended([trace(0, 4, 2)])
        often.ended([replace(trace(0, 8, 7), drafter="suffix")])
    assert alone.horizon == HORIZON
    assert often.horizon == pytest.approx(3, abs=2.5)
