"""`/v1/batches` and `/v1/files` of OpenAI's API: requests in files, answered with low priority.

A record is saved at each change of its status, so that the next server continues open batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from secrets import token_hex
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.api.batch_lines import AnswerFile
from outrider.core.errors import with_hint
from outrider.core.files import remove
from outrider.server.batch_work import Lines, Mistake, StoppedError, counted, give_up, mistake
from outrider.server.errors import ApiError
from outrider.server.files import Files, file_routes, missing, page
from outrider.server.site import Site, key_of
from outrider.server.wire import json_response, read

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
            _LOG.error("the batch %s failed: %s", record.id, with_hint(error))
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
