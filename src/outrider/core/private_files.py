"""Files that only this user can have written, locks that end with their process, and folders that a
failure does not leave behind.

Whoever can replace a library runs code as us, so what is loaded lies in a folder of our own: mode
0700, no symbolic link, and above it no folder in which a stranger could put another in its place.
A folder above may belong to root or to us; others may write to it only where, as in /tmp, its
sticky bit keeps them from moving what is not theirs.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.core.errors import ConfigError, MachineError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_POLL_SECONDS = 0.05


class NotPrivateError(Exception):
    """Why a file or folder may have been written by somebody else; a phrase for a sentence."""


def private_folder(folder: Path) -> Path:
    """`folder` without symbolic links, made if need be. Raises NotPrivateError, OSError.

    A folder of ours that others may read is closed to them; one that they may write to is refused,
    since nobody can tell what they put there.
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
        # Refused on a file system that is read-only, where nobody writes anyway.
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
    # Where users are mapped into a container, / may belong to a number other than 0.
    if found.st_uid not in (0, os.geteuid(), Path("/").stat().st_uid):
        raise NotPrivateError(f"{folder}, in which it lies, belongs to another user")
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise NotPrivateError(f"other users can write to {folder}, in which it lies")


def read_private(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file of ours. Raises NotPrivateError, OSError."""
    # Without blocking: a FIFO would wait for its writer.
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as file:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise NotPrivateError(f"{path} is not a regular file")
        _check_owner(path, found)
        if found.st_size > max_bytes:
            raise NotPrivateError(f"{path} has {found.st_size} bytes, more than {max_bytes}")
        return file.read(max_bytes)


def write_private(path: Path, data: bytes) -> None:
    """Replace `path`, which only we may then read, in one step that outlives a power cut."""
    number, draft = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(number)
        Path(draft).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(draft).unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Have the names in `folder` reach the disk; some file systems do not offer it."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)


class Lock:
    """The lock of the file `path`, which stays. It is given back by `close`, with this object, or
    with its process, however that ends.

    Waits at most `seconds`, then raises TimeoutError. `held` is False on a file system without
    locks. Raises OSError where `path` cannot be made.
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
    """As `Lock` of a file of our own, for as long as the block runs; gives `held`."""
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
def new_folder(folder: Path) -> Generator[list[Path]]:
    """Make `folder`, which is absent or empty, and give a list for what is put there.

    Where the block fails, what the list has goes, and the folders that were made, if they are empty
    then; nothing else is touched. Raises ConfigError if the folder holds something,
    MachineError where the block meets an OSError.
    """
    files: list[Path] = []
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is there already.", hint="name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        yield files
    except BaseException as error:
        remove(*files, *made)
        if isinstance(error, OSError):
            raise MachineError(
                f"{folder} cannot be written: {error.strerror or error}.",
                hint="free some space, or name a folder that you may write",
            ) from error
        raise


def remove(*paths: Path) -> None:
    """As far as it can be done: folders only where they are empty."""
    for path in paths:
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()
