"""More requests than there are places: who is refused is told so without waiting for the engine, in
the shape of the API that was asked, and who was let in gets the whole answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from doubles.held_engine import HeldPort
from doubles.live_server import Live, answer_of, live_server, until
from outrider.core.config import EngineConfig
from outrider.server.site import Limits

pytestmark = [pytest.mark.weights, pytest.mark.wide]

NUM_PLACES = 6
NUM_TOKENS = 12
CONFIG = EngineConfig(threads=1, k=3, batch_size=2)
KEYS = ("a" * 16, "b" * 16)
LIMIT = {"max_tokens": NUM_TOKENS}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": LIMIT | {"prompt": "def f(", "ignore_eos": True},
    "/v1/responses": {"max_output_tokens": NUM_TOKENS, "input": "hi"},
    "/v1/messages": LIMIT | {"messages": [{"role": "user", "content": "hi"}]},
}


class Answered:
    """What one request got."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.status, headers, body = answer_of(data)
        self.body, self.retry_after = json.loads(body), headers["retry-after"]

    def check_refusal(self) -> None:
        assert int(self.retry_after) >= 1
        error = self.body["error"]
        assert error["message"]
        if self.path == "/v1/messages":
            kinds = {429: "rate_limit_error", 503: "overloaded_error"}
            assert (self.body["type"], error["type"]) == ("error", kinds[self.status])
        else:
            codes = {429: "rate_limit_exceeded", 503: "overloaded"}
            assert error["code"] == codes[self.status]
            assert set(error) == {"message", "type", "param", "code"}


async def asked(live: Live, path: str, key: str) -> Answered:
    client = await live.ask(path, BODIES[path] | {"temperature": 0}, key)
    try:
        return Answered(path, await client.rest())
    finally:
        client.leave()


def begun(live: Live, paths: Sequence[str], key: str) -> list[asyncio.Task[Answered]]:
    return [asyncio.create_task(asked(live, path, key)) for path in paths]


def test_a_full_server_refuses_while_its_engine_stands_still() -> None:
    """Five times as many as there are places, of two keys. The first key has all places, so its
    further requests are too many of a key, and the other key's are until it has its share."""
    many = [*BODIES] * (2 * NUM_PLACES)

    async def work() -> None:
        port = HeldPort(CONFIG)
        limits = Limits(most_running=NUM_PLACES)
        async with live_server(port, limits, KEYS) as live:
            port.steps.stops = lambda _: True
            admitted = begun(live, many[:1], KEYS[0])
            await until(lambda: port.steps.is_held)
            num_jobs = port.steps.num_jobs
            admitted += begun(live, many[1:NUM_PLACES], KEYS[0])
            await until(lambda: live.num_places == NUM_PLACES)
            admitted += begun(live, many[: NUM_PLACES // 2], KEYS[1])
            await until(lambda: live.num_places == NUM_PLACES * 3 // 2)
            refused = await asyncio.gather(*(asked(live, p, key) for p in many for key in KEYS))
            statuses = Counter((one.path, one.status) for one in refused)
            assert set(statuses.values()) == {2 * NUM_PLACES}
            assert {status for _, status in statuses} == {429, 503}
            for one in refused:
                one.check_refusal()
            assert port.steps.num_jobs == num_jobs
            port.steps.release()
            answers = await asyncio.gather(*admitted)
            assert {answer.status for answer in answers} == {200}
            await until(lambda: not live.num_places and not port.num_left)
            assert port.llm.counts.completed == len(admitted)
            assert (await asked(live, many[0], KEYS[0])).body["choices"][0]["text"]

    asyncio.run(work())
