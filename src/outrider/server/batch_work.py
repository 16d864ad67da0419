"""The lines of a batch. Each is sent to the server's own application, behind access control and
with less weight than a client's request.

Answers are written to the journals of api/batch_lines.py, so an interrupted batch can be continued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias
from uuid import uuid4

import msgspec
from msgspec import Struct
from starlette.types import ASGIApp, Message

from outrider.api.batch_lines import AnswerFile, RawLine, openai_answer, raw_lines
from outrider.core.fields import shown
from outrider.server.admission import BATCH, Admission

MOST_LINES, _MOST_MISTAKES = 50_000, 100
# While other requests are in flight, 1 / _SHARE of the usual number of lines runs at once.
_SHARE = 8
_LOOK_SECONDS, _RETRY_SECONDS = 0.1, 30.0
Journals: TypeAlias = tuple[AnswerFile, AnswerFile]
Mistake: TypeAlias = dict[str, Any]


class StoppedError(Exception):
    """A batch that ends early; the arguments are its status and mistakes."""


class _Line(Struct):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class Lines:
    """Runs lines of all batches, at most `most` at once, as requests to `app`."""

    def __init__(self, app: ASGIApp, admission: Admission, most: int) -> None:
        self._app, self._admission, self._most = app, admission, most
        self._num_running, self._freed = 0, asyncio.Event()

    async def answer(
        self, source: Path, url: str, key: str, files: Journals, check: Callable[[int], None]
    ) -> None:
        """Answer every line of `source` that has no answer yet; errors go to the second file.
        `check` is called with the number of each line, and may raise to stop the batch."""
        tasks, lines = set[asyncio.Task[None]](), raw_lines(source)

        def look(number: int = 0) -> None:
            for task in [one for one in tasks if one.done()]:
                tasks.remove(task)
                task.result()
            check(number)

        look()
        try:
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                if any(file.has(line) for file in files):
                    continue
                look(line.number)
                while self._num_running >= self._allowed:
                    await self._news()
                    look()
                self._num_running += 1
                task = asyncio.ensure_future(self._line(key, url, line, files))
                task.add_done_callback(self._free)
                tasks.add(task)
            while tasks:
                await self._news()
                look()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _allowed(self) -> int:
        others = any(not key.startswith(BATCH) for key in self._admission.taken)
        return max(1, self._most // _SHARE) if others else self._most

    async def _news(self) -> None:
        """Wait until a line ends, or for a moment."""
        self._freed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._freed.wait(), _LOOK_SECONDS)

    def _free(self, _: object) -> None:
        self._num_running -= 1
        self._freed.set()

    async def _line(self, key: str, url: str, line: RawLine, files: Journals) -> None:
        asked = _read(line)
        status, body = await self._asked(key, url, msgspec.json.encode(asked.body))
        answer = openai_answer(line.number, line.name, asked.custom_id, status, body, None)
        files[status != 200].write(line, answer, is_error=status != 200)

    async def _asked(self, key: str, path: str, data: bytes) -> tuple[int, Any]:
        """Return the status and the answer; repeat the request while the server is busy."""
        length = b"%d" % len(data)
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "outrider.key": BATCH + key,
            "headers": [(b"content-type", b"application/json"), (b"content-length", length)],
        }
        while True:
            sent, received = [data], list[Message]()

            async def receive(sent: list[bytes] = sent) -> Message:
                if not sent:
                    await asyncio.Event().wait()
                return {"type": "http.request", "body": sent.pop(), "more_body": False}

            async def send(message: Message, received: list[Message] = received) -> None:
                received.append(message)

            with suppress(Exception):
                # Starlette has answered and logged the error, and raises it again for servers.
                await self._app(scope | {"outrider.request_id": uuid4().hex}, receive, send)
            status, headers = received[0]["status"], dict(received[0]["headers"])
            if status not in (429, 503):
                body = b"".join(message.get("body", b"") for message in received)
                return status, msgspec.json.decode(body)
            # The server is full, or its engine restarts.
            await asyncio.sleep(min(float(headers.get(b"retry-after", b"1")), _RETRY_SECONDS))


def give_up(source: Path, files: Journals, code: str, message: str) -> None:
    """Write an error for every line of `source` that has no answer."""
    error = {"code": code, "message": message}
    for line in raw_lines(source):
        if any(file.has(line) for file in files):
            continue
        name: str | None = None
        # A line may be invalid: an earlier server may have stopped before it validated all lines.
        with suppress(msgspec.DecodeError, ValueError, RecursionError):
            name = _read(line).custom_id
        answer = openai_answer(line.number, line.name, name, 0, None, error)
        files[1].write(line, answer, is_error=True)


def mistake(code: str, message: str, line: int | None = None) -> Mistake:
    return {"code": code, "message": message, "line": line, "param": None}


def counted(source: Path, url: str, most_bytes: int) -> int:
    """Count the lines of a file. Raises StoppedError if some are no valid requests to `url`."""
    mistakes, names, total = list[Mistake](), set[str](), 0
    for line in raw_lines(source):
        total += 1
        found = _mistake_of(line, url, names, most_bytes)
        if found is not None:
            mistakes.append(mistake(*found, line.number))
        if total > MOST_LINES or len(mistakes) >= _MOST_MISTAKES:
            break
    if total > MOST_LINES:
        mistakes.append(mistake("too_many_tasks", f"there are more than {MOST_LINES:,} lines"))
    if total == 0:
        mistakes.append(mistake("empty_file", "the file has no lines"))
    if mistakes:
        raise StoppedError("failed", *mistakes)
    return total


def _mistake_of(line: RawLine, url: str, names: set[str], most: int) -> tuple[str, str] | None:
    """Return a code and a sentence for an invalid line, None for a valid one."""
    if line.data is None or len(line.data) > most:
        return "invalid_request", f"the line has more than {most:,} bytes"
    try:
        asked = _read(line)
    except msgspec.ValidationError as error:
        return "invalid_request", f"the line is no request: {shown(str(error))}"
    except (ValueError, RecursionError) as error:
        return "invalid_json_line", f"the line is no JSON: {shown(str(error))}"
    if asked.url != url or asked.body.get("stream"):
        words = f"url is not the endpoint of the batch, {url}"
        return "invalid_request", words if asked.url != url else "stream: not allowed in a batch"
    if asked.custom_id in names:
        return "duplicate_custom_id", f"the custom_id {shown(asked.custom_id)} is there twice"
    names.add(asked.custom_id)
    return None


def _read(line: RawLine) -> _Line:
    return msgspec.json.decode((line.data or b"").decode("utf-8-sig"), type=_Line)
