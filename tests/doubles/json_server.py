"""HTTP servers on this machine: one that answers what a test wrote down, and a hub of models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: method and path, its JSON body if it had one, and who it said it was."""

    what: str
    body: Any
    authorization: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """`text` is sent as it is."""

    text: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, value: object, status: int = 200) -> Answer:
        return cls(json.dumps(value).encode(), status)


@dataclass(slots=True)
class JsonServer:
    """`answers` maps "GET /path" to what comes back; of a list, one answer a request, the last one
    for ever."""

    url: str
    answers: dict[str, list[Answer]]
    asked: list[Asked] = field(default_factory=list[Asked])

    def answer(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        left = self.answers.get(asked.what)
        if left is None:
            return Answer.of({"error": "no such page"}, 404)
        return left.pop(0) if len(left) > 1 else left[0]


@contextmanager
def serving(answers: Mapping[str, Answer | list[Answer]]) -> Generator[JsonServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    listed = {
        what: list(found) if isinstance(found, list) else [found] for what, found in answers.items()
    }
    double = JsonServer(f"http://127.0.0.1:{server.server_port}", listed)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._respond()

        def do_POST(self) -> None:
            self._respond()

        def _respond(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(size)) if size else None
            asked = Asked(f"{self.command} {self.path}", body, self.headers.get("Authorization"))
            answer = double.answer(asked)
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(answer.text)))
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.text)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: tests read stderr."""

    server.RequestHandlerClass = Handler
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


COMMIT = "1" * 40
# Bytes of a file that is longer than announced.
MUCH = 1 << 25
# The hub keeps such files outside git.
LARGE = (".safetensors", ".bin", ".gguf")


@dataclass(frozen=True, slots=True)
class Repo:
    """`status` other than 200 is what every question about it is answered with; `facts` stand in
    place of true ones."""

    files: Mapping[str, bytes]
    commit: str = COMMIT
    gated: bool = False
    status: int = 200
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class HubServer:
    """`asked` has what was asked, as in "GET /org/name/resolve/main/config.json bytes=5-"; of
    files in `damaged` other bytes are sent, of those in `longer` many more. With `ranges` off all
    of a file comes every time."""

    url: str
    repos: dict[str, Repo]
    asked: list[str] = field(default_factory=list[str])
    damaged: set[str] = field(default_factory=set[str])
    longer: set[str] = field(default_factory=set[str])
    ranges: bool = True

    def fetched(self, file: str) -> list[str]:
        return [line for line in self.asked if line.startswith("GET") and f"/{file} " in line]


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, value: object) -> Reply:
        return cls(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    @classmethod
    def refusal(cls, status: int, code: str) -> Reply:
        return cls(status, b"{}", {"X-Error-Code": code})


def blob(name: str, content: bytes) -> str:
    kind = hashlib.sha256 if name.endswith(LARGE) else hashlib.sha1
    return kind(content).hexdigest()


def answer(hub: HubServer, path: str, wanted: str) -> Reply:
    """`wanted` is the header that asks for a part of a file."""
    parts = unquote(path.partition("?")[0]).strip("/").split("/")
    is_api = parts[:2] == ["api", "models"]
    owner, name, *rest = parts[2:] if is_api else parts
    repo = hub.repos.get(f"{owner}/{name}")
    if repo is None:
        return Reply.refusal(401, "RepoNotFound")
    if repo.status != 200:
        return Reply(repo.status, b"{}")
    if is_api:
        return _about(repo, f"{owner}/{name}", rest)
    if repo.gated:
        return Reply.refusal(403, "GatedRepo")
    return _file(hub, repo, "/".join(rest[2:]), wanted)


def _about(repo: Repo, name: str, rest: list[str]) -> Reply:
    if rest == ["auth-check"]:
        return Reply.refusal(403, "GatedRepo") if repo.gated else Reply.of({})
    if rest[0] in ("tree", "revision") and "/".join(rest[1:]) not in ("main", repo.commit):
        return Reply.refusal(404, "RevisionNotFound")
    if rest[0] == "tree":
        return Reply.of([_entry(file, content) for file, content in repo.files.items()])
    siblings = [
        {"rfilename": file, "size": len(content), "blobId": blob(file, content)}
        | ({"lfs": _large(file, content)} if file.endswith(LARGE) else {})
        for file, content in repo.files.items()
    ]
    gated = "auto" if repo.gated else False
    facts: dict[str, Any] = {"id": name, "sha": repo.commit, "gated": gated, "siblings": siblings}
    return Reply.of({**facts, **repo.facts})


def _entry(file: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": file, "size": len(content), "oid": blob(file, content)}
    return entry | (
        {"lfs": {"oid": blob(file, content), "size": len(content), "pointerSize": 130}}
        if file.endswith(LARGE)
        else {}
    )


def _large(file: str, content: bytes) -> dict[str, Any]:
    return {"sha256": blob(file, content), "size": len(content), "pointerSize": 130}


def _file(hub: HubServer, repo: Repo, file: str, wanted: str) -> Reply:
    content = repo.files.get(file)
    if content is None:
        return Reply.refusal(404, "EntryNotFound")
    headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{blob(file, content)}"'}
    if file in hub.damaged:
        content = b"\xff" * len(content)
    if file in hub.longer:
        content = content.ljust(MUCH, b" ")
    if not wanted or not hub.ranges:
        return Reply(200, content, headers)
    start = int(wanted.removeprefix("bytes=").partition("-")[0])
    within = f"bytes {start}-{len(content) - 1}/{len(content)}"
    return Reply(206, content[start:], headers | {"Content-Range": within})


@contextmanager
def serving_hub(repos: Mapping[str, Repo]) -> Generator[HubServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    hub = HubServer(f"http://127.0.0.1:{server.server_port}", dict(repos))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._respond()

        def do_HEAD(self) -> None:
            self._respond()

        def _respond(self) -> None:
            wanted = self.headers.get("Range", "")
            hub.asked.append(f"{self.command} {self.path} {wanted}")
            reply = answer(hub, self.path, wanted)
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(reply.body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: tests read stderr."""

    server.RequestHandlerClass = Handler
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
