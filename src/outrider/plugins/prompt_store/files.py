"""The folder of a prompt store, and the format of its files.

    FOLDER/prompt-store.json                    {"format": 1}
    FOLDER/MODEL/model.json                     what MODEL, a digest, stands for (identity.py)
    FOLDER/MODEL/ab/abcd...-INDEX.page          keys and values (or .state: recurrent states)

A file of pages or states has, in this order: 8 bytes `OUTRPAGE`, the length of the header (4 bytes,
little-endian), the header (JSON in ASCII, with blanks up to a multiple of 64), the parts that it
lists, and the SHA-256 of all bytes before. A file is written under another name and then renamed,
and never changes after that; so a reader sees all of it or nothing, however a writer ends. It is
not flushed to the disk: what a power cut leaves of it has a wrong checksum, and is not used. It is
read into memory of the reader's own, since a mapped file that another program cuts short would end
the process. Only bytes that were checked are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider.cache.pages import PageName, Part, digest_after
from outrider.core.errors import ConfigError, reason_of
from outrider.core.fields import size
from outrider.core.files import (
    FileKind,
    Lock,
    NotPrivateError,
    open_regular,
    private_folder,
    read_json,
    write_private,
)

FORMAT = 1
KINDS = ("page", "state")
MARKER, ABOUT = "prompt-store.json", "model.json"
DEFAULT_BYTES = 10_000_000_000
LEAST_BYTES = 1_000_000
_MAGIC, _ALIGNED, _DIGEST = b"OUTRPAGE", 64, 32
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", re.IGNORECASE)
# What may have been meant as a size: a folder whose name ends so needs a size behind it.
_LIKE_SIZE = re.compile(r"[-+]?\.?\d[^/]*")
_FILE = re.compile(r"([0-9a-f]{64})-(\d+)\.(page|state)")
_MODEL = re.compile(r"[0-9a-f]{32}")
# Shares of the bound: from where on files are deleted, and down to where. Every process looks
# whenever it has written the last share.
_FULL, _EMPTIED, _LOOK = 7 / 8, 3 / 4, 1 / 64
# Seconds after which a file that was never finished belongs to a process that has ended.
_ABANDONED = 600


class DamagedError(Exception):
    """A file that is not what its name says; the message is a phrase with the reason."""


def parsed(text: str) -> tuple[Path, int]:
    """The folder and the most bytes of `FOLDER[:SIZE]`. Raises ConfigError."""
    folder, colon, words = text.rpartition(":")
    found = _SIZE.fullmatch(words.strip()) if colon else None
    if found is None and not (colon and _LIKE_SIZE.fullmatch(words.strip())):
        return _expanded(text), DEFAULT_BYTES
    unit = 0 if found is None else " KMGT".index(found[2].upper() or " ")
    base = 1000 if found is None or not found[3] else 1024
    most = 0 if found is None else int(float(found[1]) * base**unit)
    if not folder or most < LEAST_BYTES:
        named = f"{words!r}, which is no size" if found is None else "too small a size"
        raise ConfigError(
            f"prompt_store: {text!r} names {named if folder else 'no folder'}.",
            hint=f"--prompt-store ~/prompts:20GB; at least {size(LEAST_BYTES)}",
        )
    return _expanded(folder), most


def _expanded(folder: str) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        why = f"prompt_store: {folder!r} names the home folder of an unknown user."
        raise ConfigError(why, hint="--prompt-store ~/prompts") from None


def header_of(kind: str, model: str, name: PageName, parts: Sequence[Part]) -> bytes:
    """The beginning of a file, up to its parts."""
    fields = {
        "format": FORMAT,
        "kind": kind,
        "model": model,
        "digest": name.digest,
        "before": name.before,
        "index": name.index,
        "tokens": name.tokens,
        "parts": [list(part.shape) for part in parts],
    }
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    length = -(-(len(_MAGIC) + 4 + len(text)) // _ALIGNED) * _ALIGNED - len(_MAGIC) - 4
    return _MAGIC + length.to_bytes(4, "little") + text.ljust(length)


def check_file(path: Path) -> None:
    """Check a file by itself. Raises DamagedError, and OSError if it cannot be read."""
    named = _FILE.fullmatch(path.name)
    with open_regular(path) as file:
        data = file.read()
    start = len(_MAGIC) + 4
    end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    if len(data) < end + _DIGEST or hashlib.sha256(data[:-_DIGEST]).digest() != data[-_DIGEST:]:
        raise DamagedError("its checksum is wrong")
    try:
        header = json.loads(data[start:end])
        digest = digest_after(header["before"], header["tokens"])
        named_in = (header["digest"], str(header["index"]), header["kind"], header["model"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error):
        raise DamagedError("its header is not that of a page") from None
    if named is None or named_in != (*named.groups(), path.parent.parent.name):
        raise DamagedError("it has the name of another page")
    if digest != header["digest"]:
        raise DamagedError("its tokens are those of another page")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A page or a state on disk; `used` is the time of its last use in nanoseconds."""

    path: Path
    kind: str
    model: str
    index: int
    num_bytes: int
    used: int


