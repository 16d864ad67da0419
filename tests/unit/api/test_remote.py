"""JSON from another server: tried again when it may help, and every failure named."""

from __future__ import annotations

import socket

import pytest

from doubles.json_server import Answer, serving
from outrider.core.errors import ConfigError, MachineError, SilentError
from outrider.plugins.running.clients import MAX_BYTES, Server
from outrider_lab.bench.peers.clients import number, objects

BUSY = Answer.of({"error": "busy"}, 503)
FINE = Answer.of({"ok": 1})


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_body_is_posted_and_none_gets() -> None:
    with serving({"GET /a": FINE, "POST /a": Answer.of({"ok": 2})}) as server:
        client = Server(url=f"{server.url}/", api_key="key")
        assert client.ask("/a") == {"ok": 1}
        assert client.ask("/a", {"x": "y"}) == {"ok": 2}
        assert [asked.body for asked in server.asked] == [None, {"x": "y"}]
        assert {asked.authorization for asked in server.asked} == {"Bearer key"}


def test_a_busy_server_is_asked_again_after_longer_and_longer_waits() -> None:
    waits: list[float] = []
    with serving({"GET /a": [BUSY, BUSY, FINE]}) as server:
        assert Server(url=server.url, retries=3, wait=waits.append).ask("/a") == {"ok": 1}
    assert waits == [0.2, 0.4]


def test_retries_end() -> None:
    waits: list[float] = []
    with serving({"GET /a": BUSY}) as server:
        with pytest.raises(MachineError, match=r"it answered 503 \(3 tries\)") as caught:
            Server(url=server.url, retries=2, wait=waits.append).ask("/a")
        assert len(server.asked) == 3
    assert caught.value.hint
    assert len(waits) == 2


def test_a_refusal_is_not_tried_again_and_is_quoted() -> None:
    with serving({"GET /a": Answer.of({"error": "no such model"}, 400)}) as server:
        with pytest.raises(MachineError, match=r"400 Bad Request.*no such model"):
            Server(url=server.url, retries=5).ask("/a")
        assert len(server.asked) == 1


def test_nobody_there() -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    with pytest.raises(MachineError, match="refused") as caught:
        Server(url=url).ask("/a")
    assert caught.value.hint == "is the server running?"


def test_a_silent_server_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SilentError, match=r"timed out after 0\.05 seconds"):
            Server(url=url, timeout_seconds=0.05, retries=9).ask("/a")


@pytest.mark.parametrize("text", [b"", b"<html>", b"[1]", b'"x"', b"[" * 100_000, b"\xff"])
def test_an_answer_that_is_no_object_is_refused(text: bytes) -> None:
    with serving({"GET /a": Answer(text)}) as server, pytest.raises(MachineError, match="JSON"):
        Server(url=server.url).ask("/a")


def test_an_answer_that_is_too_long_is_refused() -> None:
    with (
        serving({"GET /a": Answer(b" " * (MAX_BYTES + 1))}) as server,
        pytest.raises(MachineError, match="more than"),
    ):
        Server(url=server.url).ask("/a")


def test_redirects_are_not_followed() -> None:
    with serving({"GET /b": FINE}) as other:
        away = Answer(b"", 302, {"Location": f"{other.url}/b"})
        with serving({"GET /a": away}) as server, pytest.raises(MachineError, match="302"):
            Server(url=server.url).ask("/a")
        assert not other.asked


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")
    with serving({"GET /a": FINE}) as server:
        assert Server(url=server.url).ask("/a") == {"ok": 1}


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "file:///etc/passwd", "http://", "ftp://x", "http://[", "http://x:y"],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not the address") as caught:
        Server(url=url)
    assert caught.value.hint


def test_what_a_server_sent_is_read_without_trust() -> None:
    assert [number(value) for value in (2, 2.5, "2", None, True)] == [2.0, 2.5, 0.0, 0.0, 0.0]
    assert objects([{"a": 1}, 2, None]) == [{"a": 1}]
    assert objects({"a": 1}) == objects(None) == []


def test_lines_of_an_answer_are_posted_for_once() -> None:
    with serving({"POST /a": Answer(b"one\r\n\ntw\xffo")}) as server:
        assert list(Server(url=server.url, retries=3).lines("/a", {"x": 1})) == [
            "one",
            "",
            "tw\ufffdo",
        ]
    with serving({"POST /a": BUSY}) as server:
        with pytest.raises(MachineError, match="it answered 503") as caught:
            list(Server(url=server.url, retries=3).lines("/a", {}))
        assert len(server.asked) == 1
    assert caught.value.hint


def test_lines_without_end() -> None:
    with (
        serving({"POST /a": Answer(b"x" * (MAX_BYTES + 1))}) as server,
        pytest.raises(MachineError, match="more than"),
    ):
        list(Server(url=server.url).lines("/a", {}))
