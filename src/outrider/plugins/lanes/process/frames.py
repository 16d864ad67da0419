"""Inter-process frames: a fixed header and packed numbers.

A frame is eight bytes (a mark, its kind, the length of its body) and the body: struct fields and
lists of int32, each behind its length, in the machine's order of bytes. No frame names a type or
runs code, and each read is checked against the length, so a broken peer causes at most a
DrafterError. Struct suffices: nothing below the command line may need another library.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from time import monotonic
from typing import Any, Protocol

from outrider.core.errors import DrafterError

# Far above any batch of prompts; a length beyond it is a damaged header.
MAX_BODY_BYTES = 1 << 28
# The timeout of a pipe whose calls have limits: the interval at which they look at the clock. It is
# set once, since two threads may use the pipe at a time.
TICK_SECONDS = 0.05
_MARK = 0x724F
_HEADER = Struct("<HHI")
_COUNT = Struct("<I")


class Kind(IntEnum):
    """Kinds of frames. The engine sends those up to EXIT, the drafter's process the others."""

    OPEN = 1
    TERMS = 2
    PROPOSE = 3
    AHEAD = 4
    CLOSE = 5
    EXIT = 6

    HELLO = 32
    DRAFTS = 33
    FAILED = 34


_KINDS = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    body: bytes = b""

    def packed(self) -> bytes:
        return _HEADER.pack(_MARK, self.kind, len(self.body)) + self.body


@dataclass(slots=True)
class BodyWriter:
    """A body under construction."""

    parts: list[bytes] = field(default_factory=list[bytes])

    def put(self, form: Struct, *values: Any) -> None:
        self.parts.append(form.pack(*values))

    def ints(self, values: Sequence[int]) -> None:
        self.parts += (_COUNT.pack(len(values)), array("i", values).tobytes())

    def known_ints(self, values: Sequence[int]) -> None:
        """Write numbers without their count, which an earlier field gives."""
        self.parts.append(array("i", values).tobytes())

    def text(self, value: str) -> None:
        data = value.encode()
        self.parts += (_COUNT.pack(len(data)), data)

    def frame(self, kind: Kind) -> Frame:
        return Frame(kind, b"".join(self.parts))


@dataclass(slots=True)
class BodyReader:
    """A reader of a body's fields. Raises DrafterError if the body is too short or long."""

    body: bytes
    at: int = 0

    def take(self, form: Struct) -> tuple[Any, ...]:
        start = self._past(form.size)
        return form.unpack_from(self.body, start)

    def count(self) -> int:
        return self.take(_COUNT)[0]

    def ints(self) -> list[int]:
        return self.known_ints(self.count())

    def known_ints(self, count: int) -> list[int]:
        start = self._past(4 * count)
        return array("i", self.body[start : self.at]).tolist()

    def text(self) -> str:
        start = self._past(self.count())
        return self.body[start : self.at].decode(errors="replace")

    def end(self) -> None:
        if self.at != len(self.body):
            raise DrafterError(
                f"a message from a drafter's process has {len(self.body) - self.at} bytes too many."
            )

    def _past(self, size: int) -> int:
        """Advance past the next `size` bytes; return their start."""
        start, end = self.at, self.at + size
        if end > len(self.body):
            raise DrafterError(
                f"a message from a drafter's process ends after {len(self.body)} bytes, where "
                f"{end} were announced."
            )
        self.at = end
        return start


class Pipe(Protocol):
    """A stream of bytes each way: a socket, or memory (shared.py). Both calls do what they can at
    once. They raise TimeoutError if that is nothing within the pipe's own TICK_SECONDS, if it has
    such a limit, and another OSError if the peer is gone."""

    def send(self, data: memoryview, /) -> int: ...
    def recv(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none if the peer closed its end."""
        ...


def receive(pipe: Pipe, timeout: float = math.inf) -> Frame | None:
    """Return the next frame; None if the peer closed its end before one began.

    Raises TimeoutError if the whole frame does not come within `timeout` seconds, DrafterError if
    the bytes are no frame. A limit needs a pipe that has one of its own.
    """
    deadline = monotonic() + timeout
    header = _read(pipe, _HEADER.size, deadline)
    if not header:
        return None
    if len(header) < _HEADER.size:
        raise _cut_off()
    mark, kind, size = _HEADER.unpack(header)
    if mark != _MARK or kind not in _KINDS or size > MAX_BODY_BYTES:
        raise DrafterError(f"a drafter's process sent an invalid message: {header.hex(' ')}.")
    body = _read(pipe, size, deadline)
    if len(body) < size:
        raise _cut_off()
    return Frame(Kind(kind), body)


def send(pipe: Pipe, frame: Frame, timeout: float = math.inf) -> None:
    """Send a frame. Raises TimeoutError if the peer does not take it within `timeout` seconds,
    another OSError if the peer is gone."""
    deadline = monotonic() + timeout
    data = memoryview(frame.packed())
    while data:
        try:
            data = data[pipe.send(data) :]
        except TimeoutError:
            _check(deadline)


def _read(pipe: Pipe, size: int, deadline: float) -> bytes:
    """Return `size` bytes, or fewer if the peer closed its end."""
    data = bytearray()
    while len(data) < size:
        try:
            part = pipe.recv(min(size - len(data), 1 << 20))
        except TimeoutError:
            _check(deadline)
            continue
        if not part:
            break
        data += part
    return bytes(data)


def _check(deadline: float) -> None:
    if monotonic() >= deadline:
        raise TimeoutError("no answer in time")


def _cut_off() -> DrafterError:
    return DrafterError("a drafter's process ended in the middle of a message.")
