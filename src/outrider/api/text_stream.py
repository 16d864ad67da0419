"""`TextStream`, the events of one request as a generator that drives the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType

from outrider.api.output import OutputStream
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.turns import OfOneProcess, Turns


class TextStream(OfOneProcess, Generator[TextEvent, None, None]):
    """The events of a request, an event a round. Whoever asks for the next one drives the engine.

    `close`, or letting go of it, cancels the request and frees its memory. Threads that ask one
    stream take turns: each event is told once.
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
        self._askers = Turns()

    def __repr__(self) -> str:
        if self._reader.has_ended:
            return "<TextStream: ended, .text is what it wrote>"
        return "<TextStream: iterate over its events as they come, or take .text, the whole>"

    @property
    def text(self) -> str:
        """The whole text, once the request has ended. Raises what the request ended by."""
        return self.result().text

    def result(self) -> GenerationResult:
        """The result, after the events that nobody asked for. Raises what the request ended by."""
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
            # An interrupt may be told when an event is there already. A refused call ends nothing.
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
        """Cancel the request and free its memory. Within a callback, and in a handler of a signal
        that comes while the stream is waited for, it ends with the job."""
        if self._is_within:
            self._drop(self._reader)
            return
        with self._asking():
            self._events.close()

    @property
    def _is_within(self) -> bool:
        """Whether the calling thread is in the midst of a job, or of a call of this stream."""
        return self._turns.in_turn or self._askers.in_turn

    @contextmanager
    def _asking(self) -> Generator[None]:
        with self._turns.call():
            # No call in a call: signals are told between the turns of the outermost alone.
            self._askers.check()
            with self._askers.turn():
                self._reader.is_asked = True
                try:
                    yield
                finally:
                    self._reader.is_asked = False
