"""File access of the package: regular files of bounded size, private files, locks, new folders.

A model folder, or a file that a user names, may hold anything: a pipe blocks its reader for ever, a
device has no end, and a huge file fills memory. So every file is opened as a regular file, and each
kind of file has a bound. Errors are OSErrors whose `strerror` reads well after a path.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import tempfile
import time
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast

from outrider.core.errors import ConfigError, MachineError, reason_of
from outrider.core.process import system_number

_MIB = 1 << 20
# Most JSON values in one file: in memory each takes up to 100 bytes, for two or three in the file.
MAX_JSON_VALUES = 1 << 23
_OTHERS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class FileKind(Enum):
    """The purpose of a file, and the largest size in bytes of files of this kind."""

    CONFIG = ("a model's configuration", 4 * _MIB)
    INDEX = ("an index of weights", 64 * _MIB)
    TOKENIZER = ("a tokenizer", 128 * _MIB)
    TEMPLATE = ("a chat template", _MIB)
    HEADER = ("a header of weights", 32 * _MIB)
    SETTINGS = ("a settings file", _MIB)
    SHEET = ("a device sheet", _MIB)
    CALIBRATION = ("a calibration", 16 * _MIB)
    PROMPTS = ("a file of prompts", 256 * _MIB)
    RESULTS = ("a results file", 256 * _MIB)
    TEXT = ("a text to learn from", 4096 * _MIB)
    GRAMMAR = ("a schema or a grammar", _MIB)
    PICTURE = ("a picture", 16 * _MIB)
    LIBRARY = ("compiled kernels", 64 * _MIB)
    SYSTEM = ("a file of the system", 16 * _MIB)

    def __init__(self, what: str, max_bytes: int) -> None:
        self.what = what
        self.max_bytes = max_bytes

    @classmethod
    def of(cls, path: Path) -> FileKind:
        """The kind of a JSON file in the folder of a model."""
        if path.name in ("tokenizer.json", "tokenizer_config.json"):
            return cls.TOKENIZER
        return cls.INDEX if path.name.endswith(".index.json") else cls.CONFIG


def open_regular(path: Path) -> BinaryIO:
    """A stream of the bytes of a regular file. Raises OSError for anything else."""
    # Checked before opening as well: to open some devices is to use them.
    _check(os.stat(path).st_mode, path)  # noqa: PTH116 - as fstat below
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, kind: FileKind) -> bytes:
    """The bytes of a file. Raises OSError if it cannot be read or is larger than its kind may."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= kind.max_bytes:
            data = stream.read(size + 1)
            # System files report size 0, and others may grow while they are read.
            while len(data) > size and (more := stream.read(_MIB)):
                data += more
                size = len(data) - 1
                if size >= kind.max_bytes:
                    break
            if len(data) <= kind.max_bytes:
                return data
    raise OSError(
        errno.EFBIG,
        f"it has more than the {kind.max_bytes // _MIB} MiB that {kind.what} may have",
        str(path),
    )


