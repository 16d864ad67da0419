"""The engine in a process of its own: same texts as here, through kills, hangs and mistakes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from outrider import LLM, SamplingParams
from outrider.core.config import EngineConfig
from outrider.core.errors import CheckpointError, ConfigError, PromptTooLongError, QueueFullError
from outrider.server.calls import KeptOutError, ProcessStream
from outrider.server.port import (
    EngineLostError,
    EngineRequest,
    Load,
    NotReadyError,
    decoded,
    error_of,
    failure_of,
)
from outrider.server.process_port import ProcessPort

pytestmark = [pytest.mark.weights, pytest.mark.wide]
T = TypeVar("T")
PROMPTS = ("def quicksort(items):", "Once upon a time", "import os\n", "The answer is")
CONFIG = EngineConfig(threads=1, k=3, sampler="coupled", batch_size=4)
LONG = SamplingParams(max_tokens=96, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=96, ignore_eos=True, temperature=0.8, seed=11)


def served(
    work: Callable[[ProcessPort], Awaitable[T]],
    config: EngineConfig = CONFIG,
    *,
    hang_seconds: float = 30.0,
    max_queued: int = 64,
) -> T:
    load = Load("outrider/embedded", None, config, max_queued)

    async def run() -> T:
        port = ProcessPort(load, hang_seconds=hang_seconds)
        await port.start()
        try:
            return await asyncio.wait_for(work(port), 240)
        finally:
            await port.aclose()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, bool], str]:
    with LLM(config=CONFIG) as llm:
        return {
            (prompt, drawn): llm.generate(prompt, DRAWN if drawn else LONG)[0].text
            for prompt in PROMPTS
            for drawn in (False, True)
        }


async def asked(port: ProcessPort, prompt: str, params: SamplingParams) -> ProcessStream:
    ids = await port.encode(prompt)
    return port.stream(EngineRequest(prompt_ids=ids, params=params, structure={}))


async def read(stream: ProcessStream) -> str:
    return "".join([event.text async for event in stream])


async def first_events(streams: list[ProcessStream]) -> list[str]:
    return [(await anext(stream)).text for stream in streams]


def kill(port: ProcessPort, number: int = signal.SIGKILL) -> None:
    assert port.process_id is not None
    os.kill(port.process_id, number)


def test_texts_are_those_of_an_llm(expected: dict[tuple[str, bool], str]) -> None:
    async def work(port: ProcessPort) -> None:
        streams = {
            (prompt, drawn): await asked(port, prompt, DRAWN if drawn else LONG)
            for prompt, drawn in expected
        }
        texts = await asyncio.gather(*map(read, streams.values()))
        assert dict(zip(streams, texts, strict=True)) == expected
        for key, stream in streams.items():
            assert stream.result.text == expected[key]
            assert stream.result.stats.num_drafted > 0
        ids = await port.encode(PROMPTS[0])
        assert await decoded(port, ids) == PROMPTS[0]
        assert port.card.drafter == "model"
        assert port.status.state == "ready"
        assert port.status.num_restarts == 0

    served(work)


def test_texts_are_the_same_when_the_engine_is_killed(
    expected: dict[tuple[str, bool], str],
) -> None:
    async def work(port: ProcessPort) -> None:
        streams = [
            await asked(port, prompt, DRAWN if drawn else LONG) for prompt, drawn in expected
        ]
        begun = await first_events(streams[:4])
        kill(port)
        rest = await asyncio.gather(*map(read, streams))
        texts = [first + later for first, later in zip([*begun, *[""] * 4], rest, strict=True)]
        assert texts == list(expected.values())
        assert [stream.result.text for stream in streams] == texts
        assert port.status.num_restarts == 1
        for stream, prompt in zip(streams, PROMPTS, strict=False):
            result, stats = stream.result, stream.result.stats
            assert stats.num_emitted == stats.num_accepted + stats.num_rounds == 96
            assert stats.num_rounds >= sum(stats.acceptance_histogram) > 96 // 8
            assert len(result.token_seconds) == 96
            # Nobody had read the prompt when the request came.
            assert result.num_cached_tokens == 0, prompt

    served(work)


def test_a_text_that_cannot_go_on_ends_with_one_error() -> None:
    drawn = SamplingParams(max_tokens=2_000, ignore_eos=True, temperature=0.8, seed=1)

    async def work(port: ProcessPort) -> None:
        stream = await asked(port, PROMPTS[0], drawn)
        await anext(stream)
        kill(port, signal.SIGSEGV)
        with pytest.raises(EngineLostError, match="SIGSEGV"):
            await read(stream)
        with pytest.raises(EngineLostError):
            _ = stream.result
        again = await asked_when_ready(port, PROMPTS[0], LONG)
        assert await read(again)

    served(work, EngineConfig(threads=1, sampler="block"))


async def asked_when_ready(port: ProcessPort, prompt: str, params: SamplingParams) -> ProcessStream:
    while True:
        with suppress(NotReadyError, EngineLostError):
            return await asked(port, prompt, params)
        await asyncio.sleep(0.05)


def test_a_request_that_ends_the_engine_is_kept_out_and_others_are_not(
    expected: dict[tuple[str, bool], str],
) -> None:
    async def work(port: ProcessPort) -> None:
        other = await asked(port, PROMPTS[1], DRAWN)
        begun = (await anext(other)).text
        ids = await port.encode(PROMPTS[0])
        bad = EngineRequest(prompt_ids=ids, params=LONG, structure={})
        stream = port.stream(bad)
        kill(port)
        while not stream.is_sent or port.status.num_restarts == 0:
            await asyncio.sleep(0)
        kill(port)
        with pytest.raises(KeptOutError):
            await read(stream)
        assert begun + await read(other) == expected[PROMPTS[1], True]
        with pytest.raises(KeptOutError, match="ended twice"):
            port.stream(bad)
        assert await read(await asked(port, PROMPTS[2], LONG)) == expected[PROMPTS[2], False]

    served(work)


def test_an_engine_that_hangs_is_started_again(expected: dict[tuple[str, bool], str]) -> None:
    async def work(port: ProcessPort) -> None:
        # An engine that had finished the text when it was stopped hangs at the next one.
        while port.status.num_restarts == 0:
            stream = await asked_when_ready(port, PROMPTS[3], LONG)
            begun = (await anext(stream)).text
            kill(port, signal.SIGSTOP)
            assert begun + await read(stream) == expected[PROMPTS[3], False]
        assert port.status.num_restarts == 1

    served(work, hang_seconds=3.0)


@pytest.mark.deep
def test_a_load_that_hangs_is_begun_anew(expected: dict[tuple[str, bool], str]) -> None:
    async def work(port: ProcessPort) -> None:
        stream = await asked(port, PROMPTS[3], LONG)
        begun = (await anext(stream)).text
        before = children_of(os.getpid())
        kill(port)
        # Which process loads is not known here: it is the one that this one has started since.
        while not (loading := children_of(os.getpid()) - before):
            await asyncio.sleep(0.01)
        os.kill(loading.pop(), signal.SIGSTOP)
        assert begun + await read(stream) == expected[PROMPTS[3], False]
        assert port.status.num_restarts == 1

    served(work, hang_seconds=3.0)


def children_of(process_id: int) -> set[int]:
    tasks = Path(f"/proc/{process_id}/task").iterdir()
    return {int(word) for task in tasks for word in (task / "children").read_text().split()}


def test_mistakes_are_told_as_they_are_here() -> None:
    async def work(port: ProcessPort) -> None:
        with pytest.raises(ConfigError, match="the prompt is empty"):
            await port.encode("")
        many = SamplingParams(logit_bias={10**6: 1.0})
        with pytest.raises(ConfigError, match="outside the vocabulary"):
            await read(await asked(port, PROMPTS[0], many))
        ids = await port.encode(PROMPTS[0])
        request = EngineRequest(prompt_ids=ids, params=LONG, structure={})
        streams = [port.stream(request) for _ in range(5)]
        with pytest.raises(QueueFullError):
            port.stream(request)
        for stream in streams:
            stream.cancel()
        for stream in streams:
            with suppress(ConfigError):
                await read(stream)
        assert await read(await asked(port, PROMPTS[0], LONG))

    served(work, max_queued=5)


def test_a_model_that_is_not_there_is_told_at_the_start() -> None:
    load = Load("no/such-model-anywhere", None, EngineConfig(), 4)
    with pytest.raises(CheckpointError):
        asyncio.run(ProcessPort(load).start())


def test_the_process_ends_with_the_server() -> None:
    async def work(port: ProcessPort) -> int:
        await asked(port, PROMPTS[0], LONG)
        assert port.process_id is not None
        return port.process_id

    with pytest.raises(ProcessLookupError):
        os.kill(served(work), 0)


@pytest.mark.parametrize(
    "error", [ConfigError("a", hint="b"), QueueFullError(3, 1), PromptTooLongError(9, 8, 257, 256)]
)
def test_errors_keep_their_kind(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    found = error_of(failure_of(error))
    assert not caplog.records
    assert type(found) is type(error)
    assert (str(found), found.__dict__) == (str(error), error.__dict__)


def test_a_defect_keeps_its_words_and_leaves_its_stack_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = KeyError("x")
    assert str(error_of(failure_of(error))) == "KeyError: 'x'"
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [error]


def test_what_cannot_be_sent_leaves_nothing_behind() -> None:
    async def work(port: ProcessPort) -> None:
        ids = await port.encode(PROMPTS[0])
        huge = {"schema": {"type": "integer", "maximum": 2**70}}
        request = EngineRequest(prompt_ids=ids, params=LONG, structure=cast("Any", huge))
        for _ in range(70):
            with pytest.raises(OverflowError):
                port.stream(request)
        assert await read(await asked(port, PROMPTS[0], LONG))

    served(work)


def test_a_cancellation_right_behind_its_request_is_heard() -> None:
    endless = SamplingParams(max_tokens=1_500, ignore_eos=True)

    async def work(port: ProcessPort) -> None:
        ids = await port.encode(PROMPTS[0])
        for _ in range(64):
            port.stream(EngineRequest(prompt_ids=ids, params=endless, structure={})).cancel()
        short = SamplingParams(max_tokens=4, ignore_eos=True)
        stream = port.stream(EngineRequest(prompt_ids=ids, params=short, structure={}))
        assert await read(stream)
        while port.status.num_running + port.status.num_waiting:
            await asyncio.sleep(0.05)

    served(work)


def test_a_repeated_request_is_known_whatever_its_seed() -> None:
    one, other = (
        ProcessStream(
            seed,
            EngineRequest(
                prompt_ids=[1], params=SamplingParams(temperature=1, seed=seed), structure={}
            ),
            lambda _: None,
        )
        for seed in (1, 2)
    )
    assert one.kind == other.kind
