"""A real server with a key, asked as attackers ask: paths, hosts and versions that confuse what
decides who may come in with what answers; files, addresses and headers in every field.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from doubles.served import Served
from doubles.watched import Watched, hook_into, watched

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]

KEY, OTHER = "k" * 32, "o" * 32
CANARY = "canary-5f1c"


@pytest.fixture(scope="module")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    (folder / "secret.txt").write_text(CANARY, encoding="utf-8")
    flags = ("--api-key", KEY, "--api-key", OTHER, "--drafter", "ngram")
    with watched(folder, *flags) as found:
        found.server.client.headers["x-api-key"] = KEY
        yield found


@pytest.fixture(scope="module")
def server(watcher: Watched) -> Served:
    return watcher.server


def sent(server: Served, data: bytes) -> bytes:
    """What is answered to these very bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    found = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        with suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                found += piece
    return found


HOST = b"host: localhost\r\n"
# A request's first line and its further headers.
PROBES: tuple[tuple[bytes, bytes], ...] = (
    *((b"GET %s HTTP/1.1" % path, HOST) for path in (
        b"/v1/models", b"//v1/models", b"///v1/models", b"/./v1/models", b"/v1//models",
        b"/health/../v1/models", b"/health/..%2fv1/models", b"/health%2f..%2fv1/models",
        b"/%2e%2e/v1/models", b"/v1/%6dodels", b"/v1/models/", b"/v1/models?/health",
        b"/v1/models#/health", b"/v1/models;/health", b"/v1/models%00/health", b"/v1/models%3f",
        b"/v1\\models", b"/web/../v1/models", b"/web/..%2f..%2fv1/models", b"/web//../metrics",
        b"/WEB/../metrics", b"/metrics", b"/Metrics", b"/metrics/", b"/openapi.json", b"/version",
        b"/tokenizer_info", b"/outrider/v1/card", b"/outrider/v1/history", b"/%76%31/models",
        b"/v1/models%20", b"/\xc0\xafv1/models", b"/v1/models/../../metrics",
    )),
    *((b"GET /v1/models HTTP/1.1", b"host: %s\r\n" % host) for host in (
        b"localhost/health", b"localhost/health?", b"localhost#/health", b"localhost:80/health",
        b"user@localhost", b"localhost@evil.example", b"127.0.0.1 /health", b"localhost,evil",
        b"health", b"", b"[::1]/health", b"localhost:99999999999", b"localhost:x",
    )),
    (b"GET http://localhost/v1/models HTTP/1.1", HOST),
    (b"GET http://localhost/health/../v1/models HTTP/1.1", HOST),
    (b"GET http://evil.example/v1/models HTTP/1.1", b"host: evil.example\r\n"),
    (b"GET http://x:y@localhost/v1/models HTTP/1.1", HOST),
    (b"GET /v1/models HTTP/1.0", b""),
    (b"GET /v1/models HTTP/1.0", HOST),
    (b"GET /v1/models HTTP/1.0", b"host: localhost/health\r\n"),
    (b"GET /v1/models", b""),
    (b"GET /v1/models HTTP/2.0", HOST),
    (b"GET /v1/models HTTP/9.9", HOST),
    (b"OPTIONS /v1/models HTTP/1.1", HOST + b"origin: http://evil.example\r\n"),
    (b"OPTIONS * HTTP/1.1", HOST),
    (b"HEAD /v1/models HTTP/1.1", HOST),
    (b"CONNECT localhost:22 HTTP/1.1", HOST),
    (b"TRACE /v1/models HTTP/1.1", HOST),
    (b"GET /v1/models HTTP/1.1", HOST + b"host: localhost/health\r\n"),
    (b"GET /v1/models HTTP/1.1", HOST + b"x-forwarded-host: localhost/health\r\n"),
    (b"GET /v1/models HTTP/1.1", HOST + b"x-forwarded-for: 127.0.0.1\r\n"),
    (b"GET /v1/models HTTP/1.1", HOST + b"x-original-url: /health\r\n"),
    (b"GET /health HTTP/1.1", HOST + b"x-rewrite-url: /v1/models\r\nx-original-url: /metrics\r\n"),
    (b"GET /v1/models HTTP/1.1", HOST + b"x-http-method-override: OPTIONS\r\n"),
    (b"GET /v1/models HTTP/1.1", HOST + b"authorization: Bearer default\r\n"),
    (b"GET /v1/models HTTP/1.1", HOST + b"authorization: Bearer " + b"k" * 31 + b"\r\n"),
    (b"GET /v1/models HTTP/1.1", HOST + b"authorization: Bearer \r\nauthorization: Bearer\r\n"),
    (b"GET /v1/models HTTP/1.1", HOST + b"authorization : Bearer " + b"k" * 32 + b"\r\n"),
    (b"GET /v1/models HTTP/1.1", HOST + b"cookie: api_key=" + b"k" * 32 + b"\r\n"),
    (b"GET /v1/models?api_key=" + b"k" * 32 + b" HTTP/1.1", HOST),
)  # fmt: skip
# What is behind the door, in its own words.
BEHIND = (b"owned_by", b"# HELP", b"tokenizer_class", b"num_parameters", b'"openapi"', b"drafters")


