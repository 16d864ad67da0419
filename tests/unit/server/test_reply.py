"""Answers and their clients: who leaves, who does not read, who waits long, and the end."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
from starlette.types import Message

from doubles.asgi_client import Client, Got
from doubles.scripted_port import CARD, ScriptedPort
from doubles.scripted_site import QUICK, app_of, ask, run, site_with
from outrider.core.errors import ConfigError
from outrider.server.port import EngineCard
from outrider.server.reply import EventWriter
from outrider.server.site import Limits

PATH = "/v1/completions"
BODY = {"prompt": "ab", "temperature": 0}


class ToolPort(ScriptedPort):
    """Its model calls as Hermes does."""

    @property
    def card(self) -> EngineCard:
        return msgspec.structs.replace(CARD, chat_template="{{ tools }} <tool_call> arguments")


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


def left_after(stream: bool) -> tuple[ScriptedPort, Got, int]:
    """Of a client that leaves while the engine works."""

    async def leave() -> tuple[ScriptedPort, Got, int]:
        port = ScriptedPort()
        port.pause = asyncio.Event()
        site = site_with(port)
        client = Client(app_of(site))
        asking = asyncio.create_task(client.ask(PATH, BODY | {"stream": stream, "n": 2}))
        await until(lambda: len(port.streams) == 2)
        client.leave.set()
        return port, await asking, site.traffic.num_running

    return run(leave())


def test_who_leaves_is_not_worked_for() -> None:
    for stream in (False, True):
        port, got, num_running = left_after(stream)
        assert all(one.was_cancelled for one in port.streams)
        assert num_running == 0
        assert got.status == 0


def test_who_leaves_midway_is_not_worked_for() -> None:
    async def leave() -> ScriptedPort:
        port = ScriptedPort(lambda _: ("a",) * 500)
        client = Client(app_of(site_with(port)))
        asking = asyncio.create_task(client.ask(PATH, BODY | {"stream": True}))
        await client.news.wait()
        port.pause = asyncio.Event()
        client.leave.set()
        await asking
        return port

    assert run(leave()).streams[0].was_cancelled


def test_who_does_not_read_is_cut_off() -> None:
    async def stall() -> ScriptedPort:
        port = ScriptedPort(lambda _: ("a",) * 50)
        client = Client(app_of(site_with(port)))
        client.stalled = True
        await client.ask(PATH, BODY | {"stream": True})
        return port

    assert run(stall()).streams[0].was_cancelled


def waited(path: str, body: Mapping[str, object], num_events: int, port: ScriptedPort) -> Got:
    """The answer to a client that got so many events before the engine's first step."""

    async def wait() -> Got:
        port.pause = asyncio.Event()
        site = site_with(port, replace(QUICK, begin_seconds=0.0, ping_seconds=0.005))
        client = Client(app_of(site))
        asking = asyncio.create_task(client.ask(path, {**body, "stream": True, "temperature": 0}))
        await until(lambda: len(client.got.events) >= num_events)
        assert all(b"data: " in write for write in client.got.writes)
        port.pause.set()
        return await asking

    got = run(wait())
    assert got.status == 200
    assert got.is_whole
    return got


@pytest.mark.parametrize("path", ["/v1/chat/completions", PATH])
@pytest.mark.parametrize("n", [1, 2])
def test_heartbeats_of_choices_are_empty_deltas(path: str, n: int) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked = {"prompt": "ab", "echo": True} if path == PATH else {"messages": messages}
    *chunks, done = waited(path, asked | {"n": n}, 4, ScriptedPort()).events
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    texts, ended, roles = [""] * n, [False] * n, [0] * n
    for choice in choices:
        index = choice["index"]
        assert not ended[index]
        delta = choice if path == PATH else choice["delta"]
        texts[index] += delta["text"] if path == PATH else delta["content"]
        roles[index] += "role" in delta
        ended[index] = choice["finish_reason"] is not None
    assert all(ended)
    assert texts == (["\x02abHello"] * n if path == PATH else ["Hello"] * n)
    assert roles == [0 if path == PATH else 1] * n


def test_heartbeats_of_responses_are_events_of_their_own() -> None:
    events = waited("/v1/responses", {"input": "hi"}, 5, ScriptedPort()).events
    kinds = [event["type"] for event in events]
    assert kinds[:5] == ["response.created", *["response.in_progress"] * 4]
    assert kinds.count("response.created") == 1
    assert kinds[-1] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    begun = {**events[0]["response"]}
    assert events[4]["response"] == begun


def test_heartbeats_of_messages_are_pings() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    events = waited("/v1/messages", body, 4, ScriptedPort()).events
    kinds = [event["type"] for event in events]
    assert kinds[:4] == ["message_start", "ping", "ping", "ping"]
    assert events[0]["message"]["usage"]["input_tokens"] == 3
    assert kinds.count("message_start") == 1
    assert kinds[-1] == "message_stop"


def test_heartbeats_come_while_a_call_is_held_back() -> None:
    async def wait() -> list[str]:
        port = ToolPort(lambda _: ("Now ", "<tool_call>", '{"name": "ls", ', '"arguments": {}}'))
        site = site_with(port, replace(QUICK, ping_seconds=0.005))
        client = Client(app_of(site))
        tool = {"name": "ls", "input_schema": {"type": "object"}}
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "stream": True}
        port.pause = asyncio.Event()
        port.pause.set()
        asking = asyncio.create_task(client.ask("/v1/messages", body | {"max_tokens": 99}))
        await until(lambda: port.streams and len(port.streams[0].left) < 2)
        port.pause.clear()
        await until(lambda: client.got.events[-1]["type"] == "ping")
        port.pause.set()
        return [event["type"] for event in (await asking).events]

    kinds = run(wait())
    assert kinds.count("ping") >= 1
    assert kinds[-1] == "message_stop"


