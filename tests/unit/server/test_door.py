"""The door: keys, hosts, origins, sizes; and one shape for every error behind it."""

from __future__ import annotations

import json

import pytest

from doubles.asgi_client import Client
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import app_of, ask, run, site_with
from outrider.core.errors import ConfigError
from outrider.server.access import DoorRules, is_loopback

KEY = "k" * 32
LOCKED = DoorRules(keys=(KEY,))
PATH = "/v1/completions"
BODY = {"prompt": "ab", "temperature": 0}


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def status(headers: dict[str, str], rules: DoorRules = LOCKED, path: str = PATH) -> int:
    return ask(ScriptedPort(), path, BODY, rules=rules, headers=headers).status


@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}],
    ids=str,
)
def test_a_key_opens_it_in_either_header(headers: dict[str, str]) -> None:
    assert status(headers) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"x-api-key": "\xff" * 32},
    ],
    ids=str,
)
def test_nothing_else_opens_it(headers: dict[str, str]) -> None:
    port = ScriptedPort()
    got = ask(port, PATH, BODY, rules=LOCKED, headers=headers)
    assert got.status == 401
    assert got.headers["www-authenticate"] == "Bearer"
    assert got.json()["error"]["type"] == "authentication_error"
    assert not port.requests


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/metrics", "/tokenizer_info", "/version", "/outrider/v1/history"),
        *("//v1/models", "/v1/../v1/models", "/health/", "/health/../v1/models", "/nothing"),
        *("/webx", "/WEB/a.js"),
    ],
)
def test_every_path_is_shut_but_the_public_ones(path: str) -> None:
    got = ask(ScriptedPort(), path, rules=LOCKED)
    assert got.status == 401


def test_public_paths_need_no_key() -> None:
    for path in ("/health", "/ready", "/", "/dashboard"):
        assert ask(ScriptedPort(), path, rules=LOCKED).status == 200


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("LOCALHOST", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("192.168.1.2:8000", False),
        (" ", False),
        ("[::1", False),
        ("evil@localhost", False),
        ("evil.example@localhost:8000", False),
        ("localhost/x", False),
        ("localhost#x", False),
        ("localhost?x", False),
        ("localhost:x", False),
        ("local host", False),
        ("localhost,evil.example", False),
        ("[localhost]", False),
    ],
)
def test_only_expected_hosts_are_served(host: str, allowed: bool) -> None:
    got = ask(ScriptedPort(), "/health", headers={"host": host})
    assert got.status == (200 if allowed else 403)


def test_probes_need_no_host() -> None:
    """As HAProxy's, in HTTP/1.0."""
    for path in ("/health", "/ready"):
        assert ask(ScriptedPort(), path, headers={"host": ""}).status == 200
        assert ask(ScriptedPort(), path, headers={"host": "evil.example"}).status == 403
    for path in ("/", "/v1/models", "/metrics", "/health/", "//health"):
        assert ask(ScriptedPort(), path, headers={"host": ""}).status == 403


@pytest.mark.parametrize("path", ["/v1/models/", "/v1//models", "//v1/models", "/v1///models//"])
def test_slashes_too_many_in_the_api_change_nothing(path: str) -> None:
    assert ask(ScriptedPort(), path).json()["object"] == "list"
    assert ask(ScriptedPort(), path, rules=LOCKED).status == 401
    named = ask(ScriptedPort(), "/v1//models/alias/")
    assert named.json()["id"] == "alias"
    assert ask(ScriptedPort(), "/v1/chat/completions/", CHAT).status == 200
    assert ask(ScriptedPort(), "/health/").status == 404


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "evil.example", "Host": "localhost"}, 400),
        ({"host": "localhost", "HOST": "localhost"}, 400),
        ({"content-length": "2", "Content-Length": "3"}, 400),
        ({"content-type": "text/plain", "Content-Type": "application/json"}, 400),
        ({"transfer-encoding": "chunked", "Transfer-Encoding": "chunked"}, 400),
        ({"transfer-encoding": "chunked", "content-length": "2"}, 400),
        ({"transfer-encoding": "gzip, chunked"}, 501),
        ({"transfer-encoding": "chunked, chunked"}, 501),
        ({"transfer-encoding": "identity"}, 501),
        ({"transfer-encoding": " Chunked "}, 200),
        ({"accept": "a/b", "Accept": "c/d"}, 200),
    ],
    ids=str,
)
def test_headers_that_two_readers_could_take_for_two_requests_are_refused(
    headers: dict[str, str], expected: int
) -> None:
    assert ask(ScriptedPort(), PATH, BODY, headers=headers).status == expected


def test_a_server_that_others_reach_is_reached_by_address_or_name() -> None:
    rules = DoorRules(keys=(KEY,), host="0.0.0.0", hosts={"box.lan"})
    for host, expected in (("192.168.1.2:1", 200), ("box.lan:1", 200), ("evil.example", 403)):
        assert (
            ask(ScriptedPort(), "/health", rules=rules, headers={"host": host}).status == expected
        )


def test_pages_from_elsewhere_may_not_ask() -> None:
    rules = DoorRules(origins={"https://chat.example"})
    for origin, expected in (
        ("http://localhost:8000", 200),
        ("https://chat.example", 200),
        ("https://evil.example", 403),
        ("http://localhost:9999", 403),
        ("null", 403),
    ):
        got = ask(ScriptedPort(), PATH, BODY, rules=rules, headers={"origin": origin})
        assert got.status == expected
        shared = got.headers.get("access-control-allow-origin")
        assert shared == (origin if origin == "https://chat.example" else None)


