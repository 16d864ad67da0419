"""A bad network between a client and the server: what arrives is valid, or breaks off as a network
does; nobody hangs, the server stays alive and holds nothing for those who are gone."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

import pytest

from doubles.chaos_proxy import ChaosProxy, Fault, chaos_proxy
from doubles.live_server import Client, Live, answer_of, live_server, request_of, until
from doubles.scripted_port import ScriptedPort
from outrider.server.port import EngineRequest
from outrider.server.site import Limits

pytestmark = [pytest.mark.wide, pytest.mark.slow]

SHORT = tuple(f"piece {number} " for number in range(6))
LONG = SHORT * 20_000
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 99},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": CHAT | {"max_tokens": 99},
}
# What each API's stream ends with.
LAST = {
    "/v1/completions": b"data: [DONE]",
    "/v1/chat/completions": b"data: [DONE]",
    "/v1/responses": b"response.completed",
    "/v1/messages": b"message_stop",
}
ASKED = [(path, stream) for path in BODIES for stream in (False, True)]
_BEGIN = b"HTTP/1.1 200 OK\r\n"
_TEXT = re.compile(rb'"(?:text|content|delta)": ?"([^"]*)"')


class LivePort(ScriptedPort):
    """Scripted, for a server that starts its port."""

    def __init__(self, rounds: tuple[str, ...]) -> None:
        def answer(_: EngineRequest) -> tuple[str, ...]:
            return rounds

        super().__init__(answer)

    async def start(self) -> None:
        return


@dataclass(frozen=True)
class Network:
    """A server, and a client of it behind a bad network."""

    port: LivePort
    live: Live
    proxy: ChaosProxy

    async def ask(self, request: bytes, fault: Fault) -> bytes:
        """All that arrives."""
        self.proxy.fault = fault
        client = await Client.connected(self.proxy.number)
        found = b""
        try:
            await client.send(request)
            while piece := await client.piece():
                found += piece
        except ConnectionError:
            pass
        finally:
            client.leave()
        return found

    async def holds_nothing(self) -> None:
        """Nothing is left of those who are gone, and who comes is answered."""
        await until(lambda: not self.live.num_places)
        await until(lambda: all(stream.is_over for stream in self.port.streams))
        client = await self.live.ask("/tokenize", {"prompt": "x"})
        assert b" 200 " in await client.rest()
        client.leave()


def behind(
    rounds: tuple[str, ...],
    work: Callable[[Network], Awaitable[None]],
    limits: Limits | None = None,
) -> None:
    async def run() -> None:
        port = LivePort(rounds)
        async with live_server(port, limits) as live, chaos_proxy(live.number) as proxy:
            await work(Network(port, live, proxy))

    asyncio.run(run())


def request(path: str, stream: bool) -> bytes:
    return request_of(path, BODIES[path] | {"stream": stream, "temperature": 0})


def text_of(body: bytes, *, stream: bool) -> bytes:
    """Of an answer, or of the events of one that breaks off. Fails for what is no JSON."""
    if not stream:
        json.loads(body)
    for line in body.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            json.loads(line.removeprefix(b"data: "))
    # Responses say their text again when it ends.
    whole = re.split(rb"event: response\.output_text\.done", body)[0]
    return b"".join(_TEXT.findall(whole))


def check_whole(path: str, stream: bool, data: bytes) -> None:
    status, _, body = answer_of(data)
    assert status == 200, body
    assert "".join(SHORT).encode() in text_of(body, stream=stream)
    assert not stream or LAST[path] in body


def check_begun(path: str, data: bytes) -> None:
    """What arrived of a stream that is so long that it cannot have ended."""
    with pytest.raises(HTTPException):
        answer_of(data)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head[: len(_BEGIN)] == _BEGIN[: len(head)]
    events = body[: body.rfind(b"\n\n") + 2] if b"\n\n" in body else b""
    assert "".join(LONG).encode().startswith(text_of(events, stream=True)), events
    assert LAST[path] not in body


@pytest.mark.parametrize(
    "fault",
    [Fault(piece_bytes=1), Fault(piece_bytes=61, seconds=0.004, jitter=True)],
    ids=["single bytes", "jitter"],
)
def test_slow_and_sliced_connections_get_the_whole_answer(fault: Fault) -> None:
    async def work(network: Network) -> None:
        answers = (network.ask(request(*asked), fault) for asked in ASKED)
        for asked, data in zip(ASKED, await asyncio.gather(*answers), strict=True):
            check_whole(*asked, data)
        await network.holds_nothing()

    behind(SHORT, work)


def broken_off(rng: random.Random, num_points: int) -> None:
    """Connections that end within the answer end the work for it."""

    async def work(network: Network) -> None:
        for path in BODIES:
            for _ in range(num_points):
                fault = Fault(
                    piece_bytes=rng.choice((1, 16, 1 << 16)),
                    after=rng.choice((0, 9, 400, 1_200, 1_600, 4_000)) + rng.randrange(1, 90),
                    end=rng.choice(("reset", "closed")),
                )
                num_asked = len(network.port.streams)
                data = await network.ask(request(path, True), fault)
                check_begun(path, data)
                await network.holds_nothing()
                assert [one.was_cancelled for one in network.port.streams[num_asked:]] == [True]

    behind(LONG, work)


def test_what_breaks_off_in_the_answer_ends_the_work() -> None:
    broken_off(random.Random(1), 4)


@pytest.mark.deep
def test_what_breaks_off_anywhere_in_the_answer_ends_the_work() -> None:
    """The test above breaks off at fewer places."""
    broken_off(random.Random(2), 100)


def test_what_breaks_off_in_the_request_is_forgotten() -> None:
    rng = random.Random(3)

    async def work(network: Network) -> None:
        for path, stream in ASKED:
            asked = request(path, stream)
            body = asked.index(b"\r\n\r\n") + 4
            for after in (0, rng.randrange(body), body, rng.randrange(body, len(asked))):
                for end in ("reset", "closed"):
                    fault = Fault(way="up", after=after, end=end)
                    data = await network.ask(asked, fault)
                    assert not data or 400 <= answer_of(data)[0] < 500
        assert not network.port.streams
        await network.holds_nothing()

    behind(SHORT, work)


def test_who_says_no_more_gets_the_answer_or_is_gone() -> None:
    """Who closes its own direction behind its request counts as one that left, as for most servers:
    an answer that is not written by then is not written at all."""

    async def work(network: Network) -> None:
        for path, stream in ASKED:
            asked = request(path, stream)
            data = await network.ask(asked, Fault(way="up", after=len(asked), end="half"))
            if data:
                check_whole(path, stream, data)
            cut = await network.ask(asked, Fault(way="up", after=len(asked) - 1, end="half"))
            assert not cut or 400 <= answer_of(cut)[0] < 500
        await network.holds_nothing()

    behind(SHORT, work)


def test_a_body_that_stops_coming_is_told_so() -> None:
    async def work(network: Network) -> None:
        for path in BODIES:
            asked = request(path, True)
            data = await network.ask(asked, Fault(way="up", after=len(asked) - 1, end="stalled"))
            status, _, body = answer_of(data)
            assert status == 408
            assert json.loads(body)["error"]["message"]
        await network.holds_nothing()

    behind(SHORT, work, Limits(body_seconds=0.2))