def file_identity(path: Path) -> tuple[int, int, int] | None:
    """Numbers that change when the file does; None if there is no file."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None


def read_text(path: Path, kind: FileKind) -> str:
    """The text of a file in UTF-8, with line ends as "\\n". Raises OSError, and UnicodeDecodeError
    for bytes that are not UTF-8."""
    text = read_bytes(path, kind).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_json(path: Path, kind: FileKind) -> object:
    """The value of a JSON file. Raises OSError, and ValueError for text that is no JSON, nests too
    deep, has a key twice in one object or more values than memory should hold."""
    return parse_json(read_text(path, kind))


def packaged(package: str, name: str) -> Any:
    """The value of a JSON file of one of our packages."""
    # importlib.resources would import zipfile and tempfile, a tenth of the time of help.
    folder = Path(import_module(package).__path__[0])
    return json.loads((folder / name).read_text("utf-8"))


def parse_json(text: str) -> object:
    """The value of a JSON text, with the errors of `read_json`. Duplicate keys are an error because
    readers differ in which of two values they take: such a text would be checked as one thing and
    used as another."""
    if sum(map(text.count, ",[{")) > MAX_JSON_VALUES:
        raise ValueError(f"it has more than {MAX_JSON_VALUES} values")
    try:
        return cast("object", json.loads(text, object_pairs_hook=_object))
    except RecursionError:
        raise ValueError("it nests too deep") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice!r:.60} is there twice")
    return found


def _check(mode: int, path: Path) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    what = next((name for is_one, name in _OTHERS if is_one(mode)), "something else")
    raise OSError(errno.EINVAL, f"it is {what}, not a regular file", str(path))


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_POLL_SECONDS = 0.05


class NotPrivateError(Exception):
    """A file or folder may be written by another user; the message is a phrase with the reason."""


def private_folder(folder: Path) -> Path:
    """`folder` without symbolic links, created if need be. Raises NotPrivateError, OSError.

    If others may read a folder of this user, it is closed to them; if they may write to it, it is
    refused, since its content cannot be trusted.

    A user who can replace a library runs code as this user. So libraries are loaded from a folder
    of mode 0700 that is no symbolic link, and no folder above it may let a stranger replace it. A
    folder above may belong to root or to this user; others may write to it only where its sticky
    bit, as in /tmp, keeps them from moving files of others.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder = folder.parent.resolve(strict=True) / folder.name
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotPrivateError(f"{folder} is not a folder itself")
    _check_owner(folder, found)
    for above in folder.parents:
        _check_above(above)
    if stat.S_IMODE(found.st_mode) & 0o077:
        # Refused on a read-only file system, where no user can write anyway.
        with suppress(OSError):
            folder.chmod(0o700)
    return folder


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise NotPrivateError(f"{path} belongs to another user")
    if found.st_mode & _OTHERS_WRITE:
        raise NotPrivateError(f"other users can write to {path} (chmod go-w would end that)")


def _check_above(folder: Path) -> None:
    found = folder.stat()
    # With users mapped into a container, / may belong to a number other than 0.
    if found.st_uid not in (0, os.geteuid(), Path("/").stat().st_uid):
        raise NotPrivateError(f"{folder}, in which it lies, belongs to another user")
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise NotPrivateError(f"other users can write to {folder}, in which it lies")


