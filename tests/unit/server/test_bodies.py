"""Bodies on their way in: each in a slot of its request, and in memory that is bounded."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from starlette.types import Message, Receive, Scope, Send

from doubles.asgi_client import Client, Got
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import app_of, run, site_with
from outrider.server import site as sites
from outrider.server.errors import ApiError
from outrider.server.reply import FREE_BYTES
from outrider.server.site import Bodies, Limits

PATH = "/v1/completions"
MIB = 1 << 20


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Held:
    """A body that is held until it is let go."""

    def __init__(self, bodies: Bodies, key: str, num_bytes: int, seconds: float = 10) -> None:
        self._args = bodies, key, num_bytes, seconds
        self.end = asyncio.Event()
        self.has_begun = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        bodies, key, num_bytes, seconds = self._args
        async with bodies.hold(key, num_bytes, seconds):
            self.has_begun = True
            await self.end.wait()

    async def let_go(self) -> None:
        self.end.set()
        await settle()


def test_bodies_wait_for_memory_and_get_it_in_their_order() -> None:
    async def work() -> None:
        bodies = Bodies(most=10)
        held = [Held(bodies, "", num) for num in (6, 4, 5, 5, 1)]
        await settle()
        assert [one.has_begun for one in held] == [True, True, False, False, False]
        await held[1].let_go()
        # Four are free: the last one fits, those before it do not.
        assert [one.has_begun for one in held] == [True, True, False, False, True]
        await held[0].let_go()
        assert [one.has_begun for one in held] == [True, True, True, False, True]
        for one in held:
            await one.let_go()
        assert held[3].has_begun
        assert not bodies.taken

    run(work())


def test_one_key_has_half_of_the_memory() -> None:
    async def work() -> None:
        bodies = Bodies(most=10)
        held = [Held(bodies, key, 5) for key in ("a", "a", "b")]
        await settle()
        assert [one.has_begun for one in held] == [True, False, True]
        await held[2].let_go()
        assert not held[1].has_begun
        await held[0].let_go()
        assert held[1].has_begun
        await held[1].let_go()

    run(work())


def test_who_waited_too_long_or_left_holds_nothing() -> None:
    async def work() -> None:
        bodies = Bodies(most=10)
        first = Held(bodies, "", 10)
        late, leaving, last = Held(bodies, "", 10, 0.01), Held(bodies, "", 10), Held(bodies, "", 10)
        with pytest.raises(ApiError) as raised:
            await late.task
        assert (raised.value.status, raised.value.retry_after) == (503, 1)
        # One leaves at the very moment at which it gets its turn.
        first.end.set()
        while not bodies.taken or not first.task.done():
            await asyncio.sleep(0)
        leaving.task.cancel()
        with suppress(asyncio.CancelledError):
            await leaving.task
        await settle()
        assert last.has_begun
        await last.let_go()
        assert not bodies.taken

    run(work())


def test_memory_is_given_back_once_much_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> int:
        given: list[None] = []
        monkeypatch.setattr(sites, "give_back", lambda: given.append(None))
        monkeypatch.setattr(sites, "_FREED_SECONDS", 0.0)
        bodies = Bodies(most=100)
        for _ in range(12):
            async with bodies.hold("", 10, 1):
                pass
        while not given:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        return len(given)

    assert run(work()) == 2


def test_no_more_bodies_are_read_at_once_than_there_is_memory_for() -> None:
    """Whether they say how long they are or not. Short ones pass all of them."""

    async def work() -> list[Got]:
        site = site_with(ScriptedPort(), Limits(body_seconds=5))
        site.traffic.bodies.most = 8 * MIB
        app = app_of(site)
        begin = b'{"prompt": "' + b"a" * (FREE_BYTES + 1)
        clients = [Client(app) for _ in range(5)]
        told = {"content-length": str(4 * MIB)}
        tasks = [
            asyncio.create_task(
                client.ask(PATH, pieces=(begin, None), headers=told if i % 2 else {})
            )
            for i, client in enumerate(clients)
        ]
        await settle()
        assert site.traffic.bodies.taken.total() == 8 * MIB
        assert site.traffic.num_running == 5
        got = await Client(app).ask(PATH, {"prompt": "ab"})
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not site.traffic.bodies.taken
        assert not site.traffic.num_running
        return [got]

    assert run(work())[0].status == 200


def test_a_body_without_memory_or_slot_is_refused_and_its_rest_dropped() -> None:
    async def work() -> None:
        site = site_with(ScriptedPort(), Limits(body_seconds=0.05, most_running=1))
        app = app_of(site)
        head = {"content-length": str(2 * MIB)}
        pieces = [b'{"prompt": "', b"a" * MIB, b"a" * (MIB - 14), b'"}']
        async with site.body("", site.traffic.bodies.most):
            got = await Client(app).ask(PATH, pieces=pieces, headers=head)
        error = got.json()["error"]
        assert (got.status, error["code"], got.headers["retry-after"]) == (503, "overloaded", "1")
        with site.slot(""):
            got = await Client(app).ask(PATH, pieces=pieces, headers=head)
        assert (got.status, got.json()["error"]["code"]) == (503, "overloaded")
        assert (await Client(app).ask(PATH, {"prompt": "ab"})).status == 200

    run(work())


def test_a_request_whose_body_was_read_keeps_its_slot() -> None:
    """Though the server is full by then, with requests of a key that had less than its share."""

    async def work() -> int:
        site = site_with(ScriptedPort(), Limits(most_running=2))
        app, slots = app_of(site), site.traffic.admission
        come = asyncio.Event()

        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            async def late() -> Message:
                await come.wait()
                return await receive()

            await app(scope, late, send)

        client = Client(gated)
        with slots.slot("", 9, 9):
            asked = asyncio.create_task(client.ask(PATH, {"prompt": "ab"}))
            await settle()
            with slots.slot("other", 9, 9):
                come.set()
                return (await asked).status

    assert run(work()) == 200


def test_a_body_that_waited_has_all_its_time_to_come() -> None:
    async def work() -> float:
        site = site_with(ScriptedPort(), Limits(body_seconds=0.1))
        client, loop = Client(app_of(site)), asyncio.get_running_loop()
        head = {"content-length": str(FREE_BYTES + 1)}
        body = b'{"prompt": "ab"}'
        async with site.body("", site.traffic.bodies.most):
            asked = asyncio.create_task(client.ask(PATH, pieces=[body[:5], None], headers=head))
            await asyncio.sleep(0.05)
        began = loop.time()
        assert (await asked).status == 408
        return loop.time() - began

    assert run(work()) >= 0.1
