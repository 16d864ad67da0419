"""A port whose processes come and go: what is asked again, what counts, and who is kept out."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from unittest.mock import create_autospec

import pytest

from doubles.clocks import FakeClock
from doubles.scripted_child import ScriptedChild, scripted_children
from doubles.scripted_port import ScriptedPort
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, MachineError, QueueFullError
from outrider.core.params import SamplingParams
from outrider.server import calls as resumed
from outrider.server import engine_child as restarts
from outrider.server import engine_process
from outrider.server.calls import LONG_BYTES, KeptOutError, ProcessStream
from outrider.server.engine_child import EngineChild
from outrider.server.engine_process import try_out
from outrider.server.errors import api_error
from outrider.server.port import EngineLostError, EngineRequest, Load, frame
from outrider.server.process_port import MOST_PROMPTS, ProcessPort

Work = Callable[[ProcessPort, list[ScriptedChild]], Awaitable[None]]
PARAMS = SamplingParams(max_tokens=64)
LONG = "long " * LONG_BYTES


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    children = scripted_children(monkeypatch)

    def run(work: Work, *, hang_seconds: float = 1_000.0) -> None:
        async def main() -> None:
            port = ProcessPort(Load("m", None, EngineConfig(), 99), hang_seconds=hang_seconds)
            await port.start()
            try:
                await asyncio.wait_for(work(port, children), 60)
            finally:
                await port.aclose()

        asyncio.run(main())

    return run


async def settled() -> None:
    """All that may happen at once has happened."""
    for _ in range(20):
        await asyncio.sleep(0)


async def ended(children: list[ScriptedChild]) -> ScriptedChild:
    """The present process ends; the next one."""
    num = len(children)
    children[-1].kill()
    while len(children) == num:
        await asyncio.sleep(0.001)
    await settled()
    return children[-1]


def request(prompt: str = "ab", params: SamplingParams = PARAMS) -> EngineRequest:
    return EngineRequest(prompt_ids=[*map(ord, prompt)], params=params, structure={})


def asked(port: ProcessPort, prompt: str) -> asyncio.Task[list[int]]:
    return asyncio.ensure_future(port.encode(prompt))


async def read(stream: ProcessStream) -> str:
    return "".join([event.text async for event in stream])


def test_a_prompt_with_which_the_process_ends_twice_is_kept_out(run: Callable[..., None]) -> None:
    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        stream = port.stream(request())
        asking = {text: asked(port, text) for text in ("good", "bad", "fine")}
        await settled()
        child = await ended(children)
        # One by one, and no request before them.
        assert child.prompts == ["good"]
        assert not child.requests
        late = asked(port, "late")
        child.encoded("good")
        await settled()
        assert child.prompts == ["good", "bad"]
        child = await ended(children)
        with pytest.raises(KeptOutError):
            await asking["bad"]
        assert child.prompts == ["fine"]
        child.encoded("fine")
        await settled()
        assert child.prompts == ["fine", "late"]
        assert [one.number for one in child.requests] == [stream.number]
        child.encoded("late")
        assert [len(await one) for one in (asking["good"], asking["fine"], late)] == [4, 4, 4]
        with pytest.raises(KeptOutError):
            await port.encode("bad")
        assert port.status.num_restarts == 2

    run(work)


def test_who_leaves_and_asks_again_is_known(run: Callable[..., None]) -> None:
    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        for _ in range(2):
            asking = asked(port, "bad")
            await settled()
            asking.cancel()
            await ended(children)
        with pytest.raises(KeptOutError):
            await port.encode("bad")
        # The same of a request.
        for _ in range(2):
            stream = port.stream(request("xy"))
            stream.cancel()
            await ended(children)
        with pytest.raises(KeptOutError):
            port.stream(request("xy"))

    run(work)


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(restarts, "MOST_STARTS", 1_000)


@pytest.mark.parametrize("by", ["requests", "prompts", "drawn"])
@pytest.mark.usefixtures("without_pauses")
def test_what_ends_the_engine_does_not_end_the_server(run: Callable[..., None], by: str) -> None:
    """More requests than an engine has ends of its own, each of which ends it twice, or once where
    it cannot go on."""

    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        for number in range(restarts.MOST_ENDS + 2):
            name = f"number {number}"
            if by == "drawn":
                drawn = SamplingParams(max_tokens=64, temperature=1.0, sampler="block")
                for error in (EngineLostError, KeptOutError):
                    stream = port.stream(request(name, drawn))
                    children[-1].wrote(children[-1].requests[-1], "some")
                    await settled()
                    await ended(children)
                    with pytest.raises(error):
                        await read(stream)
                with pytest.raises(KeptOutError):
                    port.stream(request(name, drawn))
                continue
            going = port.stream(request(name)) if by == "requests" else asked(port, name)
            await settled()
            for _ in range(2):
                await ended(children)
            with pytest.raises(KeptOutError):
                await (going if isinstance(going, asyncio.Task) else read(going))
        num = 2 * (restarts.MOST_ENDS + 2)
        assert (port.status.state, port.status.num_restarts) == ("ready", num)
        # Ends of an engine in which nothing ran do count.
        for _ in range(restarts.MOST_ENDS):
            await ended(children)
        children[-1].kill()
        while port.status.state != "failed":
            await asyncio.sleep(0.001)

    run(work)


@pytest.mark.usefixtures("without_pauses")
def test_starts_that_come_to_no_engine_give_it_up(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []

    async def started(load: Load, **_: object) -> ScriptedChild:
        tried.append(load.is_tried)
        raise MachineError("the engine fails at its first text.")

    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        stream = port.stream(request())
        monkeypatch.setattr(EngineChild, "started", started)
        children[-1].kill()
        with pytest.raises(EngineLostError, match="again after each restart"):
            await read(stream)
        assert (port.status.state, tried) == ("failed", [True] * (restarts.MOST_ENDS + 1))

    run(work)


def test_an_engine_that_is_started_again_writes_a_text_first() -> None:
    port = ScriptedPort()
    asyncio.run(try_out(port))
    assert [one.params.max_tokens for one in port.requests] == [4]
    asyncio.run(try_out(ScriptedPort(error=ConfigError("it wants a prediction."))))
    with pytest.raises(RuntimeError):
        asyncio.run(try_out(ScriptedPort(error=RuntimeError("it breaks"))))
    port.state = "failed"
    with pytest.raises(MachineError, match="first text"):
        asyncio.run(try_out(port))


@pytest.mark.usefixtures("without_pauses")
def test_who_is_in_company_when_the_engine_ends_is_not_kept_out_as_soon(
    run: Callable[..., None],
) -> None:
    """It wrote before each end, and others were there."""

    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        stream = port.stream(request("good"))
        for number in range(11):
            child = children[-1]
            child.wrote(next(one for one in child.requests if one.number == stream.number), "a")
            await settled()
            other = port.stream(request(f"other {number}"))
            assert [one.number for one in children[-1].requests][-1] == other.number
            child = await ended(children)
            child.wrote(child.requests[0], "b")
            await settled()
            child.wrote(child.requests[1], "c", ends=True)
            assert await read(other) == "c"
        assert not stream.ended

    run(work)


def test_a_prompt_that_hangs_twice_is_kept_out(run: Callable[..., None]) -> None:
    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        with pytest.raises(EngineLostError, match="was not encoded"):
            await port.encode("bad")
        assert children[0].was_aborted
        for _ in range(2):
            while port.status.state != "ready":
                await asyncio.sleep(0.001)
            with pytest.raises(KeptOutError):
                await port.encode("bad")
            await settled()
        assert port.status.num_restarts == 2

    run(work, hang_seconds=0.01)


def test_a_flood_of_long_prompts_keeps_no_short_one_waiting(run: Callable[..., None]) -> None:
    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        asking = [asked(port, f"{number} {LONG}") for number in range(MOST_PROMPTS - 2)]
        await settled()
        assert len(children[0].prompts) == 1
        short = [asked(port, text) for text in ("a", "b")]
        await settled()
        assert children[0].prompts[1:] == ["a", "b"]
        with pytest.raises(QueueFullError):
            await port.encode("c")
        children[0].encoded("a")
        assert await short[0] == [ord("a")]
        # A place is free again, and whoever leaves gives up another.
        more = [asked(port, "c")]
        await settled()
        with pytest.raises(QueueFullError):
            await port.encode("d")
        asking[-1].cancel()
        await settled()
        more.append(asked(port, "d"))
        await settled()
        assert children[0].prompts[3:] == ["c", "d"]
        for one in (*asking, *short, *more):
            one.cancel()

    run(work)


def test_prompts_of_clients_that_left_are_encoded_few_at_a_time(run: Callable[..., None]) -> None:
    """A process goes on encoding them, so they still count."""

    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        for number in range(20):
            asking = asked(port, f"number {number}")
            await settled()
            asking.cancel()
            await settled()
        assert len(children[0].prompts) == 8
        children[0].encoded("number 0")
        last = asked(port, "last")
        await settled()
        assert children[0].prompts[8:] == ["last"]
        children[0].encoded("last")
        assert len(await last) == 4

    run(work)


def test_a_request_that_cannot_be_sent_ends_alone(run: Callable[..., None]) -> None:
    """It waits for the engine's restart, so its caller is not there when it is sent."""

    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        children[-1].kill()
        while port.status.state == "ready":
            await asyncio.sleep(0)
        beyond = {"schema": {"type": "integer", "maximum": 2**70}}
        huge = port.stream(EngineRequest(prompt_ids=[1], params=PARAMS, structure=beyond))
        other = port.stream(request())
        assert len(children) == 1
        while len(children) == 1:
            await asyncio.sleep(0)
        await settled()
        with pytest.raises(OverflowError):
            await read(huge)
        children[-1].wrote(children[-1].requests[-1], "end", ends=True)
        assert await read(other) == "end"

    run(work)


