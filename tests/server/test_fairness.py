"""Shares of the engine: a key that asks for much does not keep another one waiting, and nobody's
text changes for it. Time is counted in the rounds that the busy key writes meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import pytest

from outrider import LLM, SamplingParams
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams as Params
from outrider.server.port import EngineRequest
from outrider.server.thread_port import ThreadPort, ThreadStream

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]
T = TypeVar("T")
CONFIG = EngineConfig(threads=1, k=3, sampler="coupled", batch_size=4)
LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.8, seed=5)
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
# Long beside what the other key asks for, on a machine that is busy too.
BUSY = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.8, seed=5)


def at_work(work: Callable[[ThreadPort], Awaitable[T]]) -> T:
    async def run() -> T:
        port = ThreadPort(lambda: LLM(config=CONFIG))
        await port.start()
        try:
            return await asyncio.wait_for(work(port), 240)
        finally:
            await port.aclose()

    return asyncio.run(run())


async def asked(port: ThreadPort, prompt: str, key: str, params: Params = LONG) -> ThreadStream:
    ids = await port.encode(prompt)
    return port.stream(EngineRequest(prompt_ids=ids, params=params, structure={}, key=key))


async def read(stream: ThreadStream) -> str:
    return "".join([event.text async for event in stream])


def test_a_key_with_many_requests_keeps_no_other_one_waiting() -> None:
    async def work(port: ThreadPort) -> None:
        prompts = [f"def f{i}(" for i in range(CONFIG.most_batch + 2)]
        busy = [await asked(port, prompt, "busy", BUSY) for prompt in prompts]
        reading = [asyncio.ensure_future(read(stream)) for stream in busy]
        while port.status.num_running < CONFIG.most_batch:
            await asyncio.sleep(0)
        other = await asked(port, "import os\n", "other", SHORT)
        text = await read(other)
        # It neither waited for one of the four that ran, nor for the two before it.
        assert sum(task.done() for task in reading) == 0
        assert port.status.num_preempted == 1
        texts = await asyncio.gather(*reading)
        with LLM(config=CONFIG) as llm:
            assert texts == [result.text for result in llm.generate(prompts, BUSY)]
            assert text == llm.generate("import os\n", SHORT)[0].text

    at_work(work)


def test_a_key_alone_has_all_places_and_nobody_gives_way() -> None:
    async def work(port: ThreadPort) -> None:
        streams = [await asked(port, f"x{i} =", "", SHORT) for i in range(12)]
        await asyncio.gather(*map(read, streams))
        assert port.status.num_preempted == 0

    at_work(work)


def test_nobody_waits_while_a_grammar_is_read() -> None:
    async def work(port: ThreadPort) -> None:
        writer = await asked(port, "import os\n", "", LONG)
        await anext(writer)
        ids = await port.encode("x")
        hostile = EngineRequest(
            prompt_ids=ids, params=SHORT, structure={"regex": "a?" * 30_000}, key="other"
        )
        refused = asyncio.ensure_future(read(port.stream(hostile)))
        left = port.stream(hostile)
        left.cancel()
        num_rounds = 0
        while not refused.done():
            if await anext(writer, None) is None:
                writer = await asked(port, "import os\n", "", LONG)
            num_rounds += 1
        with pytest.raises(ConfigError, match="processor time"):
            await refused
        assert num_rounds >= 3
        with suppress(ConfigError):
            await read(left)
        writer.cancel()

    at_work(work)


def test_time_that_is_up_ends_one_that_never_started() -> None:
    async def work(port: ThreadPort) -> None:
        busy = [await asked(port, "x", "", LONG) for _ in range(CONFIG.most_batch)]
        late = await asked(port, "y", "", SamplingParams(max_tokens=9, max_time=0.001))
        assert await read(late) == ""
        assert late.result.finish_reason == "timeout"
        for stream in busy:
            stream.cancel()

    at_work(work)
