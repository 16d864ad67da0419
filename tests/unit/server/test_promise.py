"""The planner's promise on an engine's card."""

from __future__ import annotations

import pytest

from outrider import LLM, EngineConfig
from outrider.server.thread_port import promise_of


@pytest.mark.weights
def test_a_drafter_has_a_promise_with_an_interval_and_none_has_none() -> None:
    with LLM(k=3) as llm:
        made = promise_of(llm)
    assert made is not None
    assert 0 < made.low < made.speed_up < made.high
    with LLM(drafter="none") as llm:
        assert promise_of(llm) is None
    with LLM(k=0) as llm:
        assert promise_of(llm) is None


@pytest.mark.weights
def test_longer_drafts_and_other_drafters_are_promised_otherwise() -> None:
    found: set[float] = set()
    for config in (EngineConfig(k=1), EngineConfig(k=4), EngineConfig(drafter="ngram")):
        with LLM(config=config) as llm:
            made = promise_of(llm)
            assert made is not None
            found.add(made.speed_up)
    assert len(found) == 3
