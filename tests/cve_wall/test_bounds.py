"""What many clients can make grow, and what text of theirs reaches headers and logs: nothing."""

from __future__ import annotations

import gc
import hmac
import json
import logging
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from time import thread_time
from typing import Any

import pytest

from doubles.asgi_client import Client, Got
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import app_of, ask, run, site_with
from outrider.api.callers import ChatIds
from outrider.api.chat_template import ChatTemplate
from outrider.plugins.metrics import Metrics, metric_routes
from outrider.server.access import DoorRules
from outrider.server.app import all_routes, make_app
from outrider.server.chat import CompletionBody
from outrider.server.errors import ApiError
from outrider.server.port import ChatPrompt
from outrider.server.reply import parsed

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
        app = make_app(site, DoorRules(), all_routes(site, metric_routes(metrics)))

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


@pytest.mark.wide
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


def _filled(head: bytes, part: bytes, tail: bytes, num_bytes: int = 1 << 20) -> bytes:
    return head + part * ((num_bytes - len(head) - len(tail)) // len(part)) + tail


_KEYS = b",".join(b'"k%06d":1' % i for i in range(90_000))
# Each of a megabyte: one that is mostly text, and those that are not.
_TEXT = _filled(b'{"prompt": "', rb"\"", b'"}')
_ODD = {
    "lists of ids": _filled(b'{"prompt": [', b"[1],", b"[1]]}"),
    "lists": _filled(b'{"z": [', b"[],", b"[]]}"),
    "objects": _filled(b'{"z": [', b"{},", b"{}]}"),
    "ids": _filled(b'{"prompt": [', b"1,", b"1]}"),
    "as many ids as are read": _filled(b'{"prompt": [', b"1,", b"1]}", 999_990),
    "numbers": _filled(b'{"z": [', b"1,", b"1]}"),
    "long numbers": _filled(b'{"z": [', b"1234567890123456789,", b"1]}"),
    "strings": _filled(b'{"prompt": [', b'"ab",', b'""]}'),
    "keys": b"{" + _KEYS + b"}",
    "keys below": b'{"metadata": {' + _KEYS + b"}}",
    "as many keys as are read": b"{" + _KEYS[: 59_999 * 12 - 1] + b"}",
    "messages": _filled(b'{"prompt": [', b'{"role":"user","content":"x"},', b"{}]}"),
    "depth": b'{"z": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    "a half and escapes": _filled(rb'{"prompt": "\ud800', rb"\n", b'"}'),
    "halves": _filled(b'{"prompt": "', rb"\ud800", b'"}'),
    "pairs and a half": _filled(rb'{"prompt": "', rb"\ud83d\ude00", rb'\ud800"}'),
}


@pytest.mark.parametrize("odd", _ODD)
def test_no_body_takes_much_longer_to_read_than_a_text_of_its_size(odd: str) -> None:
    """The event loop reads it, and all streams wait meanwhile."""

    def seconds(body: bytes) -> float:
        found: list[float] = []
        for _ in range(3):
            began = thread_time()
            with suppress(ApiError):
                parsed(CompletionBody, body)
            found.append(thread_time() - began)
        return min(found)

    # What took longer than its size took a hundred times as long, and more; CPUs differ by 3 to 8.
    assert seconds(_ODD[odd]) < 20 * seconds(_TEXT)


def test_what_a_body_has_too_many_of_is_named() -> None:
    def told(body: bytes) -> str:
        got = ask(ScriptedPort(), "/v1/completions", body)
        assert got.status == 400
        error = got.json()["error"]
        return f"{error['code']}: {error['message']}"

    of = {name: told(_ODD[name]) for name in ("lists", "ids", "keys", "numbers")}
    assert of["lists"] == "too_many: the body has more than 10,000 lists and objects. Send less."
    assert of["ids"] == "too_many: the body has more than 500,000 values. Send less."
    assert of["keys"] == "too_many: the body has more than 60,000 strings. Send less."
    assert of["numbers"] == of["ids"]


def test_what_stands_within_strings_is_not_counted() -> None:
    """As brackets, commas, quotes and long numbers of a text are."""
    text = '[{,"\\' * 40_000 + "\\" + "9" * 40 + "[" * 70
    body = json.dumps({"prompt": text, "user": '"\\"'}).encode()
    found, warnings = parsed(CompletionBody, body)
    assert found.prompt == text
    assert not warnings


def test_one_request_has_few_warnings() -> None:
    many = {f"x{i}": 1 for i in range(1000)}
    got = ask(ScriptedPort(), CHAT, HELLO | many | {"chat_template_kwargs": many})
    assert len(got.json()["warnings"]) == 32


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
