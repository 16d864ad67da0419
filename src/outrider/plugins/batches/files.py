"""Uploaded files of clients, as in OpenAI's API: a folder for each key, of limited size.

`file-ID` holds the bytes of a file, and `file-ID.json`, which is written last, its record. Names
chosen by clients are never part of a path.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from email import message_from_bytes
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from outrider.core.errors import ConfigError
from outrider.core.files import (
    FileKind,
    Lock,
    NotPrivateError,
    private_folder,
    read_bytes,
    remove,
    replacing,
    write_private,
)
from outrider.server.errors import ApiError, invalid, refused
from outrider.server.reply import json_response
from outrider.server.site import Site, key_of

T = TypeVar("T", bound=Struct)
MIB = 1 << 20
# Limit per key for the number of files, records and partial uploads.
_MOST_ENTRIES = 20_000
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{24}", re.ASCII)
_HEAD_BYTES, _BORDER_BYTES, _NAME_CHARS = 1 << 12, 74, 255


class FileRecord(Struct, frozen=True, kw_only=True):
    """A file as the API shows it; `created_at` is in seconds of Unix time."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


def missing(kind: str, name: str) -> ApiError:
    return ApiError(404, f"there is no {kind} {name[:60]!r}.", code="not_found")


class Files:
    """Files of all keys below `folder`, at most `most_bytes` for each key. Raises ConfigError for
    a folder that another server uses or that other users may write to."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        try:
            self._folder = private_folder(folder)
            self._lock = Lock(self._folder / "lock", mode=0o600)
        except (NotPrivateError, OSError) as error:
            why = "another server uses it" if isinstance(error, TimeoutError) else str(error)
            raise ConfigError(f"--files {folder}: {why}.", hint="a folder of its own") from None
        self.most_bytes = most_bytes
        self._uploads = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self.close = self._lock.close
        # Partial uploads of an earlier server.
        remove(*self._folder.glob("*/*.part"))

    @property
    def keys(self) -> list[str]:
        """Names of the keys that have a folder; servers without keys use the empty name."""
        found = (path.name for path in self._folder.iterdir() if path.is_dir())
        return ["" if name == "open" else name for name in found]

    def path(self, key: str, name: str) -> Path:
        """Return the path of a file. Raises ApiError if `name` is not a valid id."""
        if not _ID.fullmatch(name.removesuffix(".json")):
            raise missing("file", name)
        folder = self._folder / (key or "open")
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / name

    def records(self, key: str, kind: type[T], prefix: str) -> list[T]:
        """Return all records of one kind, the newest first."""
        found: list[tuple[int, T]] = []
        for path in (self._folder / (key or "open")).glob(f"{prefix}*.json"):
            with suppress(OSError, msgspec.DecodeError):
                data = read_bytes(path, FileKind.SETTINGS)
                found.append((path.stat().st_mtime_ns, msgspec.json.decode(data, type=kind)))
        return [one for _, one in sorted(found, key=lambda pair: pair[0], reverse=True)]

    def get(self, key: str, name: str) -> FileRecord:
        """Return the record of a file. Raises ApiError if this key has no such file."""
        try:
            data = read_bytes(self.path(key, f"{name}.json"), FileKind.SETTINGS)
            return msgspec.json.decode(data, type=FileRecord)
        except (OSError, msgspec.DecodeError):
            raise missing("file", name) from None

    def save(self, key: str, name: str, record: Struct) -> None:
        write_private(self.path(key, f"{name}.json"), msgspec.json.encode(record))

    def keep(self, key: str, name: str, filename: str, purpose: str) -> FileRecord:
        """Write the record of a file whose bytes are already stored."""
        size, now = self.path(key, name).stat().st_size, int(time.time())
        record = FileRecord(id=name, bytes=size, created_at=now, filename=filename, purpose=purpose)
        self.save(key, name, record)
        return record

    def delete(self, key: str, name: str) -> None:
        remove(self.path(key, f"{name}.json"), self.path(key, name))

    def free(self, key: str) -> int:
        """Return the number of bytes that a key may still store. Raises ApiError."""
        sizes: list[int] = []
        for path in (self._folder / (key or "open")).glob("*"):
            with suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        if len(sizes) > _MOST_ENTRIES:
            raise ApiError(413, "too many files. Delete some.", code="storage_limit")
        return self.most_bytes - sum(sizes)

    async def upload(self, key: str, request: Request) -> FileRecord:
        """Store the file of an uploaded form. Raises ApiError."""
        name = f"file-{token_hex(12)}"
        draft = self.path(key, name).with_suffix(".part")
        async with self._uploads[key]:
            free = await asyncio.to_thread(self.free, key)
            try:
                with draft.open("x+b") as form:
                    async for chunk in request.stream():
                        free -= len(chunk)
                        # Read to the end: a client that still sends would miss an earlier error.
                        if free >= 0:
                            form.write(chunk)
                    if free < 0:
                        words = f"a key's files have {self.most_bytes // MIB:,} MiB. Delete some."
                        raise ApiError(413, words, code="storage_limit")
                    form.flush()
                    kind = request.headers["content-type"]
                    return await asyncio.to_thread(self._stored, key, name, form, kind)
            except ClientDisconnect:
                raise _no_form("it breaks off") from None
            except OSError:
                self.delete(key, name)
                raise ApiError(507, "the file cannot be stored.", code="storage_full") from None
            finally:
                remove(draft)

    def _stored(self, key: str, name: str, form: BinaryIO, kind: str) -> FileRecord:
        if not os.fstat(form.fileno()).st_size:
            raise _no_form("it is empty")
        with mmap.mmap(form.fileno(), 0, access=mmap.ACCESS_READ) as data:
            fields = _fields(data, kind)
            filename, start, end = fields.get("file", (None, 0, 0))
            _check(filename, {one: data[i : min(j, i + 64)] for one, (_, i, j) in fields.items()})
            with replacing(self.path(key, name)) as part, part.open("xb") as out:
                for at in range(start, end, MIB):
                    out.write(data[at : min(end, at + MIB)])
                out.flush()
                os.fsync(out.fileno())
        return self.keep(key, name, filename or "file", "batch")


def _check(filename: str | None, fields: Mapping[str, bytes]) -> None:
    name = filename or ""
    if not name.isprintable() or not 0 < len(name) <= _NAME_CHARS:
        words = f"it is missing, or its name does not have 1 to {_NAME_CHARS} characters."
        raise invalid("file", words)
    if fields.get("purpose") != b"batch":
        raise invalid("purpose", "files are for batches here. Send purpose=batch.")
    if any(name.startswith("expires_after") for name in fields):
        raise refused("expires_after", "files stay until they are deleted. Delete them yourself.")


def _fields(data: mmap.mmap, kind: str) -> dict[str, tuple[str | None, int, int]]:
    """Parse a form of Content-Type `kind`. Return for each field the name of its file, if it has
    one, and the begin and end of its bytes. Raises ApiError."""
    # Not python-multipart: it accepts a truncated form, and it would run in the event loop.
    header = message_from_bytes(b"content-type: " + kind.encode("latin-1"))
    border = b"\r\n--" + str(header.get_param("boundary", "")).encode("latin-1", "replace")
    if not 4 < len(border) <= _BORDER_BYTES:
        raise _no_form("its boundary is missing or too long")
    found: dict[str, tuple[str | None, int, int]] = {}
    # The first border may be the body's beginning.
    at = data.find(border[2:]) - 2
    if at < -2:
        raise _no_form("it has no border")
    while data[(at := at + len(border)) : at + 2] != b"--":
        start = data.find(b"\r\n\r\n", at, at + _HEAD_BYTES) + 4
        end = data.find(border, start)
        if start < 4 or end < 0:
            raise _no_form("it breaks off")
        name, file = _field_of(data[at : start - 4])
        found[name], at = (file, start, end), end
    return found


def _field_of(head: bytes) -> tuple[str, str | None]:
    """Return the names of a field and of its file."""
    if not head.startswith(b"\r\n"):
        raise _no_form("a border does not end its line")
    headers = message_from_bytes(head[2:] + b"\r\n\r\n")
    name = headers.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise _no_form("a field has no name")
    return name, headers.get_filename()


def _no_form(why: str) -> ApiError:
    return ApiError(400, f"the body is no form: {why}.", code="bad_body")


def file_routes(site: Site, files: Files, in_use: Callable[[str, str], bool]) -> list[Route]:
    """Return the routes of `/v1/files`. A file that is `in_use` cannot be deleted."""

    async def some(request: Request) -> Response:
        key = key_of(request)
        if request.method == "POST":
            with site.slot(key):
                return json_response(await files.upload(key, request))
        records = await asyncio.to_thread(files.records, key, FileRecord, "file-")
        purpose = request.query_params.get("purpose")
        found = [one for one in records if purpose in (None, one.purpose)]
        return page(list(map(msgspec.to_builtins, found)), request, 10_000)

    async def one(request: Request) -> Response:
        key, name = key_of(request), request.path_params["file_id"]
        record = files.get(key, name)
        if request.method != "DELETE":
            return json_response(record)
        if in_use(key, name):
            words = "a batch that is not over reads the file. Cancel it first."
            raise ApiError(409, words, code="conflict")
        files.delete(key, name)
        return json_response({"id": name, "object": "file", "deleted": True})

    async def content(request: Request) -> Response:
        key, name = key_of(request), request.path_params["file_id"]
        files.get(key, name)
        return FileResponse(files.path(key, name), media_type="application/octet-stream")

    return [
        Route("/v1/files", some, methods=["GET", "POST"]),
        Route("/v1/files/{file_id}", one, methods=["GET", "DELETE"]),
        Route("/v1/files/{file_id}/content", content, methods=["GET"]),
    ]


def page(records: list[dict[str, Any]], request: Request, most: int) -> Response:
    """Answer with at most `limit` of the records, those that follow the id `after`. `records` are
    given newest first; with `order` "asc" they are reversed. Raises ApiError."""
    limit, after = request.query_params.get("limit", str(most)), request.query_params.get("after")
    if (order := request.query_params.get("order", "desc")) not in ("asc", "desc"):
        raise invalid("order", "asc or desc.")
    records = records if order == "desc" else records[::-1]
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise invalid("limit", f"1 to {most}.")
    names = [one["id"] for one in records]
    if after is not None and after not in names:
        raise invalid("after", "there is no such id.")
    start = 0 if after is None else names.index(after) + 1
    shown = records[start : start + int(limit)]
    more = start + len(shown) < len(records)
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    return json_response({"object": "list", "data": shown, **ends, "has_more": more})
