"""One request's reader: turns its outcomes into text events and, at the end, into a result."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

from outrider.api.result import GenerationResult, TextEvent
from outrider.api.stream import StopMatcher
from outrider.core.budget import RoundTrace
from outrider.core.draft import Outcome
from outrider.core.sequence import LiveSequence
from outrider.metrics.summary import summarise


@dataclass(slots=True)
class Reader:
    """Events wait here until they are asked for; several requests may run side by side.

    With `live` text or stop strings, tokens become text round by round: `text` is then the
    sequence's stop matcher too, and has read every kept token by the time that their outcome
    arrives here. Otherwise the text is made once, when the result is asked for.
    """

    seq: LiveSequence
    text: StopMatcher
    live: bool
    notes: tuple[str, ...] = ()
    traces: list[RoundTrace] = field(default_factory=list[RoundTrace])
    _events: deque[TextEvent] = field(default_factory=deque[TextEvent])
    _pieces: list[str] = field(default_factory=list[str])
    _started: float = 0.0
    _ended: float = 0.0

    def start(self) -> None:
        self._started = self._ended = perf_counter()
        if self.live:
            self.seq.match = self.text.push

    def take(self, outcome: Outcome) -> None:
        """Read what a round emitted."""
        self._ended = perf_counter()
        if not self.live:
            return
        pieces = self.text.take()
        if self.seq.finish is not None:
            pieces = (*pieces[:-1], pieces[-1] + self.text.finish())
        self._pieces += pieces
        self._events.append(TextEvent(outcome.tokens, outcome.origins, pieces))

    def events(self) -> Iterator[TextEvent]:
        """Yield and forget what has been read so far."""
        while self._events:
            yield self._events.popleft()

    def result(self, *, drafter: str, k: int, profile: bool) -> GenerationResult:
        token_ids = tuple(self.seq.tokens[self.seq.prompt_length :])
        if not self.live:
            self.text.push(token_ids)
            self._pieces = [*self.text.take(), self.text.finish()]
        stats = summarise(
            self.traces, drafter=drafter, k=k, total_seconds=self._ended - self._started
        )
        return GenerationResult(
            text="".join(self._pieces),
            token_ids=token_ids,
            finish_reason=self.seq.finish,
            stats=stats,
            notes=self.notes,
            rounds=tuple(self.traces) if profile else (),
        )
