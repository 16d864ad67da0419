"""`/v1/batches` and `/v1/files` of OpenAI's API: requests in files, answered with low priority.

A record is saved at each change of its status, so that the next server continues open batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any, Literal, TypeAlias
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from outrider.core.errors import defect_in, with_hint
from outrider.core.fields import shown
from outrider.core.files import remove
from outrider.plugins.batches.files import Files, file_routes, missing, page
from outrider.plugins.batches.lines import AnswerFile, RawLine, openai_answer, raw_lines
from outrider.server.errors import ApiError
from outrider.server.reply import json_response, read
from outrider.server.site import BATCH, Admission, Site, key_of

MOST_LINES, _MOST_MISTAKES = 50_000, 100
# The lines of a batch. Each is sent to the server's own application, behind access control and with
# less weight than a client's request.
#
# Answers are written to the journals of plugins/batches/lines.py, so an interrupted batch can be
# continued.
# While other requests are in flight, 1 / _SHARE of the usual number of lines runs at once.
_SHARE = 8
_POLL_SECONDS, _RETRY_SECONDS = 0.1, 30.0
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
            await asyncio.wait_for(self._freed.wait(), _POLL_SECONDS)

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


_LOG = logging.getLogger(__name__)
_Pairs: TypeAlias = dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]]
_WINDOW_SECONDS = 24 * 3600
# Limits per key: batches that are not over, and batches that are remembered.
_MOST_OPEN, _MOST_KNOWN = 100, 1_000
_LOOK_SECONDS, _LINES_A_LOOK = 0.1, 64
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
# Errors for the lines that an ended batch has not answered, in OpenAI's words.
_UNANSWERED = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request executed."),
}


class BatchRecord(Struct, kw_only=True):
    """A batch. `times` has the Unix time in seconds at which each status began. `journals` are the
    files of answers and of errors; clients do not see them before the batch is over."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    journals: tuple[str, str]
    metadata: dict[str, str] | None = None
    completion_window: str = "24h"
    object: str = "batch"
    status: str = "validating"
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: dict[str, int] = msgspec.field(
        default_factory=lambda: {"total": 0, "completed": 0, "failed": 0}
    )
    times: dict[str, int] = {}

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed", "cancelled", "expired")

    def shown(self) -> dict[str, Any]:
        """Return the batch as the API shows it."""
        found = msgspec.to_builtins(self)
        del found["journals"], found["times"]
        return found | {f"{name}_at": self.times.get(name) for name in _TIMES}


