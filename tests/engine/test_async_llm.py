"""`AsyncLLM`: texts as `LLM` writes them, hundreds at once, every way of leaving one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from outrider import LLM, AsyncLLM, EngineConfig, SamplingParams
from outrider.api.request import AsyncRequest
from outrider.api.result import MOST_EVENTS, GenerationResult, TextEvent
from outrider.core.errors import ConfigError, QueueFullError

pytestmark = pytest.mark.weights

T = TypeVar("T")
PROMPTS = [f"{head}{number}" for number in range(5) for head in ("def f", "class C", "x = ", "# ")]
SHORT = SamplingParams(max_tokens=6)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(config=EngineConfig(k=3, batch_size=8))


@pytest.fixture
def owner(llm: LLM) -> Iterator[AsyncLLM]:
    """One that is closed, and has left the memory as it was."""
    free = llm.free_tokens
    made = AsyncLLM(llm)
    yield made
    made.engine.close()
    assert not llm.has_work
    assert llm.free_tokens == free


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(main, timeout=600))


def params_of(number: int) -> SamplingParams:
    """Greedy and sampled, long and short."""
    return SamplingParams(max_tokens=3 + number % 5, temperature=number % 2, seed=number % 7)


async def read(owner: AsyncLLM, number: int) -> GenerationResult:
    stream = owner.stream(PROMPTS[number % len(PROMPTS)], params_of(number))
    events = [event async for event in stream]
    assert "".join(event.text for event in events) == stream.result.text
    assert tuple(i for event in events for i in event.token_ids) == stream.result.token_ids
    return stream.result


async def leave(owner: AsyncLLM, number: int) -> None:
    """In one of four ways: the loop, the stream, the task, another thread."""
    stream = owner.stream(PROMPTS[number % len(PROMPTS)], LONG)
    if number % 4 == 2:
        task = asyncio.create_task(stream.__anext__())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return
    async for _ in stream:
        if number % 4 == 0:
            break
        if number % 4 == 1:
            await stream.aclose()
        else:
            thread = threading.Thread(target=stream.cancel)
            thread.start()
            await asyncio.to_thread(thread.join)


@pytest.mark.slow
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.deep)])
def test_many_requests_at_once_of_which_a_fifth_leaves(
    llm: LLM, owner: AsyncLLM, count: int
) -> None:
    async def main() -> list[GenerationResult | None]:
        tasks = [leave(owner, i // 5) if i % 5 == 0 else read(owner, i) for i in range(count)]
        return await asyncio.gather(*tasks)

    before = llm.counts.cancelled
    found = run(main())
    numbers = [number for number in range(count) if number % 5]
    batch = [PROMPTS[number % len(PROMPTS)] for number in numbers]
    owner.engine.close()
    wanted = llm.generate(batch, [params_of(number) for number in numbers])
    assert [r.token_ids for r in found if r is not None] == [r.token_ids for r in wanted]
    assert [r.text for r in found if r is not None] == [r.text for r in wanted]
    # Those that leave before their prompt was encoded never come to the engine.
    assert llm.counts.cancelled - before >= count // 10


def test_generate_gives_what_an_llm_gives(llm: LLM, owner: AsyncLLM) -> None:
    params = [SamplingParams(max_tokens=5, n=1 + i % 3, temperature=1, seed=i) for i in range(6)]
    found = run(owner.generate(PROMPTS[:6], params))
    owner.engine.close()
    wanted = llm.generate(PROMPTS[:6], params)
    assert [result.token_ids for result in found] == [result.token_ids for result in wanted]


def test_a_chat_and_ids(llm: LLM, owner: AsyncLLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])

    async def main() -> tuple[str, str]:
        told = owner.chat("hello", max_tokens=6)
        text = "".join([event.text async for event in told])
        (result,) = await owner.generate([ids], max_tokens=6)
        return text, result.text

    text, of_ids = run(main())
    assert len(text) > 0
    assert of_ids == llm.generate(PROMPTS[0], SHORT)[0].text


def test_a_text_may_have_to_be_one_of_some(owner: AsyncLLM) -> None:
    async def main() -> tuple[str, list[GenerationResult]]:
        stream = owner.stream("x", regex="[0-9]{4}")
        text = "".join([event.text async for event in stream])
        return text, await owner.generate(["x", "y"], choices=["yes", "no"])

    text, results = run(main())
    assert text.isdecimal()
    assert len(text) == 4
    assert {result.text for result in results} <= {"yes", "no"}


def test_one_prompt_that_cannot_be_run_has_a_result(owner: AsyncLLM) -> None:
    results = run(owner.generate(["x", "", "y"], max_tokens=3))
    assert [bool(result.error) for result in results] == [False, True, False]
    with pytest.raises(ConfigError, match="empty"):
        run(owner.generate(["", ""]))


def test_cancelling_generate_ends_its_requests(llm: LLM, owner: AsyncLLM) -> None:
    submitted, cancelled = llm.counts.submitted, llm.counts.cancelled

    async def main() -> None:
        task = asyncio.create_task(owner.generate(PROMPTS, LONG))
        while llm.counts.submitted == submitted and not task.done():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    owner.engine.close()
    # Those whose prompt was not encoded yet never came.
    assert 0 < llm.counts.cancelled - cancelled <= len(PROMPTS)


def test_a_wrong_request_fails_alone(owner: AsyncLLM) -> None:
    async def main() -> None:
        good = asyncio.create_task(read(owner, 1))
        for prompt in ("", [10**9], "x" * 10**6):
            with pytest.raises(ConfigError):
                await owner.stream(prompt, SHORT).__anext__()
        with pytest.raises(ConfigError, match="n asks"):
            owner.stream("x", SamplingParams(n=2))
        assert (await good).num_tokens > 0

    run(main())


def test_a_failing_mask_is_its_own_requests_failure(owner: AsyncLLM) -> None:
    def broken(_: object) -> Any:
        raise ValueError("no mask")

    async def main() -> None:
        good = asyncio.create_task(read(owner, 1))
        with pytest.raises(Exception, match="no mask"):
            async for _ in owner.stream("x", SHORT, allowed=broken):
                pass
        assert (await good).num_tokens > 0

    run(main())


def test_closing_tells_readers(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as owner:
            stream = owner.stream(PROMPTS[0], LONG)
            await stream.__anext__()
            waiting = asyncio.create_task(owner.generate([PROMPTS[1]], LONG))
            await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises((ConfigError, RuntimeError)):
            await waiting
        with pytest.raises(ConfigError, match="closed"):
            owner.engine.add(AsyncRequest(asyncio.get_running_loop(), [1], LONG))

    run(main())
    assert not llm.has_work


def test_no_more_wait_than_may(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(llm, max_queued=1) as owner:
            with pytest.raises(QueueFullError):
                await asyncio.gather(*(owner.generate(PROMPTS, LONG) for _ in range(4)))

    run(main())


def test_requests_that_were_left_keep_nobody_out(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(llm, max_queued=1) as owner:
            for _ in range(20):
                left = AsyncRequest(asyncio.get_running_loop(), [1], LONG)
                owner.engine.add(left)
                owner.engine.leave(left)
                owner.engine.leave(left)
            (result,) = await owner.generate(PROMPTS[0], LONG)
            assert result.text

    run(main())


def test_a_slow_reader_finds_larger_pieces(llm: LLM, owner: AsyncLLM) -> None:
    async def main() -> tuple[int, str]:
        stream = owner.stream(PROMPTS[0], LONG)
        first = await stream.__anext__()
        while not stream._request or not stream._request.ended:  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0.01)
        events = [first, *[event async for event in stream]]
        return len(events), "".join(event.text for event in events)

    num_events, text = run(main())
    assert num_events <= MOST_EVENTS + 1
    assert text == llm.generate(PROMPTS[0], LONG)[0].text


def test_merged_events_say_the_same() -> None:
    first = TextEvent((1, 2), ("accepted", "recovered"), ("a", "b"))
    merged = TextEvent.merged([first, TextEvent((), ("plain",), ("c",))])
    assert merged == TextEvent((1, 2), ("accepted", "recovered", "plain"), ("a", "b", "c"))


def test_two_event_loops_share_one(owner: AsyncLLM) -> None:
    found: list[GenerationResult] = []
    threads = [threading.Thread(target=lambda: found.append(run(read(owner, 3)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result.text for result in found}) == 1
    assert len(found) == 2


def test_a_draft_beside_a_loaded_llm_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="loaded"):
        AsyncLLM(llm, config=EngineConfig())
    with pytest.raises(ConfigError, match="loaded"):
        AsyncLLM(llm, draft="none")
    with pytest.raises(ConfigError, match="loaded"):
        AsyncLLM(llm, k=3)


def test_a_stream_that_is_cancelled_while_its_prompt_is_encoded_writes_nothing(
    llm: LLM, owner: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = llm.encode

    async def main() -> list[TextEvent]:
        def cancelled(prompt: str) -> list[int]:
            stream.cancel()
            return encode(prompt)

        monkeypatch.setattr(llm, "encode", cancelled)
        stream = owner.stream(PROMPTS[0], LONG)
        return [event async for event in stream]

    before = llm.counts.cancelled
    # A round may be under way before the engine hears of it.
    assert sum(len(event.token_ids) for event in run(main())) < 100
    assert llm.counts.cancelled - before <= 1


def test_whoever_asks_after_the_end_is_told(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as owner:
            assert repr(owner).startswith("<AsyncLLM outrider/embedded")
        with pytest.raises(ConfigError, match="closed"):
            await owner.generate("hi")

    run(main())