def read_private(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file of this user. Raises NotPrivateError, OSError."""
    # Without blocking: a FIFO would wait for its writer.
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as file:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise NotPrivateError(f"{path} is not a regular file")
        _check_owner(path, found)
        if found.st_size > max_bytes:
            raise NotPrivateError(f"{path} has {found.st_size} bytes, more than {max_bytes}")
        # `read` first allocates a buffer of the requested size.
        return file.read(found.st_size)


def write_private(path: Path, *pieces: bytes | memoryview, flush: bool = True) -> None:
    """Replace `path` by a file for this user only, in one step that survives a power cut, except
    without `flush`: then a part of it may be left."""
    number, draft = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            for piece in pieces:
                file.write(piece)
            if flush:
                file.flush()
                os.fsync(number)
        Path(draft).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(draft).unlink()
        raise
    if flush:
        _sync_folder(path.parent)


def draft_of(path: Path) -> Path:
    """The temporary file in which this process writes the new content of `path`."""
    return path.parent / f".{path.name}.{os.getpid()}.part"


@contextmanager
def replacing(path: Path, *, alone: bool = False) -> Generator[Path]:
    """A new file in the folder of `path`, which replaces `path` in one step at the end: a reader
    sees the old file or the new one, never a part. It is deleted if writing fails.

    If only one process at a time writes (`alone`), the file has one name for all processes: the
    next one overwrites the leftovers of a process that was killed.
    """
    draft = path.with_name(f".{path.name}.part") if alone else draft_of(path)
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def _sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk; some file systems do not support it."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)


class Lock:
    """The lock of the file `path`, which stays. It is released by `close`, with this object, or
    with its process, however that ends.

    Waits at most `seconds`, then raises TimeoutError. `held` is False on a file system without
    locks. Raises OSError if `path` cannot be created.
    """

    def __init__(self, path: Path, seconds: float = 0.0, *, mode: int = 0o666) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        number = os.open(path, flags, mode)
        self.close = weakref.finalize(self, os.close, number)
        try:
            self.held = _lock(number, path, seconds)
        except BaseException:
            self.close()
            raise


@contextmanager
def locked(path: Path, seconds: float) -> Generator[bool]:
    """A `Lock` of a file of this user for as long as the block runs; yields `held`."""
    lock = Lock(path, seconds, mode=0o600)
    try:
        yield lock.held
    finally:
        lock.close()


def _lock(number: int, path: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another process holds {path}") from None
            time.sleep(_POLL_SECONDS)
        except OSError:
            return False
        else:
            return True


@contextmanager
def writing(path: Path, *kinds: type[Exception]) -> Generator[None]:
    """Turn an OSError in the block, or an error of one of `kinds`, with which libraries report that
    `path` cannot be written, into a MachineError."""
    try:
        yield
    except (OSError, *kinds) as error:
        raise MachineError(
            f"{path} cannot be written: {reason_of(error)}.",
            hint="free some space, or name a folder that you may write",
        ) from error


@contextmanager
def new_folder(folder: Path) -> Generator[list[Path]]:
    """Create `folder`, which is absent or empty, and yield a list for the files written to it.

    If the block fails, the listed files are deleted, and so are the folders that were created, if
    they are empty then; nothing else is touched. Raises ConfigError if the folder holds something,
    MachineError if the block meets an OSError.
    """
    files: list[Path] = []
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with writing(folder):
        try:
            if folder.is_dir() and any(folder.iterdir()):
                raise ConfigError(f"{folder} is there already.", hint="name a new folder")
            folder.mkdir(parents=True, exist_ok=True)
            yield files
        except BaseException:
            remove(*files, *made)
            raise


def anonymous_file(name: str, size: int) -> int:
    """The descriptor of a file of `size` zero bytes that is in no folder; `name` is its name in
    lists of descriptors. Pages are allocated when first written. Raises OSError."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile(prefix=name) as opened:
            file = os.dup(opened.fileno())
    try:
        os.truncate(file, size)
    except OSError:
        os.close(file)
        raise
    return file


def remove(*paths: Path) -> None:
    """Remove files and empty folders, as far as possible."""
    for path in paths:
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


# Sizes from here on are no limit: a control group of version 1 uses such a number for "none".
_NO_LIMIT = 1 << 60
# Files of the system that say how much memory there is. A control group (version 1 or 2), and every
# group above it, may limit the process.
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def physical_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Memory available without swapping; pages that only cache files count as free."""
    kilobytes = system_number(_PROC / "meminfo", b"MemAvailable")
    if kilobytes is not None:
        return 1024 * kilobytes
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:  # macOS does not report it
        return physical_bytes()
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def group_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of each group above this process."""
    try:
        lines = read_text(_PROC / "self" / "cgroup", FileKind.SYSTEM).splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            names = ("memory.max", "memory.current", b"inactive_file")
            yield from _above(_GROUPS, path, names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file")
            yield from _above(_GROUPS / "memory", path, names)


def _above(root: Path, path: str, names: tuple[str, str, bytes]) -> Iterator[tuple[int, int]]:
    """Limits of the group at `path` and of all groups above it. In a container the path may be the
    host's and missing; then the root is the container's own group."""
    of_limit, of_usage, cached = names
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = root.joinpath(*parts[:depth])
        limit, usage = _number(folder / of_limit), _number(folder / of_usage)
        if limit is not None and limit < _NO_LIMIT:
            reclaimable = system_number(folder / "memory.stat", cached) or 0
            yield limit, max(0, (usage or 0) - reclaimable)


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or if it says that there is no limit."""
    try:
        text = read_text(path, FileKind.SYSTEM).strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdigit() else None