def test_the_time_of_a_request_is_that_of_all_its_processes(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(resumed, "monotonic", clock)

    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        stream = port.stream(request(params=SamplingParams(max_tokens=64, max_time=10.0)))
        assert children[0].requests[0].request.params.max_time == 10.0
        children[0].wrote(children[0].requests[0], "one")
        await settled()
        clock.advance(4)
        child = await ended(children)
        assert child.requests[0].request.params.max_time == 6.0
        clock.advance(7)
        child = await ended(children)
        assert 0 < child.requests[0].request.params.max_time < 1e-3
        child.wrote(child.requests[0], "!", ends=True)
        assert await read(stream) == "one!"
        assert stream.result.stats.seconds["total"] == 11.5

    run(work)


def test_the_figures_of_a_request_are_of_all_its_processes(run: Callable[..., None]) -> None:
    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        whole, broken = (port.stream(request(prompt)) for prompt in ("abc", "abd"))
        for rounds in (["one", "two!"], ["a"], ["bc"]):
            for each in children[-1].requests:
                children[-1].wrote(each, *rounds)
            await settled()
            # What it had written beyond that is written anew, and counted once.
            if children[-1] is children[0]:
                children[0].wrote(children[0].requests[0], "a", "bc", ends=True)
                await settled()
            if rounds != ["bc"]:
                await ended(children)
        children[-1].wrote(children[-1].requests[0], "end", ends=True)
        assert await read(whole) == "onetwo!abc"
        assert await read(broken) == "onetwo!abcend"
        stats = broken.result.stats
        assert stats.acceptance_histogram == (1, 1, 2, 1)
        assert stats.num_emitted == stats.num_accepted + stats.num_rounds == len("onetwo!abcend")
        assert stats.num_drafted == 15
        assert len(broken.result.token_seconds) == broken.result.num_tokens
        assert whole.result.stats.acceptance_histogram == (1, 1, 1, 1)

    run(work)


def test_many_rounds_are_added_up_as_few_are(run: Callable[..., None]) -> None:
    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        stream = port.stream(request())
        reading = asyncio.ensure_future(read(stream))
        for _ in range(3):
            child = children[-1]
            child.wrote(child.requests[0], *["ab", "c", "defg"] * 100)
            await settled()
            await ended(children)
        children[-1].wrote(children[-1].requests[0], "end", ends=True)
        assert len(await reading) == 2103
        assert stream.result.stats.acceptance_histogram == (300, 300, 1, 300)

    run(work)


def test_a_request_that_comes_to_its_end_is_blamed_no_more(run: Callable[..., None]) -> None:
    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        for _ in range(3):
            stream = port.stream(request())
            child = await ended(children)
            child.wrote(child.requests[0], "end", ends=True)
            assert await read(stream) == "end"

    run(work)


@pytest.mark.usefixtures("without_pauses")
def test_who_asks_again_while_others_end_the_engine_is_not_kept_out(
    run: Callable[..., None],
) -> None:
    """It was in flight, and had written nothing, both times; in between it wrote something."""

    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        params = SamplingParams(max_tokens=64, temperature=1.0)
        for _ in range(3):
            streams = [port.stream(request(params=params)) for _ in range(2)]
            child = children[-1]
            child.wrote(child.requests[-2], "some")
            await settled()
            child = await ended(children)
            with pytest.raises(EngineLostError):
                await read(streams[0])
            child.wrote(child.requests[0], "some")
            await settled()
            other = port.stream(request("other"))
            child = await ended(children)
            with pytest.raises(EngineLostError):
                await read(streams[1])
            child.wrote(child.requests[0], "end", ends=True)
            assert await read(other) == "end"

    run(work)


def test_no_prompt_comes_while_a_request_is_tried(run: Callable[..., None]) -> None:
    """It may end the engine, and the request would be blamed."""

    async def work(port: ProcessPort, children: list[ScriptedChild]) -> None:
        stream = port.stream(request())
        child = await ended(children)
        assert [one.number for one in child.requests] == [stream.number]
        asking = asked(port, "ab")
        await settled()
        assert not child.prompts
        child.wrote(child.requests[0], "some")
        await settled()
        assert child.prompts == ["ab"]
        child.encoded("ab")
        assert len(await asking) == 2

    run(work)


def test_a_server_that_ends_is_no_mistake_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted_children(monkeypatch)

    async def main() -> list[int]:
        port = ProcessPort(Load("m", None, EngineConfig(), 99))
        await port.start()
        stream, asking = port.stream(request()), asked(port, "ab")
        await settled()
        await port.aclose()
        found = await asyncio.gather(read(stream), asking, return_exceptions=True)
        return [api_error(one).status for one in found if isinstance(one, Exception)]

    assert asyncio.run(main()) == [503, 503]


class StartedPort(ScriptedPort):
    """As the port of an engine's own process."""

    job_seconds = 0.0

    async def start(self) -> None:
        """There is nothing to load."""


def test_an_engine_that_is_ready_keeps_its_model_out_of_garbage_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection of all of torch's objects would hold up every stream."""
    ours = [object()]
    port = StartedPort()

    def made(load: Load) -> StartedPort:
        assert load.model == "m"
        return port

    monkeypatch.setattr(engine_process, "_port", made)

    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(frame(Load("m", None, EngineConfig(), 99)))
        reader.feed_eof()
        writer = create_autospec(asyncio.StreamWriter, instance=True)
        with pytest.raises(EOFError):
            await engine_process.EngineProcess(reader, writer).run()

    assert any(found is ours for found in gc.get_objects())
    asyncio.run(main())
    # They stay out of them: among them are thousands of collected tests.
    assert not any(found is ours for found in gc.get_objects())
