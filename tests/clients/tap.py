"""A tap on the line: it forwards each request to a server and keeps both sides of it.

Clients that are programs of their own say little of what was sent; here a test can look. Whatever
they ask of other hosts comes to `elsewhere` and is let nowhere.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_OF_ONE_HOP = ("connection", "keep-alive", "transfer-encoding", "proxy-connection", "host")
_SECONDS = 300


@dataclass(slots=True)
class Exchange:
    """A request and its answer, so far as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int = 0
    answer: bytes = b""

    @property
    def asked(self) -> Any:
        return json.loads(self.body)

    @property
    def told(self) -> Any:
        return json.loads(self.answer)

    @property
    def events(self) -> list[Any]:
        """Of a stream, the data of its events."""
        lines = self.answer.decode().splitlines()
        found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(one) for one in found if one != "[DONE]"]

    @property
    def chat_text(self) -> str:
        """The text of a streamed chat completion."""
        deltas = [event["choices"][0]["delta"] for event in self.events if event["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)


@dataclass(slots=True)
class Tap:
    """`url` is the way to the server at `target`. Pieces of a stream that begin with one of
    `withheld` do not reach the client."""

    target: str
    url: str = ""
    kept: list[Exchange] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    withheld: tuple[bytes, ...] = ()

    def to(self, path: str) -> list[Exchange]:
        """Requests of a path, whatever their query."""
        return [one for one in self.kept if urlsplit(one.path).path == path]

    @property
    def failed(self) -> list[str]:
        found = [one for one in self.kept if not 200 <= one.status < 300]
        return [f"{one.method} {one.path}: {one.status} {one.answer[:300]!r}" for one in found]


@contextmanager
def tapped(target: str) -> Generator[Tap]:
    tap = Tap(target)

    class Handler(_Handler):
        kept_in = tap

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        tap.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield tap
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    kept_in: Tap

    def _forward(self) -> None:
        if not self.path.startswith("/"):
            self._refuse()
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {k.lower(): v for k, v in self.headers.items() if k.lower() not in _OF_ONE_HOP}
        exchange = Exchange(self.command, self.path, headers, body)
        self.kept_in.kept.append(exchange)
        host = urlsplit(self.kept_in.target).netloc
        line = http.client.HTTPConnection(host, timeout=_SECONDS)
        try:
            line.request(self.command, self.path, body or None, headers)
            answer = line.getresponse()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _OF_ONE_HOP:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            exchange.status = answer.status
            while piece := answer.read1(1 << 16):
                exchange.answer += piece
                if not piece.startswith(self.kept_in.withheld):
                    self.wfile.write(piece)
        except ConnectionError:
            return
        finally:
            line.close()
            self.close_connection = True

    def _refuse(self) -> None:
        self.kept_in.elsewhere.append(f"{self.command} {self.path}")
        self.send_error(502)

    do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = do_OPTIONS = _forward
    do_CONNECT = _refuse

    def log_message(self, *_: object) -> None:
        """Tests say what went wrong."""
