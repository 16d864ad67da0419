"""Requests that go on at another engine: when one dies, when it is replaced, and where they may."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import pytest

from doubles.scripted_child import ScriptedChild, scripted_children
from doubles.scripted_port import CARD
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.plugins.replicas import ReplicasPort, replace_on_hangup
from outrider.server.calls import KeptOutError, ProcessStream
from outrider.server.engine_child import EngineChild
from outrider.server.port import (
    Cancel,
    EngineCard,
    EngineLostError,
    EngineRequest,
    Load,
    NotReadyError,
)
from outrider.server.process_port import ProcessPort

Work = Callable[[ReplicasPort, list[ScriptedChild]], Awaitable[None]]
Run = Callable[..., None]
GREEDY = SamplingParams(max_tokens=64)
DRAWN = SamplingParams(max_tokens=64, temperature=1.0, seed=3, sampler="block")
THIS = msgspec.structs.replace(CARD, numerics="one CPU")
OTHER = msgspec.structs.replace(CARD, numerics="another CPU")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Two engines with these cards, the first child and the second one."""
    children = scripted_children(monkeypatch)

    def run(work: Work, *cards: EngineCard) -> None:
        async def main() -> None:
            ports = [ProcessPort(Load("m", None, EngineConfig(), 99)) for _ in range(2)]
            port = ReplicasPort(ports)
            for number, card in enumerate(cards or (THIS, THIS)):
                monkeypatch.setattr(ScriptedChild, "card", card)
                await ports[number].start()
            monkeypatch.setattr(ScriptedChild, "card", (cards or (THIS,))[0])
            try:
                await asyncio.wait_for(work(port, children), 60)
            finally:
                await port.aclose()

        asyncio.run(main())

    return run


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def restarted(port: ReplicasPort, children: list[ScriptedChild], number: int) -> None:
    num = len(children)
    while len(children) == num or port.status.engines[number].state != "ready":
        await asyncio.sleep(0.001)
    await settled()


def asked(port: ReplicasPort, prompt: str, params: SamplingParams = GREEDY) -> ProcessStream:
    ids = [*map(ord, prompt)]
    return port.stream(EngineRequest(prompt_ids=ids, params=params, structure={}))


async def read(stream: ProcessStream) -> str:
    return "".join([event.text async for event in stream])


def test_what_had_begun_goes_on_at_another_engine_at_once(run: Run) -> None:
    async def work(port: ReplicasPort, children: list[ScriptedChild]) -> None:
        first, second = children
        begun, _ = asked(port, "a"), asked(port, "b")
        assert [begun.engine, _.engine] == [0, 1]
        first.wrote(first.requests[0], "Hel")
        await settled()
        first.kill()
        while begun.engine == 0:
            await asyncio.sleep(0)
        await settled()
        assert second.requests[-1].request.written == [*map(ord, "Hel")]
        second.wrote(second.requests[-1], "lo", ends=True)
        assert await read(begun) == "Hello"
        assert begun.result.text == "Hello"

    run(work)


def test_engines_of_other_numerics_do_not_go_on_with_a_text(run: Run) -> None:
    async def work(port: ReplicasPort, children: list[ScriptedChild]) -> None:
        assert "numerics differ" in port.card.notes[-1]
        begun, fresh = asked(port, "a"), asked(port, "b")
        children[0].wrote(children[0].requests[0], "Hel")
        await settled()
        children[0].kill()
        await restarted(port, children, 0)
        # It waits for its own engine, which begins with the same card.
        assert begun.engine == 0
        again = children[-1]
        assert again.requests[-1].request.written == [*map(ord, "Hel")]
        again.wrote(again.requests[-1], "lo", ends=True)
        assert await read(begun) == "Hello"
        # What has no text yet may go anywhere, but ended the engine perhaps: that waits as well.
        assert fresh.engine == 1

    run(work, THIS, OTHER)


def test_a_text_ends_with_one_error_where_no_engine_would_write_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(port: ReplicasPort, children: list[ScriptedChild]) -> None:
        begun = asked(port, "a")
        children[0].wrote(children[0].requests[0], "Hel")
        await settled()
        third = msgspec.structs.replace(THIS, numerics="a third CPU")
        monkeypatch.setattr(ScriptedChild, "card", third)
        children[0].kill()
        await restarted(port, children, 0)
        assert (await anext(begun)).text == "Hel"
        with pytest.raises(EngineLostError, match="would write another text"):
            await anext(begun)
        assert begun.ended
        assert not children[-1].requests
        # Others are none the worse.
        later = asked(port, "z")
        assert later.engine == 0
        children[-1].wrote(children[-1].requests[0], "new", ends=True)
        assert await read(later) == "new"

    run(work, THIS, OTHER)


def test_an_engine_is_replaced_and_no_text_is_cut(run: Run) -> None:
    async def work(port: ReplicasPort, children: list[ScriptedChild]) -> None:
        old = children[0]
        greedy, busy, drawn, _, fresh = (
            asked(port, "a"),
            asked(port, "b"),
            asked(port, "c", DRAWN),
            asked(port, "d"),
            asked(port, "e", DRAWN),
        )
        assert [one.engine for one in (greedy, drawn, fresh)] == [0, 0, 0]
        for one, text in zip(old.requests, ("Hel", "Th"), strict=False):
            old.wrote(one, text)
        await settled()
        replacing = asyncio.ensure_future(port.replace(0, seconds=60))
        await settled()
        # By place or not begun: elsewhere. Drawn as it came: to its end where it is.
        assert [one.engine for one in (greedy, drawn, fresh)] == [1, 0, 1]
        assert len(old.asked(Cancel)) == 2
        assert [asked(port, "f").engine, asked(port, "g").engine] == [1, 1]
        # What the old one writes of them now is not told twice.
        old.wrote(old.requests[0], "never")
        moved = {bytes(one.request.prompt_ids): one for one in children[1].requests}
        children[1].wrote(moved[b"a"], "lo", ends=True)
        children[1].wrote(moved[b"e"], "whole", ends=True)
        assert await read(greedy) == "Hello"
        assert await read(fresh) == "whole"
        assert not replacing.done()
        old.wrote(old.requests[1], "ere", ends=True)
        assert await read(drawn) == "There"
        await replacing
        assert [one.state for one in port.status.engines] == ["ready", "ready"]
        assert [one.num_restarts for one in port.status.engines] == [0, 0]
        assert asked(port, "h").engine == 0
        assert busy.engine == 1

    run(work)