class BatchBody(Struct, frozen=True, kw_only=True):
    """A request for a batch."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[_Pairs, Meta(max_length=16)] | None = None
    output_expires_after: None = None


class Batches:
    """The batches of a server. Their lines are answered while `run` runs."""

    def __init__(self, site: Site, files: Files, lines: Lines) -> None:
        self.site, self.files, self._lines = site, files, lines
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, dict[str, BatchRecord]] = {}
        for key in files.keys:
            records = reversed(files.records(key, BatchRecord, "batch_"))
            self._known[key] = {record.id: record for record in records}

    async def run(self) -> None:
        """Continue the open batches of an earlier server, and run until this one ends."""
        try:
            for key, records in self._known.items():
                for record in records.values():
                    if not record.is_over:
                        self._start(key, record)
            while not self.site.traffic.ending:
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def of(self, key: str) -> list[BatchRecord]:
        """Return the batches of a key, the newest first."""
        return list(self._known.get(key, {}).values())[::-1]

    def get(self, key: str, name: str) -> BatchRecord:
        """Return a batch. Raises ApiError if this key has no such batch."""
        record = self._known.get(key, {}).get(name)
        if record is None:
            raise missing("batch", name)
        return record

    def uses(self, key: str, file: str) -> bool:
        return any(one.input_file_id == file and not one.is_over for one in self.of(key))

    def create(self, key: str, body: BatchBody) -> BatchRecord:
        """Start a batch. Raises ApiError."""
        self.files.get(key, body.input_file_id)
        known = self._known.setdefault(key, {})
        over = [one.id for one in known.values() if one.is_over]
        if len(known) - len(over) >= _MOST_OPEN:
            words = f"{_MOST_OPEN} batches of this key are not over. Wait for one to end."
            raise ApiError(429, words, code="rate_limit_exceeded", retry_after=60)
        for name in over[: max(0, len(known) + 1 - _MOST_KNOWN)]:
            del known[name]
            remove(self.files.path(key, f"{name}.json"))
        now = int(time.time())
        record = BatchRecord(
            id=f"batch_{token_hex(12)}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            created_at=now,
            expires_at=now + _WINDOW_SECONDS,
            journals=(f"file-{token_hex(12)}", f"file-{token_hex(12)}"),
            metadata=body.metadata,
        )
        self.files.save(key, record.id, record)
        known[record.id] = record
        self._start(key, record)
        return record

    def cancel(self, key: str, name: str) -> BatchRecord:
        """Cancel a batch. Raises ApiError if it is over."""
        record = self.get(key, name)
        if record.status not in ("validating", "in_progress", "cancelling"):
            raise ApiError(409, f"the batch is {record.status}.", code="conflict")
        if record.status != "cancelling":
            self._enter(key, record, "cancelling")
        return record

    def _start(self, key: str, record: BatchRecord) -> None:
        task = asyncio.ensure_future(self._work(key, record))
        self._tasks[record.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(record.id, None))

    def _enter(self, key: str, record: BatchRecord, status: str) -> None:
        record.status = status
        record.times[status] = int(time.time())
        self.files.save(key, record.id, record)

    async def _work(self, key: str, record: BatchRecord) -> None:
        """Run a batch to its end. If this task is cancelled, the next server continues it."""
        source = self.files.path(key, record.input_file_id)
        try:
            if record.status == "validating":
                limit = self.site.limits.body_bytes
                total = await asyncio.to_thread(counted, source, record.endpoint, limit)
                record.request_counts["total"] = total
            if record.status == "validating":
                self._enter(key, record, "in_progress")
            await self._answer(key, record)
            self._finish(key, record, "completed")
        except StoppedError as stopped:
            self._finish(key, record, *stopped.args)
        except Exception as error:  # noqa: BLE001 - other batches go on
            defect = defect_in(error)
            _LOG.error("the batch %s failed: %s", record.id, with_hint(error), exc_info=defect)
            words = "the server could not go on; its log says why"
            self._finish(key, record, "failed", mistake("server_error", words))

    async def _answer(self, key: str, record: BatchRecord) -> None:
        """Answer every line that has no answer. Raises StoppedError."""
        source = self.files.path(key, record.input_file_id)
        answers, errors = (self.files.path(key, name) for name in record.journals)

        def check(number: int) -> None:
            record.request_counts |= {"completed": output.num_answers, "failed": failed.num_answers}
            if record.status == "cancelling":
                raise StoppedError("cancelled")
            if time.time() >= record.expires_at:
                raise StoppedError("expired")
            if number % _LINES_A_LOOK == 1 and self.files.free(key) < 0:
                words = "its answers and files take more than the server keeps for a key"
                raise StoppedError("failed", mistake("storage_limit", words))

        with AnswerFile(answers) as output, AnswerFile(errors) as failed:
            files = output, failed
            try:
                await self._lines.answer(source, record.endpoint, key, files, check)
            except StoppedError as stopped:
                if stopped.args[0] in _UNANSWERED:
                    code, words = _UNANSWERED[stopped.args[0]]
                    await asyncio.to_thread(give_up, source, files, code, words)
                    record.request_counts["failed"] = failed.num_answers
                raise

    def _finish(self, key: str, record: BatchRecord, status: str, *mistakes: Mistake) -> None:
        """Set the final status, and publish the files of answers that are not empty."""
        if status == "completed":
            self._enter(key, record, "finalizing")
        if mistakes:
            record.errors = {"object": "list", "data": mistakes}
        found: list[str | None] = []
        for kind, name in zip(("output", "error"), record.journals, strict=True):
            path = self.files.path(key, name)
            if path.exists() and path.stat().st_size:
                self.files.keep(key, name, f"{record.id}_{kind}.jsonl", "batch_output")
                found.append(name)
            else:
                remove(path)
                found.append(None)
        record.output_file_id, record.error_file_id = found
        self._enter(key, record, status)


BATCH_BODIES: Mapping[str, type[Struct]] = {"/v1/batches": BatchBody}


def batch_routes(batches: Batches) -> list[Route]:
    """`/v1/files` and `/v1/batches`."""

    async def some(request: Request) -> Response:
        key = key_of(request)
        if request.method == "GET":
            return page([one.shown() for one in batches.of(key)], request, 100)
        body, _ = await read(BatchBody, request, batches.site)
        with batches.site.slot(key):
            return json_response(batches.create(key, body).shown())

    async def one(request: Request) -> Response:
        return json_response(batches.get(key_of(request), request.path_params["batch_id"]).shown())

    async def cancel(request: Request) -> Response:
        record = batches.cancel(key_of(request), request.path_params["batch_id"])
        return json_response(record.shown())

    return [
        *file_routes(batches.site, batches.files, batches.uses),
        Route("/v1/batches", some, methods=["GET", "POST"]),
        Route("/v1/batches/{batch_id}", one, methods=["GET"]),
        Route("/v1/batches/{batch_id}/cancel", cancel, methods=["POST"]),
    ]
