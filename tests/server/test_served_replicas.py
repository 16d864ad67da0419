"""Two engines behind one server, asked by 24 clients, while one of them is killed."""

from __future__ import annotations

import os
import signal

import pytest
from killed_engine import Fleet, asks, examine, gap_for

from doubles.served import served
from outrider import LLM, SamplingParams

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]
ASKS = asks(families=8, members=3, max_tokens=32)


def expected() -> list[str]:
    """A single process's texts, one after another."""
    with LLM("outrider/embedded", threads=1) as llm:
        return [
            llm.generate(str(ask.body["prompt"]), SamplingParams(**params, sampler="coupled"))[
                0
            ].text
            for ask in ASKS
            for params in [{k: v for k, v in ask.body.items() if k != "prompt"}]
        ]


def test_no_client_sees_that_an_engine_was_killed() -> None:
    texts = expected()
    with served("--replicas", "2") as server:
        first = server.engine_ids()
        assert len(first) == 2
        fleet = Fleet(
            url=server.url,
            home_header="x-outrider-engine",
            kill=lambda name: os.kill(first[int(name)], signal.SIGKILL),
            num_ready=lambda: int(server.gauge("outrider_engine_state", state="ready")),
            end=server.end,
        )
        found = examine(fleet, ASKS, texts, gap_for(fleet, ASKS[0]))
        assert found.holds, found
        # How evenly requests come is the machine's affair: by hand it is above 0.9.
        assert found.affinity >= 0.6, found
