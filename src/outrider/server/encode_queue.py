"""Queue of prompts that the engine's process encodes to token ids.

Only one long prompt is encoded at a time, so that a flood of long prompts leaves threads for short
ones. If the process crashes, the prompts that it had are tried one by one. A prompt with which it
crashes again is refused from then on, and so is one that got no answer twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from outrider.api.prompts import ChatIds
from outrider.core.errors import QueueFullError
from outrider.server.engine_child import Blame
from outrider.server.frames import Encode
from outrider.server.port import EngineLostError
from outrider.server.process_stream import KeptOutError

MOST_ASKED = 256
"""Prompts that are being encoded or wait for it."""
LONG_BYTES = 1 << 15
_MOST_SENT = 8
# Bytes per second that a tokenizer encodes at least, even on a busy machine.
_LEAST_SPEED = 1 << 15
_MOST_SUSPECTED = 1_000


@dataclass(eq=False, slots=True)
class Asked:
    """A prompt to encode, and the future of its ids. `words` is its content in bytes."""

    encode: Encode
    words: bytes
    answer: asyncio.Future[ChatIds]
    timer: asyncio.TimerHandle | None = None

    @property
    def is_long(self) -> bool:
        return len(self.words) > LONG_BYTES

    @property
    def kind(self) -> bytes:
        """A digest of the prompt's content."""
        return sha256(self.words).digest()


class EncodeQueue:
    """The queue of an engine, across restarts of its process. `send` sends a prompt, never while
    `waits()` is true. Kinds of prompts in `blame().kept_out` are refused. `hung` is called when a
    prompt has no answer after `seconds`, plus extra time for a long one."""

    def __init__(
        self,
        send: Callable[[Encode], None],
        hung: Callable[[], None],
        *,
        waits: Callable[[], bool],
        blame: Callable[[], Blame],
        seconds: float,
    ) -> None:
        self._send, self._hung, self._seconds = send, hung, seconds
        self._waits, self._blame = waits, blame
        self._short: deque[Asked] = deque()
        self._long: deque[Asked] = deque()
        self._sent: dict[int, Asked] = {}
        # Prompts that the process had when it crashed, and the one that is now tried alone.
        self._suspects: deque[Asked] = deque()
        self._tried: Asked | None = None
        # Whether the current process hangs and is about to be ended.
        self._has_hung = False
        # Kinds of suspects, to recognise the same prompt when it comes again.
        self._suspected: dict[bytes, None] = {}

    @property
    def is_on_trial(self) -> bool:
        """True while prompts are tried one by one after a crash."""
        return bool(self._suspects) or self._tried is not None

    @property
    def num_asked(self) -> int:
        return len(self._short) + len(self._long) + len(self._suspects) + len(self._sent)

    async def ids(self, encode: Encode) -> ChatIds:
        """Encode a prompt. Raises QueueFullError if too many wait, KeptOutError, EngineLostError,
        and the errors that the process reports."""
        if self.num_asked >= MOST_ASKED:
            raise QueueFullError(self.num_asked, 1)
        words = encode.text.encode("utf-8", "surrogatepass")
        if encode.chat is not None:
            words = msgspec.msgpack.encode(encode.chat)
        asked = Asked(encode, words, asyncio.get_running_loop().create_future())
        if asked.kind in self._blame().kept_out:
            raise KeptOutError
        queue = self._long if asked.is_long else self._short
        if asked.kind in self._suspected:
            queue = self._suspects
        queue.append(asked)
        try:
            self.go_on()
            return await asked.answer
        finally:
            if asked in queue:
                queue.remove(asked)

    def answer(self, number: int, found: ChatIds, error: Exception | None) -> None:
        """Deliver the process's answer to a prompt."""
        asked = self._back(number)
        if asked is None:
            return
        self._suspected.pop(asked.kind, None)
        _resolve(asked, error, found)
        self.go_on()

    def go_on(self) -> None:
        """Send all prompts that may be sent now."""
        while (asked := self._next()) is not None:
            number = asked.encode.number
            self._sent[number] = asked
            loop = asyncio.get_running_loop()
            seconds = self._seconds + len(asked.words) / _LEAST_SPEED
            asked.timer = loop.call_later(seconds, self._overdue, number)
            self._send(asked.encode)

    def lost(self) -> int:
        """Take back the prompts of a process that has ended, for the next one; return their
        number."""
        num, tried, self._has_hung = len(self._sent) + self._has_hung, self._tried, False
        for number in list(self._sent):
            asked = self._back(number)
            if asked is None:
                continue
            if asked is tried:
                self._refuse(asked)
                continue
            self._suspect(asked.kind)
            if not asked.answer.done():
                self._suspects.append(asked)
        return num

    def fail(self, error: Exception) -> None:
        """Fail all prompts: no process will answer them."""
        self._has_hung = False
        for asked in (*self._short, *self._long, *self._suspects, *self._sent.values()):
            if asked.timer is not None:
                asked.timer.cancel()
            _resolve(asked, error)
        self._sent.clear()
        self._tried = None

    def _next(self) -> Asked | None:
        if self._tried is not None or self._has_hung or self._waits():
            return None
        if self._suspects:
            if not self._sent:
                self._tried = self._suspects.popleft()
            return self._tried
        if len(self._sent) >= _MOST_SENT:
            return None
        if self._short:
            return self._short.popleft()
        if self._long and not any(asked.is_long for asked in self._sent.values()):
            return self._long.popleft()
        return None

    def _back(self, number: int) -> Asked | None:
        """Remove a prompt from those that the process has."""
        asked = self._sent.pop(number, None)
        if asked is not None:
            if asked.timer is not None:
                asked.timer.cancel()
            if asked is self._tried:
                self._tried = None
        return asked

    def _overdue(self, number: int) -> None:
        tried = self._tried
        asked = self._back(number)
        if asked is None:
            return
        if asked is tried:
            self._refuse(asked)
        else:
            self._suspect(asked.kind)
            _resolve(asked, EngineLostError(" (its prompt was not encoded in time)"))
        self._has_hung = True
        self._hung()

    def _suspect(self, kind: bytes) -> None:
        self._suspected[kind] = None
        if len(self._suspected) > _MOST_SUSPECTED:
            del self._suspected[next(iter(self._suspected))]

    def _refuse(self, asked: Asked) -> None:
        kind = asked.kind
        self._suspected.pop(kind, None)
        self._blame().keep_out(kind)
        _resolve(asked, KeptOutError())


def _resolve(asked: Asked, error: Exception | None, found: ChatIds | None = None) -> None:
    """Set the result or the error of a prompt, unless its client has left."""
    if asked.answer.done():
        return
    if error is not None:
        asked.answer.set_exception(error)
    else:
        asked.answer.set_result(found or ChatIds([]))
