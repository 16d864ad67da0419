"""A small HTTP server on this machine that answers what a test wrote down, and remembers."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


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