REFUSED = (b"400", b"401", b"403", b"404", b"405", b"505")


@pytest.mark.parametrize(("line", "headers"), PROBES, ids=lambda one: repr(one)[:60])
def test_no_wording_of_a_request_gets_in_without_the_key(
    server: Served, line: bytes, headers: bytes
) -> None:
    answer = sent(server, line + b"\r\n" + headers + b"connection: close\r\n\r\n")
    assert not any(words in answer for words in BEHIND), answer[:500]
    assert b"Traceback" not in answer
    assert answer.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")), answer
    is_public = line.startswith(b"GET /health ")
    assert answer[9:12] in ((b"200",) if is_public else REFUSED), answer[:200]


def test_with_the_key_those_words_are_told(server: Served) -> None:
    """Or the test above could not fail."""
    paths = ("/v1/models", "/metrics", "/tokenizer_info", "/outrider/v1/card")
    told = b"".join(server.client.get(path).content for path in paths)
    assert not [words for words in BEHIND if words not in told and words != b'"openapi"']


def test_what_is_watched_for_would_be_seen(tmp_path: Path) -> None:
    program = """if True:
        import pickle, socket
        pickle.loads(pickle.dumps(print))
        try:
            socket.create_connection(("127.0.0.1", 9), 1)
        except OSError:
            pass
    """
    log = hook_into(tmp_path)
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": str(tmp_path)})
    told = {line.partition(" ")[0] for line in log.read_text(encoding="utf-8").splitlines()}
    assert {"pickle.find_class", "socket.connect", "open"} <= told


SMUGGLED = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
CONFUSED = (
    b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    b"content-length: 2\r\ncontent-length: 50\r\n\r\n{}" + SMUGGLED,
    b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    b"content-length: -1\r\n\r\n" + SMUGGLED,
    b"content-length: +2\r\n\r\n{}" + SMUGGLED,
    b"content-length: 0x2\r\n\r\n{}" + SMUGGLED,
    b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + SMUGGLED,
    b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
)


