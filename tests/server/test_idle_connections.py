"""Connections that send nothing: a server answers others however many there are."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from contextlib import closing

import pytest

from doubles.live_server import Client, answer_of, live_server
from doubles.scripted_port import ScriptedPort
from outrider.server import run
from outrider.server.access import Address, reserved

# More than a server holds whose bound is the length of its queue.
NUM_IDLE = 1_200
PATHS = (b"/health", b"/ready", b"/metrics", b"/v1/models", b"/")
_FILES = resource.RLIMIT_NOFILE


def allow(
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    change: Callable[[tuple[int, int]], None],
) -> None:
    """So many files, the soft and the hard limit; `change` hears of new ones."""

    def get(_: int) -> tuple[int, int]:
        return limits

    def set_to(_: int, both: tuple[int, int]) -> None:
        change(both)

    monkeypatch.setattr(resource, "getrlimit", get)
    monkeypatch.setattr(resource, "setrlimit", set_to)


class StartedPort(ScriptedPort):
    async def start(self) -> None:
        return


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.skipif(
    0 <= resource.getrlimit(_FILES)[1] < 4 * NUM_IDLE, reason="too few files are allowed here"
)
def test_idle_connections_shut_nobody_out() -> None:
    async def work(before: tuple[int, int]) -> None:
        try:
            async with live_server(StartedPort()) as live:
                idle = [socket.socket() for _ in range(NUM_IDLE)]
                for one in idle:
                    one.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", live.number))
                for _ in range(5):
                    client = await Client.connected(live.number)
                    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
                    await client.send(head)
                    # Idle ones are closed after ten seconds: then it is no feat.
                    answer = await asyncio.wait_for(client.rest(), 5)
                    assert answer_of(answer)[0] == 200
                    client.leave()
                assert len(idle) == NUM_IDLE
                for one in idle:
                    one.close()
        finally:
            resource.setrlimit(_FILES, before)

    asyncio.run(work(resource.getrlimit(_FILES)))


@pytest.mark.parametrize(
    ("soft", "hard", "most", "asked_for"),
    [
        (1024, 20_000, 16_384, 16_640),
        (1024, 1024, 768, None),
        (1024, -1, 16_384, 16_640),
        (-1, -1, 16_384, None),
        (65_536, 65_536, 16_384, None),
        (64, 128, 64, 128),
        (20_000, 30_000, 16_384, None),
    ],
)
def test_as_many_connections_are_held_as_files_are_allowed(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, most: int, asked_for: int | None
) -> None:
    changed: list[tuple[int, int]] = []
    allow(monkeypatch, (soft, hard), changed.append)
    assert run.most_connections() == most
    assert changed == ([] if asked_for is None else [(asked_for, hard)])


def test_a_limit_that_may_not_be_raised_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    allow(monkeypatch, (1024, 4096), refuse)
    assert run.most_connections() == 768


@pytest.mark.wide
def test_health_has_connections_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port whose connections are all taken, and the one that a supervisor asks."""
    most = 8

    def few() -> int:
        return most

    async def answered(number: int, path: bytes) -> int:
        client = await Client.connected(number)
        await client.send(b"GET %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % path)
        status = answer_of(await client.rest())[0]
        client.leave()
        return status

    async def work() -> None:
        health, held = reserved(Address(port=0))
        with closing(held):
            async with live_server(StartedPort(), health_port=health.port) as live:
                idle = [await Client.connected(live.number) for _ in range(most)]
                late = asyncio.create_task(answered(live.number, b"/health"))
                found = [await answered(health.port, path) for path in PATHS]
                assert found == [200, 200, 200, 404, 404]
                assert not late.done()
                for one in idle:
                    one.leave()
                assert await late == 200

    monkeypatch.setattr(run, "most_connections", few)
    asyncio.run(work())
