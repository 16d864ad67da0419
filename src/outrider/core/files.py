"""Every file is read through here: a regular one, with a bound on its size.

A model folder, or a file that somebody names, may hold anything. A pipe with no writer blocks its
reader for ever, a device has no end, and a file of any size would be read into memory whole. So
what is opened is known to be a regular file, and every kind of file has a bound that real ones stay
far below. Errors are OSErrors with a `strerror` that reads well after a path; callers make of them
what a user is told.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from enum import Enum
from pathlib import Path
from typing import BinaryIO, cast

_MIB = 1 << 20
# JSON values in one file: in memory each takes up to 100 bytes, for two or three in the file.
MAX_JSON_VALUES = 1 << 23
_OTHERS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class Kind(Enum):
    """What a file is for, and the most bytes that one of its kind may have."""

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
    PICTURE = ("a picture", 16 * _MIB)
    SYSTEM = ("a file of the system", 16 * _MIB)

    def __init__(self, what: str, max_bytes: int) -> None:
        self.what = what
        self.max_bytes = max_bytes

    @classmethod
    def of(cls, path: Path) -> Kind:
        """Of a JSON file in the folder of a model."""
        if path.name in ("tokenizer.json", "tokenizer_config.json"):
            return cls.TOKENIZER
        return cls.INDEX if path.name.endswith(".index.json") else cls.CONFIG


def open_regular(path: Path) -> BinaryIO:
    """A stream of the bytes of a regular file. Raises OSError for anything else."""
    # Looked at before as well: to open some devices is to use them.
    _check(os.stat(path).st_mode, path)  # noqa: PTH116 - as fstat below
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path) -> None:
    """Raises OSError unless `path` is a regular file; for libraries that open files by name."""
    open_regular(path).close()


def read_bytes(path: Path, kind: Kind) -> bytes:
    """All of a file. Raises OSError if it cannot be read, or has more than its kind may."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= kind.max_bytes:
            data = stream.read(size + 1)
            # Files of the system say that they are empty, and others may grow meanwhile.
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


def read_text(path: Path, kind: Kind) -> str:
    """All of a text in UTF-8, line ends as in every text file. Raises OSError, and
    UnicodeDecodeError for other bytes."""
    text = read_bytes(path, kind).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_json(path: Path, kind: Kind) -> object:
    """What a JSON file holds. Raises OSError, and ValueError for text that is no JSON, nests too
    deep, names a key of one object twice or has more values than memory should hold."""
    return parse_json(read_text(path, kind))


def parse_json(text: str) -> object:
    """As `read_json`: readers differ in which of two values of one key they take, so a text with
    both would be checked as one thing and used as another."""
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