@pytest.mark.parametrize("rest", CONFUSED, ids=lambda one: repr(one)[:60])
def test_lengths_that_disagree_carry_no_second_request_past_the_door(
    server: Served, rest: bytes
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    answer = sent(server, head + b"x-api-key: " + KEY.encode() + b"\r\n" + rest)
    assert b"# HELP" not in answer
    assert b" 500 " not in answer.partition(b"\r\n")[0]


def traversals(secret: Path) -> list[str]:
    """Ways to write the path of a file that is no business of clients'."""
    targets = [str(secret), "/etc/passwd", "etc/passwd", secret.name]
    ups = ["", "/", "../", "../../../../", "..../..../", "..\\..\\", "....//....//", "%2e%2e%2f",
           "%252e%252e%252f", "..%c0%af", "file://", "/proc/self/root"]  # fmt: skip
    ends = ["", "%00", "%00.js", ".js", "?x"]
    found = [up + target + end for target in targets for up in ups for end in ends]
    assert len(found) >= 200
    return found


def test_no_path_of_a_request_is_opened(watcher: Watched) -> None:
    server = watcher.server
    secret = watcher.folder / "secret.txt"
    assert secret.read_text(encoding="utf-8") == CANARY
    watcher.events()
    for one in traversals(secret):
        raw = quote(one, safe="/%?.\\")
        for path in (f"/web/{raw}", f"/v1/models/{raw}", f"/{raw}", f"/v1/responses/{raw}"):
            answer = sent(
                server,
                f"GET {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\n"
                "connection: close\r\n\r\n".encode(),
            )
            assert answer[9:12] in (b"404", b"400"), (path, answer[:200])
            assert CANARY.encode() not in answer
            assert b"root:" not in answer
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for one in (str(secret), "../secret.txt", "/etc/passwd", "file:///etc/passwd"):
        for more in (
            {"model": one},
            {"chat_template": one},
            {"chat_template_kwargs": {"chat_template": one, "template": one}},
            {"speculative": {"drafter": one}},
            {"grammar": f'%import "{one}"\nstart: "x"'},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": one}}}},
            {"messages": [{"role": "user", "content": [{"type": "file", "file": one}]}]},
        ):
            assert CANARY not in server.client.post("/v1/chat/completions", json=body | more).text
    opened = watcher.events("open")
    assert not [one for one in opened if "secret" in one or "passwd" in one], opened


URL = "http://169.254.169.254/latest/meta-data"


def test_no_request_makes_the_server_ask_anybody(watcher: Watched) -> None:
    server = watcher.server
    watcher.events()
    user = [{"role": "user", "content": URL}]
    image = [{"type": "image_url", "image_url": {"url": URL}}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"$ref": URL}}}]
    schema = {"$schema": URL, "$ref": URL}
    asking: tuple[dict[str, Any], ...] = (
        {"model": URL},
        {"model": "someone/some-model"},
        {"messages": [{"role": "user", "content": image}]},
        {"tools": tools, "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"speculative": {"drafter": URL}},
        {"web_search_options": {}},
        {"user": URL, "metadata": {"webhook": URL}, "webhook": URL, "callback_url": URL},
        {"chat_template_kwargs": {"url": URL}},
    )
    for more in asking:
        for path in ("/v1/chat/completions", "/v1/messages"):
            body = {"messages": user, "max_tokens": 2} | more
            assert server.client.post(path, json=body).status_code in (200, 400, 404)
    hosted = {"type": "mcp", "server_url": URL, "server_label": "x"}
    asking = ({"tools": [hosted]}, {"previous_response_id": URL}, {"prompt": {"id": URL}})
    for more in asking:
        body = {"input": URL, "max_output_tokens": 16} | more
        assert server.client.post("/v1/responses", json=body).status_code in (200, 400)
    for headers in ({"origin": URL}, {"referer": URL}, {"x-forwarded-host": "169.254.169.254"}):
        server.client.get("/v1/models", headers=headers)
    asked = watcher.events("socket.connect", "socket.getaddrinfo")
    assert [one for one in asked if "AF_UNIX" not in one] == []


def test_nothing_is_unpickled_and_one_port_listens(watcher: Watched) -> None:
    server = watcher.server
    server.complete("x", max_tokens=2)
    port = int(server.url.rpartition(":")[2])
    assert listening(server.process.pid) == {port}
    assert [one for one in watcher.all() if one.startswith("pickle.find_class")] == []


def listening(pid: int) -> set[int]:
    """Ports on which a process and its children wait for connections."""
    family, inodes = {pid}, set[str]()
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(words[1])
    for _ in parents:
        family |= {child for child, parent in parents.items() if parent in family}
    for one in family:
        try:
            for file in Path(f"/proc/{one}/fd").iterdir():
                inodes.add(str(file.readlink()))
        except OSError:
            continue
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
    }


