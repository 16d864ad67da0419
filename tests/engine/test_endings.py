"""Every request is told its whole text, whatever lanes, callers and other requests do meanwhile."""

from __future__ import annotations

import time

import pytest

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import ConfigError
from outrider.engine.lanes import LaneResult, LaneTask
from outrider.plugins.lanes import threads

PARAMS = SamplingParams(max_tokens=12)
PROMPT = "def f(x):"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pd", "ssd"])
def test_a_lane_that_is_slow_to_report_cuts_no_text(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text has ended in the lane's thread some time before the caller hears of it."""
    run = threads._Lane._run  # pyright: ignore[reportPrivateUsage]

    def slowly(lane: threads._Lane, task: LaneTask) -> LaneResult:  # pyright: ignore[reportPrivateUsage]
        done = run(lane, task)
        time.sleep(0.002)
        return done

    monkeypatch.setattr(threads._Lane, "_run", slowly)  # pyright: ignore[reportPrivateUsage]
    llm = LLM(config=EngineConfig(schedule=schedule, k=2))
    other = llm.submit("import os", SamplingParams(max_tokens=200))
    for _ in range(6):
        events = list(llm.stream(PROMPT, PARAMS))
        told = [token for event in events for token in event.token_ids]
        assert told == list(llm.last_result.token_ids)
        assert "".join(event.text for event in events) == llm.last_result.text
    llm.cancel(other)
    llm.close()


def test_lanes_start_again_after_they_were_closed() -> None:
    llm = LLM(config=EngineConfig(schedule="pd", k=2))
    before = llm.generate(PROMPT, PARAMS)[0].token_ids
    llm.close()
    assert llm.generate(PROMPT, PARAMS)[0].token_ids == before
    llm.close()


def test_more_prompts_than_may_wait_are_handed_in_as_places_come_free() -> None:
    llm = LLM(config=EngineConfig(max_waiting=2, batch_size=2, k=2))
    results = llm.generate([PROMPT] * 7, SamplingParams(max_tokens=3, n=2, temperature=0.7, seed=0))
    assert len(results) == 14
    assert all(len(result.token_ids) == 3 for result in results)
    assert not llm.counts.rejected


def test_a_cancelled_request_has_ended_and_keeps_what_it_wrote() -> None:
    llm, other = LLM(config=EngineConfig(k=2)), LLM(config=EngineConfig(k=2))
    mine, theirs = llm.submit(PROMPT, PARAMS), other.submit(PROMPT, PARAMS)
    with pytest.raises(ConfigError, match="another LLM"):
        other.cancel(mine)
    llm.advance()
    llm.cancel(mine)
    assert mine.done
    result = mine.result()
    assert result.finish_reason is None
    assert 0 < len(result.token_ids) < 12
    assert "cancelled before its end" in result.notes
    while other.has_work:
        other.advance()
    assert len(theirs.result().token_ids) == 12
    assert llm.counts.cancelled == 1
    assert not other.counts.cancelled


def test_what_a_cancelled_neighbour_was_told_with_is_told_before_the_next_round() -> None:
    """Cancelling waits for the job that both are in; the other's tokens of it come in order."""
    llm = LLM(config=EngineConfig(schedule="pd", k=2))
    first, second = llm.submit(PROMPT, PARAMS), llm.submit("class Stack:", PARAMS)
    for _ in range(3):
        llm.advance()
    llm.cancel(first)
    told: list[int] = []
    while not second.done:
        told += [token for event in second.events() for token in event.token_ids]
        llm.advance()
    told += [token for event in second.events() for token in event.token_ids]
    assert told == list(second.result().token_ids)
    assert second.result().token_ids == llm.generate("class Stack:", PARAMS)[0].token_ids
    llm.close()