def test_a_browser_is_told_what_an_allowed_page_may_send() -> None:
    rules = DoorRules(keys=(KEY,), origins={"https://chat.example"})
    headers = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    got = ask(ScriptedPort(), PATH, method="OPTIONS", rules=rules, headers=headers)
    assert got.status == 204
    assert "authorization" in got.headers["access-control-allow-headers"]


def test_what_keys_left_in_the_prefix_cache_is_apart_unless_it_is_shared() -> None:
    async def salts(shared: bool) -> list[str]:
        port = ScriptedPort()
        site = site_with(port)
        site.shares_prefixes = shared
        app = app_of(site, DoorRules(keys=(KEY, KEY.upper())))
        for key in (KEY, KEY.upper()):
            await Client(app).ask(PATH, BODY, headers={"x-api-key": key})
        return [request.cache_salt for request in port.requests]

    first, second = run(salts(shared=False))
    assert first
    assert second not in ("", first)
    assert KEY not in first
    assert run(salts(shared=True)) == ["", ""]


def test_other_machines_need_a_key() -> None:
    with pytest.raises(ConfigError, match="no API key"):
        DoorRules(host="0.0.0.0")
    with pytest.raises(ConfigError, match="needs 16"):
        DoorRules(keys=("short",))


def test_what_the_loopback_is() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.1", "box")))


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {"content-type": ""}, 415),
        (b"{}", {"content-encoding": "gzip"}, 415),
        (b"{}", {"content-length": "99999999999999999999"}, 413),
        (b" " * (5 << 20), {}, 413),
        (b"{}", {"x-long": "x" * 20_000}, 431),
        (b"", {}, 400),
        (b"nonsense", {}, 400),
        (b"[]", {}, 400),
        (b'{"prompt": "\xff"}', {}, 400),
        (b'{"prompt": "ab", "temperature": NaN}', {}, 400),
        (b'{"prompt": "ab", "temperature": 1e999}', {}, 400),
        (b'{"prompt": "ab", "top_k": ' + b"9" * 5000 + b"}", {}, 400),
        (b'{"prompt": "ab", "x": ' + b"[" * 100 + b"]" * 100 + b"}", {}, 400),
        (b'{"prompt": "ab", "x": ' + b"[" * 99_999 + b"]" * 99_999 + b"}", {}, 400),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_bodies_are_told_apart(body: bytes, headers: dict[str, str], expected: int) -> None:
    port = ScriptedPort()
    got = ask(port, PATH, body, headers=headers)
    assert got.status == expected, got.body
    assert got.json()["error"]["message"]
    assert not port.requests


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def stalled() -> int:
        client = Client(app_of(site_with(ScriptedPort())))
        got = await client.ask(PATH, pieces=[b'{"prompt":', None])
        return got.status

    assert run(stalled()) == 408


def test_a_body_is_counted_as_it_comes() -> None:
    async def long() -> int:
        client = Client(app_of(site_with(ScriptedPort())))
        return (await client.ask(PATH, pieces=[b" " * (1 << 20)] * 9)).status

    assert run(long()) == 413


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nothing", 404),
        ("GET", PATH, 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/embeddings", 501),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
    ],
)
def test_every_error_has_one_shape(method: str, path: str, expected: int) -> None:
    body: dict[str, object] | None = {} if method == "POST" else None
    got = ask(ScriptedPort(), path, body, method=method)
    assert got.status == expected
    assert set(got.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "body", "param", "message"),
    [
        ("GET", None, None, f"GET {PATH}: this path does not have this method. Use POST."),
        ("POST", {}, "prompt", "prompt: it is missing. GET /openapi.json lists all fields."),
        (
            "POST",
            BODY | {"seed": "one"},
            "seed",
            "seed: Expected `int | null`, got `str`. GET /openapi.json lists all fields.",
        ),
    ],
)
def test_a_mistake_is_answered_with_what_to_send(
    method: str, body: dict[str, object] | None, param: str | None, message: str
) -> None:
    error = ask(ScriptedPort(), PATH, body, method=method).json()["error"]
    assert (error["param"], error["message"]) == (param, message)


def test_anthropics_paths_have_anthropics_shape() -> None:
    got = ask(ScriptedPort(), "/v1/messages", BODY, rules=LOCKED)
    assert got.json() == {
        "type": "error",
        "error": {"type": "authentication_error", "message": got.json()["error"]["message"]},
    }


def test_answers_carry_what_browsers_shall_know() -> None:
    for path in ("/health", "/nothing", "/"):
        headers = ask(ScriptedPort(), path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert len(headers["x-request-id"]) == 32
        assert "access-control-allow-origin" not in headers


def test_prompts_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    ask(ScriptedPort(), PATH, BODY | {"prompt": "xyzzy"})
    ask(ScriptedPort(error=KeyError("x")), PATH, BODY | {"prompt": "xyzzy"})
    ask(ScriptedPort(), PATH, json.dumps({"prompt": "xyzzy"}).encode() + b"!")
    assert "xyzzy" not in caplog.text
