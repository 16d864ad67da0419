"""The follower's end of its pipes: a setup and messages come in, a few lines of JSON go out.

A thread of its own reads, for two reasons: rank 0 need not wait for a follower that computes, and
when rank 0 is gone its pipe ends, which ends the follower at once, whatever it waits for. Another
thread writes a byte every PULSE_SECONDS to a third pipe, by which rank 0 knows that this process is
not stopped.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any

HEADER = struct.Struct("<I")
PULSE_SECONDS = 1.0


def encode(message: Sequence[int]) -> bytes:
    """A count and as many integers of 64 bits."""
    return HEADER.pack(len(message)) + array("q", message).tobytes()


class Link:
    """Takes over stdin and stdout of this process; an uncaught error is reported on the way out."""

    def __init__(self) -> None:
        # A library that prints must not be heard by rank 0.
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        sys.excepthook = self._report
        self._inward: IO[bytes] = sys.stdin.buffer
        self.setup: Mapping[str, Any] = json.loads(self._inward.readline() or b"{}")
        self._messages: SimpleQueue[list[int]] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, args=(self.setup.get("pulse"),), daemon=True).start()

    def say(self, word: str) -> None:
        self._write({"word": word})

    def messages(self) -> Iterator[list[int]]:
        """All of them, in order; the process ends when no more can come."""
        while True:
            yield self._messages.get()

    def _read(self) -> None:
        while header := self._inward.read(HEADER.size):
            message = array("q")
            message.frombytes(self._inward.read(message.itemsize * HEADER.unpack(header)[0]))
            self._messages.put(message.tolist())
        os._exit(0)

    def _beat(self, pulse: int) -> None:
        with suppress(OSError):
            while os.write(pulse, b"."):
                time.sleep(PULSE_SECONDS)

    def _report(
        self, kind: type[BaseException], error: BaseException, _trace: TracebackType | None
    ) -> None:
        self._write({"error": f"{kind.__name__}: {error}"[:2000]})
        # The reading thread holds stdin, without which the interpreter cannot end in order.
        os._exit(1)

    def _write(self, answer: Mapping[str, str]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()
