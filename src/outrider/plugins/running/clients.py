"""HTTP client of a server, for `outrider top` and for comparisons with other servers.

Requests go to the address that the caller names and nowhere else: no proxy is used and no redirect
is followed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse
from typing import IO, Any, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from outrider.core.errors import ConfigError, MachineError, SilentError

MAX_BYTES = 16 << 20
_FIRST_WAIT_SECONDS = 0.2
# Busy or starting: the same request may succeed a moment later.
_RETRIED = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """An HTTP server. A failed request is repeated up to `retries` times, each time after twice the
    wait; `wait` is the function that sleeps. One that took all the time is not repeated. Raises
    ConfigError for an address without http(s)."""

    url: str
    timeout_seconds: float = 10.0
    retries: int = 0
    api_key: str = ""
    wait: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port  # raises for one that is no number
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(
                f"{self.url!r} is not the address of a server.", hint="http://localhost:8000"
            )

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        """The JSON object at `path`; a `body` is posted. Raises MachineError, or SilentError."""
        left, pause = self.retries, _FIRST_WAIT_SECONDS
        while True:
            try:
                with self._opened(path, body) as answer:
                    return _object(answer.url, answer.read(MAX_BYTES + 1))
            except _NoAnswerError as error:
                if not left:
                    tries = f" ({self.retries + 1} tries)" if self.retries else ""
                    raise self._unanswered(path, f"{error}{tries}") from None
            self.wait(pause)
            left, pause = left - 1, 2 * pause

    def lines(self, path: str, body: Mapping[str, object] | None) -> Generator[str]:
        """The lines of an answer that is sent in pieces, each as soon as it arrives; a `body` is
        posted once. Raises MachineError."""
        size = 0
        try:
            with self._opened(path, body) as answer:
                while line := answer.readline(MAX_BYTES + 1):
                    size += len(line)
                    if size > MAX_BYTES:
                        raise _too_long(self.url + path)
                    yield line.decode(errors="replace").rstrip("\r\n")
        except _NoAnswerError as error:
            raise self._unanswered(path, str(error)) from None

    def _unanswered(self, path: str, why: str) -> MachineError:
        why = f"no answer from {self.url}{path}: {why}."
        return MachineError(why, hint="is the server running?")

    @contextmanager
    def _opened(self, path: str, body: Mapping[str, object] | None) -> Generator[HTTPResponse]:
        """The answer to read. Raises _NoAnswerError for a failure that may be retried."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url.rstrip("/") + path, data, headers)
        opener = build_opener(ProxyHandler({}), _NoRedirect())
        try:
            with opener.open(request, timeout=self.timeout_seconds) as answer:
                yield answer
        except HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace").strip()
            if error.code in _RETRIED:
                raise _NoAnswerError(f"it answered {error.code}") from None
            raise MachineError(
                f"{request.full_url} answered {error.code} {error.reason}: {said}"
            ) from None
        except (URLError, OSError, HTTPException) as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, TimeoutError):
                why = f"{request.full_url} timed out after {self.timeout_seconds:g} seconds."
                raise SilentError(why, hint="is the server loading, or busy?") from None
            raise _NoAnswerError(str(cause) or type(error).__name__) from None


class _NoAnswerError(Exception):
    """No answer this time."""


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        del req, fp, code, msg, headers, newurl


def _object(url: str, answer: bytes) -> dict[str, Any]:
    if len(answer) > MAX_BYTES:
        raise _too_long(url)
    try:
        data: object = json.loads(answer)
    except (ValueError, RecursionError):
        raise MachineError(f"{url} did not answer with JSON.") from None
    if not isinstance(data, dict):
        raise MachineError(f"{url} did not answer with a JSON object.")
    return cast("dict[str, Any]", data)


def _too_long(url: str) -> MachineError:
    return MachineError(f"{url} answered with more than {MAX_BYTES} bytes.")