def test_what_does_not_end_in_time_is_told(run: Run) -> None:
    async def work(port: ReplicasPort, children: list[ScriptedChild]) -> None:
        drawn = asked(port, "c", DRAWN)
        children[0].wrote(children[0].requests[0], "Th")
        await settled()
        await port.replace(0, seconds=0)
        assert (await anext(drawn)).text == "Th"
        with pytest.raises(EngineLostError):
            await anext(drawn)

    run(work)


def test_the_server_is_ready_once_all_engines_were(monkeypatch: pytest.MonkeyPatch) -> None:
    children = scripted_children(monkeypatch)
    may_start = asyncio.Event()
    start = EngineChild.started

    async def started(load: Load, **seconds: float) -> object:
        if children:
            await may_start.wait()
        return await start(load, **seconds)

    monkeypatch.setattr(EngineChild, "started", started)

    async def work() -> None:
        port = ReplicasPort([ProcessPort(Load("m", None, EngineConfig(), 99)) for _ in range(2)])
        starting = asyncio.ensure_future(port.start())
        while port.status.engines[0].state != "ready":
            await asyncio.sleep(0)
        assert port.status.state == "loading"
        with pytest.raises(NotReadyError):
            await port.replace(0, seconds=1)
        may_start.set()
        await starting
        assert port.status.state == "ready"
        await port.aclose()

    asyncio.run(work())


def test_the_server_is_ready_while_an_engine_is(run: Run) -> None:
    async def work(port: ReplicasPort, children: list[ScriptedChild]) -> None:
        children[0].kill()
        while port.status.engines[0].state == "ready":
            await asyncio.sleep(0)
        assert port.status.state == "ready"
        children[1].kill()
        await restarted(port, children, 0)
        assert port.status.state == "ready"

    run(work)


def test_a_hang_up_replaces_each_engine_in_turn(run: Run) -> None:
    async def work(port: ReplicasPort, children: list[ScriptedChild]) -> None:
        keeper = asyncio.ensure_future(replace_on_hangup([port], seconds=5))
        await settled()
        os.kill(os.getpid(), signal.SIGHUP)
        while len(children) < 4 or port.status.engines[1].state != "ready":
            await asyncio.sleep(0.001)
            assert "ready" in {one.state for one in port.status.engines}
        keeper.cancel()
        with suppress(asyncio.CancelledError):
            await keeper

    run(work)


def test_what_ends_one_engine_and_the_next_is_not_tried_for_ever(run: Run) -> None:
    """It writes something each time, so it is blamed little, but by both engines."""

    async def work(port: ReplicasPort, children: list[ScriptedChild]) -> None:
        bad = asked(port, "a")
        present = {0: children[0], 1: children[1]}
        for _ in range(6):
            assert not bad.ended
            number = bad.engine
            assert number is not None
            child = present[number]
            child.wrote(child.requests[-1], "x")
            await settled()
            num = len(children)
            child.kill()
            while len(children) == num:
                await asyncio.sleep(0.001)
            present[number] = children[-1]
            await settled()
        with pytest.raises(KeptOutError):
            await read(bad)
        with pytest.raises(KeptOutError):
            asked(port, "a")
        assert max(one.num_restarts for one in port.status.engines) <= 3

    run(work)


def test_who_leaves_while_it_waits_for_a_restart_is_not_moved(run: Run) -> None:
    async def work(port: ReplicasPort, children: list[ScriptedChild]) -> None:
        bad, _, waiting = asked(port, "a"), asked(port, "b"), asked(port, "c")
        assert [bad.engine, waiting.engine] == [0, 0]
        children[0].kill()
        await restarted(port, children, 0)
        # The first one is tried alone, and the other waits.
        assert [one.request.prompt_ids for one in children[-1].requests] == [[ord("a")]]
        waiting.cancel()
        children[-1].kill()
        await restarted(port, children, 0)
        with pytest.raises(KeptOutError):
            await read(bad)
        with pytest.raises(ConfigError, match="cancelled"):
            await read(waiting)
        assert [one.num_in_flight for one in port.replicas] == [0, 1]

    run(work)


@pytest.mark.parametrize("changed", [{"model": "another"}, {"facts": {"device": "cuda:0"}}])
def test_engines_of_other_models_or_devices_are_no_replicas(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, object]
) -> None:
    children = scripted_children(monkeypatch)
    other = msgspec.structs.replace(CARD, **changed)
    monkeypatch.setattr(
        ScriptedChild, "card", property(lambda child: CARD if child is children[0] else other)
    )
    ports = [ProcessPort(Load("m", None, EngineConfig(), 99)) for _ in range(2)]
    with pytest.raises(ConfigError, match=next(iter(changed)) if "model" in changed else "device"):
        asyncio.run(ReplicasPort(ports).start())
    assert [port.status.state for port in ports] == ["closed", "closed"]
