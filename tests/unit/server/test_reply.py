"""Answers and their clients: who leaves, who does not read, who waits long, and the end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace

from starlette.types import Message

from doubles.asgi_client import Client, Got
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import QUICK, app_of, ask, run, site_with
from outrider.server.reply import EventWriter
from outrider.server.site import Limits

PATH = "/v1/completions"
BODY = {"prompt": "ab", "temperature": 0}


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


def test_who_waits_long_is_told_that_the_server_lives() -> None:
    async def wait() -> Got:
        port = ScriptedPort()
        port.pause = asyncio.Event()
        site = site_with(port, replace(QUICK, ping_seconds=0.01))
        client = Client(app_of(site))
        asking = asyncio.create_task(client.ask(PATH, BODY | {"stream": True}))
        await until(lambda: len(client.got.comments) > 2)
        port.pause.set()
        return await asking

    got = run(wait())
    assert got.status == 200
    assert got.events[-1] == "[DONE]"


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

        writer = EventWriter(send, replace(QUICK, ping_seconds=0.01))
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
