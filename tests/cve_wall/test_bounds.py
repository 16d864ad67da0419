"""What many clients can make grow, and what text of theirs reaches headers and logs: nothing."""

from __future__ import annotations

import gc
import hmac
import logging
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from doubles.asgi_client import Client, Got
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import app_of, ask, run, site_with
from outrider.api.chat_template import ChatTemplate
from outrider.api.prompts import ChatIds
from outrider.server.app import all_routes, make_app
from outrider.server.door import DoorRules
from outrider.server.metrics import Metrics
from outrider.server.port import ChatPrompt

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
INJECTED = (
    *("a\r\nx-injected: 1", "a\nx-injected: 1", "a\r\n\r\n<script>", "\x1b[31mred\x1b[0m", "\x00"),
    *("\x85x-injected: 1", "a\u2028x-injected: 1", "%0d%0ax-injected:%201", "\x7f", "\x9b31m"),
)


@pytest.mark.parametrize("text", INJECTED, ids=ascii)
def test_text_of_a_client_makes_no_header_and_no_line_of_a_log(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    latin = text.encode("latin-1", "replace").decode("latin-1")
    # A server between us and the client would have split these; an application may meet them.
    headers = dict.fromkeys(("x-request-id", "user-agent", "origin", "referer", "x-a"), latin)
    message = {"role": "user", "content": text, "name": text, text: text}
    tool: dict[str, Any] = {"type": "function", "function": {"name": text, "parameters": {}}}
    answers: Sequence[Got] = [
        ask(ScriptedPort(), CHAT, HELLO, headers={name: headers[name]}) for name in headers
    ]
    bodies: list[dict[str, Any]] = [{"model": text}, {text: 1}, {"user": text}, {"stop": text}]
    bodies += [{"tools": [tool]}]
    bodies += [{"messages": [message]}, {"speculative": {"drafter": text}}]
    answers += [ask(ScriptedPort(), CHAT, HELLO | more) for more in bodies]
    answers += [ask(ScriptedPort(), f"/v1/models/{text}"), ask(ScriptedPort(), "/", method="G")]
    answers.append(ask(ScriptedPort(error=ValueError(text)), CHAT, HELLO))
    for got in answers:
        assert "x-injected" not in {name.strip().lower() for name in got.headers}
        assert not [v for v in got.headers.values() if any(ord(c) < 32 or ord(c) == 127 for c in v)]
    told = "".join(record.getMessage() for record in caplog.records)
    assert text not in told
    assert "x-injected" not in told


def test_no_request_adds_a_series_to_the_metrics() -> None:
    async def told() -> tuple[set[str], set[str]]:
        site = site_with(ScriptedPort())
        metrics = Metrics(lambda: {"scripted": site.port.status})
        site.observers.append(metrics)
        app = make_app(site, DoorRules(), all_routes(site, metrics))

        async def series() -> set[str]:
            text = (await Client(app).ask("/metrics")).body.decode()
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            return {line.rpartition(" ")[0] for line in lines}

        paths = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/nothing", "/v1/models")
        good = {"prompt": "x", "input": "x", "max_tokens": 1} | HELLO

        async def crowd(words: Sequence[str]) -> None:
            for word in words:
                for path in paths:
                    body = good | {"user": word, "metadata": {word: word}}
                    await Client(app).ask(path, body, headers={"user-agent": word})
                    await Client(app).ask(path, body | {"model": word})
                    await Client(app).ask(path, body | {"temperature": word})
                    await Client(app).ask(path + word, method=word.upper())

        await crowd(["first"])
        before = await series()
        await crowd([f"word{i}" for i in range(60)])
        return before, await series()

    before, after = run(told())
    assert before
    assert after == before


def test_refused_requests_leave_no_memory_behind() -> None:
    """What 400 leave is as little as what 100 do."""
    bodies = [
        b'{"messages": [' + b'{"role": "user", "content": "x"},' * 300 + b"1]}",
        b'{"x": ' + b"[" * 63 + b"]" * 63 + b"}",
        b'{"messages": [], "stop": [' + b'"y",' * 500 + b'"y"]}',
    ]

    async def crowd(num: int) -> int:
        app = app_of(site_with(ScriptedPort()))
        for i in range(num):
            unique = b'{"k%d": 1, ' % i + bodies[i % 3][1:]
            got = await Client(app).ask(CHAT, unique)
            assert got.status == 400
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    run(crowd(10))
    tracemalloc.start()
    try:
        base = run(crowd(100))
        assert run(crowd(400)) - base < 200_000
    finally:
        tracemalloc.stop()


BOMBS = (
    "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('no') }}",
)


@pytest.mark.alone
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_that_misbehaves_ends_one_request(bomb: str) -> None:
    """Of the model's own template: requests bring none. Which others there are is tried in
    tests/unit/api/test_chat_template.py."""

    class BombPort(ScriptedPort):
        template = ChatTemplate("{% if messages|length > 1 %}" + bomb + "{% endif %}ok", {})

        async def encode_chat(self, chat: ChatPrompt) -> ChatIds:
            return ChatIds(await self.encode(self.template.render(chat.messages).text))

    port = BombPort()
    answer = {"role": "assistant", "content": "hello"}
    got = ask(port, CHAT, HELLO | {"messages": [{"role": "user", "content": "hi"}, answer]})
    assert got.status == 400, got.body
    assert got.json()["error"]["message"].startswith("chat template: ")
    assert ask(port, CHAT, HELLO).status == 200
    port.template.close()


def test_keys_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """By digests of one length, each of them, whatever the key that is shown begins with."""
    keys = ("a" * 32, "b" * 32, "c" * 32)
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for shown in ("a" * 32, "a" * 31 + "x", "x", "", "a" * 5000):
        compared.clear()
        ask(ScriptedPort(), CHAT, HELLO, rules=DoorRules(keys=keys), headers={"x-api-key": shown})
        assert compared == [(32, 32)] * 3