class StoreFolder:
    """The files of all models in one folder, bounded by `most_bytes`. Methods raise OSError."""

    def __init__(self, folder: Path, most_bytes: int = DEFAULT_BYTES) -> None:
        self.folder = folder
        self._root = str(folder)
        self.most_bytes = most_bytes
        self._unseen = most_bytes

    @classmethod
    def opened(cls, text: str, *, create: bool = True) -> StoreFolder:
        """The store of the setting `text`, made if need be. Raises ConfigError for a folder that
        is none, that others may write to, or that cannot be made."""
        folder, most_bytes = parsed(text)
        hint = "name a new or empty folder: --prompt-store ~/prompts"
        if not create and not folder.is_dir():
            raise ConfigError(f"there is no prompt store {folder}.", hint="name one that exists")
        try:
            folder = private_folder(folder.resolve())
            marker = folder / MARKER
            if not marker.exists():
                # Another process may be making the same store, or was killed while it did.
                own = (MARKER, f".{MARKER}.")
                others = any(not one.name.startswith(own) for one in folder.iterdir())
                if others and not marker.exists():
                    raise ConfigError(f"{folder} holds other files than a prompt store.", hint=hint)
                write_private(marker, json.dumps({"format": FORMAT}).encode())
            if read_json(marker, FileKind.SETTINGS) != {"format": FORMAT}:
                why = f"{folder} has a format of prompts that this version does not read."
                raise ConfigError(why, hint=hint)
        except ConfigError:
            raise  # one is a ValueError
        except (OSError, NotPrivateError, ValueError, RuntimeError) as error:
            raise ConfigError(f"prompt_store: {folder}: {reason_of(error)}.", hint=hint) from error
        return cls(folder, most_bytes)

    def path(self, kind: str, model: str, name: PageName) -> Path:
        return Path(self._path(kind, model, name.digest, name.index))

    def has(self, kind: str, model: str, digest: str, index: int) -> bool:
        return os.path.exists(self._path(kind, model, digest, index))  # noqa: PTH110 - faster

    def _path(self, kind: str, model: str, digest: str, index: int) -> str:
        return f"{self._root}/{model}/{digest[:2]}/{digest}-{index}.{kind}"

    def describe(self, model: str, about: object) -> None:
        """Say in the folder of a model what it is."""
        file = self.folder / model / ABOUT
        file.parent.mkdir(mode=0o700, exist_ok=True)
        if not file.exists():
            write_private(file, json.dumps(about, indent=1).encode())

    def read(self, kind: str, model: str, name: PageName, parts: Sequence[Part]) -> None:
        """Fill `parts` from their file. Raises DamagedError if any byte of it is wrong."""
        header = header_of(kind, model, name, parts)
        num_bytes = len(header) + sum(part.size for part in parts) + _DIGEST
        with open_regular(self.path(kind, model, name)) as file:
            data = file.read(num_bytes + 1)
        if len(data) != num_bytes:
            raise DamagedError("it has another length")
        if hashlib.sha256(memoryview(data)[:-_DIGEST]).digest() != data[-_DIGEST:]:
            raise DamagedError("its checksum is wrong")
        if not data.startswith(header):
            raise DamagedError("it is another page's")
        start = len(header)
        for part in parts:
            stored = np.frombuffer(data, np.uint8, part.size, start)
            np.copyto(part, stored.reshape(part.shape))
            start += part.size

    def write(
        self,
        kind: str,
        model: str,
        name: PageName,
        parts: Sequence[Part],
        used: int,
        about: object = None,
    ) -> None:
        """Write a file, and delete the longest unused ones if the store is full. The folder of the
        model says what it is `about`."""
        path = self.path(kind, model, name)
        pieces: list[bytes | memoryview] = [header_of(kind, model, name, parts)]
        pieces += (np.ascontiguousarray(part).reshape(-1).data for part in parts)
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece)
        pieces.append(digest.digest())
        try:
            write_private(path, *pieces, flush=False)
        except FileNotFoundError:
            # The first file, or another process has emptied the store meanwhile. Its own folder
            # must be there.
            self.describe(model, about)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_private(path, *pieces, flush=False)
        self.touch(path, used)
        self._unseen += sum(map(len, pieces))
        if self._unseen > self.most_bytes * _LOOK:
            self._unseen = 0
            self.make_space()

    def touch(self, path: Path, used: int) -> None:
        """Note the time of a use, in nanoseconds."""
        with suppress(FileNotFoundError):
            os.utime(path, ns=(used, used))

    def files(self) -> Iterator[StoredFile]:
        """Yield all pages and states. Other processes may write and delete some meanwhile."""
        for model, path in self._paths():
            named = _FILE.fullmatch(path.name)
            if named is not None:
                with suppress(FileNotFoundError):
                    found = path.stat()
                    taken = 512 * found.st_blocks or found.st_size
                    yield StoredFile(path, named[3], model, int(named[2]), taken, found.st_mtime_ns)

    def models(self) -> list[str]:
        return sorted(one.name for one in self.folder.iterdir() if _MODEL.fullmatch(one.name))

    def _paths(self) -> Iterator[tuple[str, Path]]:
        for model in self.models():
            for folder in _listed(self.folder / model):
                yield from ((model, path) for path in _listed(folder))

    def make_space(self) -> int:
        """Delete the longest unused files if the store is nearly full, those at the ends of texts
        first; return how many. One process at a time does that."""
        try:
            lock = Lock(self.folder / ".lock", mode=0o600)
        except TimeoutError:
            return 0
        try:
            self._clean()
            found = sorted(self.files(), key=lambda one: (one.used, -one.index))
            now = time.time_ns()
            for one in found:
                if one.used > now:  # the clock was set back; else it would stay for too long
                    self.touch(one.path, now)
            left = sum(one.num_bytes for one in found)
            if left <= self.most_bytes * _FULL:
                return 0
            for number, one in enumerate(found):
                if left <= self.most_bytes * _EMPTIED:
                    return number
                one.path.unlink(missing_ok=True)
                left -= one.num_bytes
            return len(found)
        finally:
            lock.close()

    def _clean(self) -> None:
        """Delete files that were never finished."""
        for _, path in self._paths():
            if path.suffix == ".part":
                with suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > _ABANDONED:
                        path.unlink()

    def clear(self) -> tuple[int, int]:
        """Delete all pages and states; return their number and bytes."""
        found = list(self.files())
        for one in found:
            one.path.unlink(missing_ok=True)
        self._clean()
        for model in self.models():
            for folder in _listed(self.folder / model):
                with suppress(OSError):
                    folder.rmdir() if folder.is_dir() else folder.unlink()
            with suppress(OSError):
                (self.folder / model).rmdir()
        return len(found), sum(one.num_bytes for one in found)

    def verify(self) -> Iterator[tuple[StoredFile, str]]:
        """Check every file; yield it with the reason if it is damaged, else with "". Damaged ones
        are deleted; one that cannot be read is not."""
        for one in self.files():
            try:
                check_file(one.path)
            except FileNotFoundError:
                continue
            except DamagedError as error:
                one.path.unlink(missing_ok=True)
                yield one, f"{error}; deleted"
            except OSError as error:
                yield one, f"it cannot be read: {reason_of(error)}"
            else:
                yield one, ""


def _listed(folder: Path) -> list[Path]:
    """The entries of a folder; none if another process deleted it, or if it is no folder."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return list(folder.iterdir())
    return []
