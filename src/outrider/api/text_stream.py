"""`TextStream`, the events of one request as a generator that drives the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType

from outrider.api.output import OutputStream
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.turns import OfOneProcess, Turns


class TextStream(OfOneProcess, Generator[TextEvent, None, None]):
    """The events of a request, one per round. The reader of the next event drives the engine.

    `close`, or dropping the stream, cancels the request and frees its memory. Threads that read one
    stream take turns: each event is yielded once.
    """

    def __init__(
        self,
        turns: Turns,
        reader: OutputStream,
        events: Generator[TextEvent, None, None],
        make_result: Callable[[OutputStream], GenerationResult],
        drop: Callable[[OutputStream], None],
    ) -> None:
        self._turns, self._reader, self._events = turns, reader, events
        self._make_result, self._drop = make_result, drop
        self._reading = Turns()

    def __repr__(self) -> str:
        if self._reader.has_ended:
            return "<TextStream: ended, .text is the whole text>"
        return "<TextStream: iterate over its events as they come, or take .text, the whole>"

    @property
    def text(self) -> str:
        """The whole text, after the end of the request. Raises the error that ended the request."""
        return self.result().text

    def result(self) -> GenerationResult:
        """The result, after the remaining events. Raises the error that ended the request."""
        for _ in self:
            pass
        self._reader.check()
        return self._make_result(self._reader)

    def send(self, value: None, /) -> TextEvent:
        try:
            with self._asking():
                return self._events.send(value)
        except StopIteration:
            raise
        except BaseException:
            # An interrupt may come when an event is already there. A refused call ends nothing.
            if not self._is_within:
                self.close()
            raise

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
        /,
    ) -> TextEvent:
        del tb
        given = val if isinstance(val, BaseException) else typ
        with self._asking():
            return self._events.throw(given if isinstance(given, BaseException) else given())

    def close(self) -> None:
        """Cancel the request and free its memory. Called in a callback, or in a signal handler
        while a thread waits for the stream, it ends the request with the job."""
        if self._is_within:
            self._drop(self._reader)
            return
        with self._asking():
            self._events.close()

    @property
    def _is_within(self) -> bool:
        """True if the calling thread is within a job, or within a call of this stream."""
        return self._turns.in_turn or self._reading.in_turn

    @contextmanager
    def _asking(self) -> Generator[None]:
        with self._turns.call():
            # No call within a call: signals are delivered only between turns of the outermost one.
            self._reading.check()
            with self._reading.turn():
                self._reader.is_asked = True
                try:
                    yield
                finally:
                    self._reader.is_asked = False