def test_64_requests_at_once_say_nothing_of_each_other(server: Served) -> None:
    """Each has a word of its own in its prompt. Its text is what it is alone."""

    def asked(index: int) -> str:
        prompt = f"secret_{index:02d}_{index * 7919 % 100003:05d} = {index}\nprint(secret_"
        sampling = {"max_tokens": 24, "temperature": 0.7 * (index % 2), "seed": index}
        headers = {"x-api-key": (KEY, OTHER)[index % 2]}
        body = {"prompt": prompt, **sampling, "ignore_eos": True}
        got = server.client.post("/v1/completions", json=body, headers=headers)
        assert got.status_code == 200, got.text
        return got.json()["choices"][0]["text"]

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(asked, range(64)))
    assert together == [asked(index) for index in range(64)]
    for index, text in enumerate(together):
        others = {f"{other * 7919 % 100003:05d}" for other in range(64) if other != index}
        assert not [word for word in others if word in text]


def test_what_one_key_asked_is_not_in_the_other_ones_cache(server: Served) -> None:
    prompt = "a prompt that is long enough to be kept in memory by its blocks, " * 4

    def cached(key: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1}
        got = server.client.post("/v1/completions", json=body, headers={"x-api-key": key}).json()
        return got["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEY) == 0
    assert cached(KEY) > 0
    assert cached(OTHER) == 0


HOSTILE_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"$ref": "#"}, {"$ref": "#/x"}, {"type": "nothing"}, {"enum": []}, {"pattern": "(a+)+$"},
    {"type": "string", "minLength": 10**9}, {"type": "array", "minItems": 10**9},
    {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"maximum": 1, "minimum": 2},
    {"properties": {str(i): {"type": "string"} for i in range(5000)}},
    {"anyOf": [{"const": str(i)} for i in range(5000)]}, {"required": "x"},
)  # fmt: skip
HOSTILE_GRAMMARS: tuple[dict[str, Any], ...] = (
    *({"guided_regex": regex} for regex in (
        "(a+)+$", "(a|aa)+b", "((a*)*)*", "a{100000}", "(a{1000}){1000}", "(" * 5000, "[", "(?=a)",
        "(a)\\1", "x{1,99999}y{1,99999}", ".*" * 500 + "z", "\\", "(?P<n>", "a" * 70_000, "(?R)",
    )),
    *({"grammar": text} for text in (
        "start: start", "start: a\na: b\nb: a", "start: (start start)*", "root ::= root",
        "start: /(a+)+b/", "start: " + "(" * 3000, "start: " + " | ".join(['"x"'] * 20_000),
        "start: x" + "".join(f"\nx{i}: x{i + 1}" for i in range(2000)), "", "\x00", "start: %json",
        "start: @unknown", 'start: "a"~1..10000000', "root ::= [\\x00-\\uffff]{99999}",
    )),
    *({"guided_json": schema} for schema in HOSTILE_SCHEMAS),
)  # fmt: skip


def test_hostile_grammars_are_errors_of_their_sender(server: Served) -> None:
    assert len(HOSTILE_GRAMMARS) >= 40
    for grammar in HOSTILE_GRAMMARS:
        body = {"prompt": "x", "max_tokens": 2, **grammar}
        got = server.client.post("/v1/completions", json=body)
        assert got.status_code in (200, 400), (str(grammar)[:80], got.text[:300])
        if got.status_code == 400:
            assert len(got.json()["error"]["message"]) < 1000
    assert server.complete("x", max_tokens=1)["choices"]


def test_hundreds_of_slow_clients_keep_nobody_waiting(server: Served) -> None:
    """Half a head each, half a body each, and none that reads."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 200}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: " + KEY.encode()
    kinds = (
        head,
        head + b"\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
        head
        + b"\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body,
    )
    slow = [socket.create_connection((host, int(port)), timeout=30) for _ in range(210)]
    try:
        for i, connection in enumerate(slow):
            # Those that only do not read take places; few of them are let in at once.
            connection.sendall(kinds[i % 2 if i > 8 else 2])
        for _ in range(3):
            assert server.complete("x", max_tokens=1)["choices"]
    finally:
        for connection in slow:
            connection.close()
