"""Files of a batch: lines are read only as they are needed, and answers are appended.

The file of answers is its own journal. An answer is one line, written at once, that names the
number and the digest of the line it answers; after a crash an incomplete last line is cut off, and
answered lines are not run again. Memory is four bytes for each answered line, so that files may be
of any size.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from outrider.api.batch_lines import answered
from outrider.core.errors import ConfigError, MachineError
from outrider.core.files import Lock, open_regular, parse_json

MAX_LINE_BYTES = 16 << 20
_FRESH = "name a new file for answers, or begin anew with --fresh"


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line that is not blank; `data` is None for a line that is too long to store."""

    number: int
    digest: int
    data: bytes | None

    @property
    def name(self) -> str:
        """The digest as written in answers."""
        return f"{self.digest:08x}"


def raw_lines(path: Path) -> Generator[RawLine]:
    """The lines of a file, one in memory at a time. Raises MachineError."""
    try:
        with open_regular(path) as stream:
            number = 0
            while piece := stream.readline(MAX_LINE_BYTES):
                number += 1
                hashed, whole = hashlib.blake2b(piece.strip(), digest_size=4), piece
                if len(piece) == MAX_LINE_BYTES and not piece.endswith(b"\n"):
                    while not piece.endswith(b"\n") and (piece := stream.readline(MAX_LINE_BYTES)):
                        hashed.update(piece)
                    whole = None
                elif not piece.strip():
                    continue
                yield RawLine(number, _number_of(hashed.digest()), whole)
    except OSError as error:
        raise MachineError(
            f"{path} cannot be read: {error.strerror or error}.", hint="name a file of JSON lines"
        ) from None


def raw_line(number: int, data: bytes) -> RawLine:
    """A line with the content `data`, for a file without lines."""
    return RawLine(number, _number_of(hashlib.blake2b(data, digest_size=4).digest()), data)


def _number_of(digest: bytes) -> int:
    """The digest as a number above 0, as 0 marks a line without an answer."""
    return int.from_bytes(digest, "big") or 1


class AnswerFile:
    """Answers at `path`, of this run and of earlier ones; one process at a time may write them.

    Raises ConfigError if the file holds something else, MachineError if it cannot be written.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self._path = path.resolve()
        self._digests = array("I")
        self.num_answers = self.num_errors = 0
        try:
            self._lock = Lock(self._path)
            end = 0 if fresh else self._read()
            self._stream = self._path.open("ab")
            self._stream.truncate(end)
            if end and not self._ends_line(end):
                self._stream.write(b"\n")
        except TimeoutError:
            raise MachineError(
                f"another process writes {path}.", hint="wait for it, or name another file"
            ) from None
        except OSError as error:
            raise MachineError(
                f"{path} cannot be written: {error.strerror or error}.",
                hint="name a file in a folder that exists and that you may write",
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has(self, line: RawLine) -> bool:
        """True if a line has its answer. Raises ConfigError if another line has it."""
        digest = self._digests[line.number] if line.number < len(self._digests) else 0
        if digest not in (0, line.digest):
            raise ConfigError(
                f"{self._path} answers another line {line.number} than the input has.", hint=_FRESH
            )
        return digest != 0

    def write(self, line: RawLine, answer: str, *, is_error: bool) -> None:
        """Append one line; it survives any end of this process."""
        self._stream.write(answer.encode("utf-8", "backslashreplace") + b"\n")
        self._stream.flush()
        self._note(line.number, line.digest, is_error=is_error)

    def close(self) -> None:
        if not self._stream.closed:
            os.fsync(self._stream.fileno())
            self._stream.close()
        self._lock.close()

    def _note(self, number: int, digest: int, *, is_error: bool) -> None:
        missing = number + 1 - len(self._digests)
        if missing > 0:
            self._digests.extend([0] * missing)
        self._digests[number] = digest
        self.num_answers += 1
        self.num_errors += is_error

    def _read(self) -> int:
        """Note the existing answers. Returns their size in bytes."""
        end = 0
        with open_regular(self._path) as stream:
            for index, line in enumerate(stream, start=1):
                try:
                    number, digest, is_error = answered(line.decode())
                    self._note(number, int(digest, 16), is_error=is_error)
                except (ValueError, OverflowError):
                    # Only an incomplete answer may be cut off: any other text has another author.
                    if line.endswith(b"\n") or _is_json(line):
                        raise ConfigError(
                            f"{self._path}, line {index}, is no answer of a batch.", hint=_FRESH
                        ) from None
                    return end
                end += len(line)
        return end

    def _ends_line(self, end: int) -> bool:
        with open_regular(self._path) as stream:
            stream.seek(end - 1)
            return stream.read(1) == b"\n"


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line.decode())
    except ValueError:
        return False
    return True
