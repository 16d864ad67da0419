"""Several engines of one model: who gets a request, and what becomes of it when an engine dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from doubles.warm_python import anew
from outrider import LLM, SamplingParams
from outrider.core.config import EngineConfig
from outrider.plugins.replicas import ReplicasPort
from outrider.sched.admission import BLOCK_TOKENS
from outrider.server.calls import ProcessStream
from outrider.server.port import EngineRequest, Engines, Load
from outrider.server.process_port import ProcessPort

pytestmark = [pytest.mark.weights, pytest.mark.wide]
T = TypeVar("T")
CONFIG = EngineConfig(threads=1, k=3, sampler="coupled", batch_size=8, context=512)
NUM_FAMILIES, NUM_IN_FAMILY = 8, 3
# Families whose beginnings are several blocks long; members differ in their last words.
PROMPTS = tuple(
    f"# Module number {family}.\nimport os\nimport sys\n\n\nclass Parser{family}:\n"
    f'    """Reads lines of kind {family} and sums what they say."""\n\n    def part_{member}(self'
    for member in range(NUM_IN_FAMILY)
    for family in range(NUM_FAMILIES)
)
PARAMS = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.8, seed=7)


def served(work: Callable[[ReplicasPort], Awaitable[T]], *engines: EngineConfig | Load) -> T:
    ports = [
        ProcessPort(one if isinstance(one, Load) else Load("outrider/embedded", None, one, 64))
        for one in engines or (CONFIG, CONFIG)
    ]

    async def run() -> T:
        port = ReplicasPort(ports)
        await port.start()
        try:
            return await asyncio.wait_for(work(port), 240)
        finally:
            await port.aclose()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Of a single engine, one request after the other."""
    with LLM(config=replace(CONFIG, batch_size=1)) as llm:
        return [llm.generate(prompt, PARAMS)[0].text for prompt in PROMPTS]


async def asked(port: ReplicasPort, prompt: str) -> ProcessStream:
    ids = await port.encode(prompt)
    assert len(ids) >= 2 * BLOCK_TOKENS
    return port.stream(EngineRequest(prompt_ids=ids, params=PARAMS, structure={}))


async def read(stream: ProcessStream) -> str:
    return "".join([event.text async for event in stream])


def home(port: ReplicasPort, stream: ProcessStream) -> int:
    """Which replica has it."""
    assert stream.engine is not None
    assert stream.leave == port.replicas[stream.engine].leave
    return stream.engine


def kill(port: ReplicasPort, number: int) -> None:
    process_id = port.replicas[number].process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)


def test_a_family_of_prompts_stays_together_and_both_engines_work(expected: list[str]) -> None:
    async def work(port: ReplicasPort) -> None:
        texts, homes = list[str](), dict[int, Counter[int]]()
        for start in range(0, len(PROMPTS), NUM_FAMILIES):
            # One of each family at a time: queues are even, so beginnings decide.
            streams = [await asked(port, one) for one in PROMPTS[start : start + NUM_FAMILIES]]
            for family, stream in enumerate(streams):
                homes.setdefault(family, Counter())[home(port, stream)] += 1
            texts += await asyncio.gather(*map(read, streams))
        assert texts == expected
        assert sum(max(found.values()) for found in homes.values()) >= 0.9 * len(PROMPTS)
        assert len({found.most_common(1)[0][0] for found in homes.values()}) == 2
        assert port.status.state == "ready"
        assert port.card.facts["replicas"] == "2"

    served(work)


def test_requests_of_one_beginning_spread_where_one_engine_has_too_much_to_do() -> None:
    async def work(port: ReplicasPort) -> None:
        streams = [await asked(port, PROMPTS[0]) for _ in range(10)]
        homes = Counter(home(port, stream) for stream in streams)
        await asyncio.gather(*map(read, streams))
        assert min(homes.values()) >= 4
        assert sum(homes.values()) == 10

    served(work)


def test_an_engine_that_is_killed_loses_no_text(expected: list[str]) -> None:
    async def work(port: ReplicasPort) -> None:
        streams = [await asked(port, prompt) for prompt in PROMPTS]
        reading = [asyncio.ensure_future(read(stream)) for stream in streams]
        lost = [stream for stream in streams if home(port, stream) == 0]
        while sum(len(stream.written) > 0 for stream in lost) < 4:
            await asyncio.sleep(0.01)
        kill(port, 0)
        texts = await asyncio.gather(*reading)
        assert texts == expected
        assert [stream.result.text for stream in streams] == expected
        # Those that had begun did not wait for the next start.
        assert sum(home(port, stream) == 1 for stream in lost) >= 4
        async with asyncio.timeout(60):
            while [one.state for one in port.status.engines] != ["ready", "ready"]:
                await asyncio.sleep(0.05)
        assert [one.num_restarts for one in port.status.engines] == [1, 0]
        again = [await asked(port, prompt) for prompt in PROMPTS[:4]]
        assert await asyncio.gather(*map(read, again)) == expected[:4]
        assert {home(port, stream) for stream in again} == {0, 1}

    served(work)


def test_an_engine_is_replaced_under_load_and_no_text_is_cut(expected: list[str]) -> None:
    """The other one has other numerics, so what was begun is waited for."""

    async def work(port: ReplicasPort) -> None:
        assert "numerics differ" in port.card.notes[-1]
        streams = [await asked(port, prompt) for prompt in PROMPTS[:8]]
        reading = [asyncio.ensure_future(read(stream)) for stream in streams]
        own = [number for number, stream in enumerate(streams) if home(port, stream) == 0]
        assert own
        while not all(streams[number].written for number in own):
            await asyncio.sleep(0.01)
        before = port.replicas[0].process_id
        await port.replace(0, seconds=200)
        texts = await asyncio.gather(*reading)
        assert [texts[number] for number in own] == [expected[number] for number in own]
        assert {home(port, streams[number]) for number in own} == {0}
        assert port.replicas[0].process_id != before

    served(work, CONFIG, replace(CONFIG, quantise="int8"))


def test_engines_have_their_share_of_the_cores() -> None:
    async def work(port: ReplicasPort) -> None:
        for replica, place in zip(port.replicas, places, strict=True):
            process_id = replica.process_id
            assert process_id is not None
            assert tuple(sorted(os.sched_getaffinity(process_id))) == place.cores
        texts = [await read(await asked(port, prompt)) for prompt in PROMPTS[:2]]
        assert all(texts)

    places = Engines.of(2, [], EngineConfig(device="cpu")).placements
    config = replace(CONFIG, threads=0)
    # PyTorch counts cores when it is loaded.
    with anew():
        served(work, *[Load("outrider/embedded", None, config, 64, place) for place in places])