FAILURES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "error"),
    (PATH, {"prompt": "ab"}, "error"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}, "error"),
    ("/v1/responses", {"input": "hi"}, "response"),
]


@pytest.mark.parametrize(("path", "body", "key"), FAILURES)
def test_what_fails_after_a_heartbeat_is_an_event_of_the_api(
    path: str, body: dict[str, object], key: str
) -> None:
    port = ScriptedPort(lambda _: (), error=ConfigError("grammar: no."))
    events = waited(path, body, 2, port).events
    told = events[-1][key]
    assert "grammar: no." in json.dumps(told)
    assert events[-1].get("type") == (
        {"/v1/messages": "error", "/v1/responses": "response.failed"}.get(path)
    )
    assert "[DONE]" not in events


@pytest.mark.parametrize(("path", "body"), [case[:2] for case in FAILURES])
def test_what_the_engine_refuses_at_once_has_a_status(path: str, body: dict[str, object]) -> None:
    port = ScriptedPort(lambda _: (), error=ConfigError("grammar: no."))
    assert ask(port, path, body | {"stream": True, "temperature": 0}).status == 400


def test_a_model_that_loads_is_waited_for_with_heartbeats() -> None:
    async def wait() -> list[str]:
        gate = asyncio.Event()

        @asynccontextmanager
        async def held() -> AsyncGenerator[None]:
            await gate.wait()
            yield

        site = replace(site_with(ScriptedPort(), replace(QUICK, ping_seconds=0.005)), held=held)
        client = Client(app_of(site))
        echo = {"prompt": "ab", "echo": True, "stream": True}
        asking = asyncio.create_task(client.ask(PATH, echo))
        await until(lambda: len(client.got.events) > 2)
        gate.set()
        *chunks, _ = (await asking).events
        return [chunk["choices"][0]["text"] for chunk in chunks]

    assert "".join(run(wait())) == "\x02abHello"


def test_a_client_that_is_gone_when_it_is_told_of_a_wait_leaves_no_task_unheard() -> None:
    async def lose() -> list[object]:
        unheard: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unheard.append(context))
        sent = 0

        async def send(_: Message) -> None:
            nonlocal sent
            sent += 1
            raise OSError

        writer = EventWriter(send, replace(QUICK, ping_seconds=0.01), lambda: b"data: 1\n\n")
        writer.start()
        await until(lambda: sent > 1)
        await asyncio.sleep(0)
        writer.stop()
        del writer
        gc.collect()
        await asyncio.sleep(0)
        return unheard

    assert run(lose()) == []


def test_a_server_that_ends_takes_nothing_new() -> None:
    async def end() -> tuple[int, int, int]:
        port = ScriptedPort()
        port.pause = asyncio.Event()
        site = site_with(port)
        app = app_of(site)
        running = asyncio.create_task(Client(app).ask(PATH, BODY))
        await until(lambda: port.streams)
        site.traffic.ending = True
        new, ready = await Client(app).ask(PATH, BODY), await Client(app).ask("/ready")
        port.pause.set()
        return (await running).status, new.status, ready.status

    assert run(end()) == (200, 503, 503)


def test_places_are_bounded_for_all_and_for_a_key() -> None:
    async def crowd(limits: Limits) -> list[int]:
        port = ScriptedPort()
        port.pause = asyncio.Event()
        app = app_of(site_with(port, limits))
        asking = [asyncio.create_task(Client(app).ask(PATH, BODY)) for _ in range(5)]
        await until(lambda: sum(task.done() for task in asking) >= 2)
        port.pause.set()
        return sorted([(await task).status for task in asking])

    assert run(crowd(replace(QUICK, most_running=3))) == [200, 200, 200, 503, 503]
    assert run(crowd(replace(QUICK, most_of_a_key=3))) == [200, 200, 200, 429, 429]


def test_what_the_server_is() -> None:
    port = ScriptedPort()
    models = ask(port, "/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["scripted", "alias"]
    assert [model["slug"] for model in models["models"]] == ["scripted", "alias"]
    assert ask(port, "/v1/models/alias").json()["max_model_len"] == 256
    assert ask(port, "/version").json()["name"] == "outrider"
    assert ask(port, "/ready").status == ask(port, "/health").status == 200
    port.state = "loading"
    assert (ask(port, "/ready").status, ask(port, "/health").status) == (503, 200)
    assert ask(port, "/v1/models").status == 200
    port.state = "failed"
    assert (ask(port, "/ready").status, ask(port, "/health").status) == (503, 503)


def test_texts_and_tokens_are_turned_into_each_other() -> None:
    port = ScriptedPort()
    found = ask(port, "/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert found == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [2, 97, 98],
        "token_strs": ["\x02", "a", "b"],
    }
    assert ask(port, "/tokenize", {"content": "ab"}).json()["tokens"] == [97, 98]
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    assert ask(port, "/tokenize", chat).json()["count"] == 3
    assert ask(port, "/detokenize", {"tokens": [97, 98]}).json()["prompt"] == "ab"
    assert ask(port, "/detokenize", {"tokens": []}).json()["prompt"] == ""
    assert ask(port, "/detokenize", {"tokens": [512]}).status == 400
    assert [ask(port, "/detokenize", {"tokens": [65] * n}).status for n in (256, 257)] == [200, 400]
    assert ask(port, "/tokenize", {}).status == 400
    assert ask(port, "/tokenizer_info").json()["eos_token"] == "</s>"
