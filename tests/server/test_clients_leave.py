"""A client that disconnects: its places are free while the engine stands still, and its sequences
and their memory within two jobs of each of the engine's lanes, whatever was being done for it.

The engine is held between jobs and let go one job at a time, so all is counted and nothing timed.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from doubles.held_engine import HeldPort
from doubles.live_server import Client, Live, live_server, until
from outrider.core.config import EngineConfig
from outrider.core.draft import JobTrace

pytestmark = [pytest.mark.weights, pytest.mark.wide]

MOST_JOBS = 2
NUM_POINTS = 50
NUM_OTHERS = 2
PATH = "/v1/completions"
LONG: dict[str, Any] = {"max_tokens": 1_400, "ignore_eos": True, "temperature": 0}
OTHER = LONG | {"prompt": "def quicksort(items):", "stream": True}
SINGLE = EngineConfig(threads=1, k=3, batch_size=3, prefill_chunk=32, schedule="single")
LANES = EngineConfig(
    threads=1, k=3, batch_size=3, prefill_chunk=32, schedule="pdv", hybrid_threshold=0
)


@dataclass(frozen=True)
class Phase:
    """What a client asks, and the kind of job after the `number`th of which for it, or after the
    `number`th piece that it has read, it leaves."""

    body: dict[str, Any]
    number: int = 1
    kinds: tuple[str, ...] | None = None
    """None: any job."""
    num_others: int = NUM_OTHERS
    is_queued: bool = False
    reads: bool = False


PROMPT = [7 + number % 400 for number in range(600)]
PHASES = {
    "queued": Phase({"prompt": "x", "stream": True}, num_others=3, is_queued=True),
    "reading the prompt": Phase({"prompt": PROMPT, "stream": True}, 5),
    "before the first piece": Phase({"prompt": "x", "stream": True}),
    "streaming": Phase({"prompt": "x", "stream": True}, 4, reads=True),
    "whole answer": Phase({"prompt": "x"}, 6),
    "n = 3": Phase({"prompt": "x", "stream": True, "n": 3}, 3, reads=True),
}
LANE_PHASES = {
    "reading the prompt": Phase({"prompt": PROMPT, "stream": True}, 4, ("prefill",)),
    "drafting": Phase({"prompt": "y", "stream": True}, 3, ("draft",)),
    "verifying": Phase({"prompt": "y", "stream": True}, 3, ("verify",)),
}


class Trial:
    """A server whose engine can be held."""

    def __init__(self, live: Live, port: HeldPort) -> None:
        self.live, self.port, self.steps = live, port, port.steps
        self.num_free = port.llm.free_tokens

    async def leave_at(self, phase: Phase, *, reset: bool) -> int:
        """How many jobs of one lane ended until the engine had let go."""
        newest = self.steps.newest + phase.num_others
        others = await self._others(phase.num_others)
        client = await self._client(phase, newest)
        await until(lambda: self.steps.is_held)
        num_places, before = self.live.num_places, self.steps.num_by_lane.copy()
        client.leave(reset=reset)
        await until(lambda: self.live.num_places == num_places - phase.body.get("n", 1))
        assert self.live.num_places == phase.num_others
        assert self.steps.num_by_lane == before
        num_jobs = 0
        while self.port.num_left > phase.num_others:
            self.steps.allow(1)
            await until(lambda: self.steps.is_held or self.port.num_left == phase.num_others)
            num_jobs = max((self.steps.num_by_lane - before).values(), default=0)
            assert num_jobs <= MOST_JOBS
        self.steps.allow(math.inf)
        for other in others:
            other.leave()
        await until(lambda: not self.port.num_left and not self.live.num_places)
        assert self.port.llm.free_tokens == self.num_free
        return num_jobs

    async def _others(self, number: int) -> list[Client]:
        """Those who stay; the engine is held after its first job for the first of them, so that
        none ends before its time however slow this process is."""
        found: list[Client] = []
        self.steps.stops = (lambda _: True) if number else None
        for _ in range(number):
            found.append(await self.live.ask(PATH, OTHER))
            await until(lambda: self.steps.is_held and self.port.num_left == len(found))
        return found

    async def _client(self, phase: Phase, newest: int) -> Client:
        """One that asks, of whose sequences the ids are above `newest`, and for which the engine is
        held at its point."""
        num_seen = 0

        def stops(trace: JobTrace) -> bool:
            nonlocal num_seen
            if phase.is_queued:
                return self.port.num_left > phase.num_others
            if max(trace.seq_ids) > newest and phase.kinds in (None, trace.kinds):
                num_seen += 1
            return num_seen >= phase.number

        self.steps.stops = None if phase.reads else stops
        client = await self.live.ask(PATH, LONG | phase.body)
        if phase.num_others:
            wanted = phase.num_others + phase.body.get("n", 1)
            await until(lambda: self.port.num_left == wanted)
            self.steps.allow(math.inf)
        if phase.reads:
            for _ in range(phase.number):
                assert await client.piece()
            self.steps.stops = lambda _: True
        return client


@pytest.fixture(autouse=True)
def one_round_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of a job with several rounds all come after it: nothing holds between them."""
    monkeypatch.setattr("outrider.api.output.CONTROL_SECONDS", 0.0)


Record = Callable[[str, object], None]


def tried(config: EngineConfig, phases: Mapping[str, Phase], record: Record) -> None:
    """Leave in all phases, by end and by reset, and keep how many jobs that took."""

    async def work() -> None:
        port = HeldPort(config)
        async with live_server(port) as live:
            trial = Trial(live, port)
            for name, phase in phases.items():
                for reset in (False, True):
                    record(name, await trial.leave_at(phase, reset=reset))

    asyncio.run(work())


def test_in_every_phase_of_one_lane(record_property: Record) -> None:
    tried(SINGLE, PHASES, record_property)


def test_in_every_phase_of_parted_lanes(record_property: Record) -> None:
    tried(LANES, LANE_PHASES, record_property)


@pytest.mark.deep
@pytest.mark.parametrize("config", [SINGLE, LANES], ids=["single", "pdv"])
def test_at_fifty_random_points(config: EngineConfig, record_property: Record) -> None:
    """The tests above have a point of each phase."""
    rng = random.Random(1)

    def point() -> Phase:
        body: dict[str, Any] = {"prompt": PROMPT[: rng.randrange(1, 600)]}
        body |= {"stream": rng.random() < 0.8, "n": rng.choice((1, 1, 1, 2, 3))}
        others = rng.randrange(SINGLE.most_batch + 1)
        is_queued = others == SINGLE.most_batch
        return Phase(body, rng.randrange(1, 60), num_others=others, is_queued=is_queued)

    points = {f"point {number}": point() for number in range(NUM_POINTS)}
    tried(config, points, record_property)
