"""Who reads what the engine says: outcomes, traces and endings go to the readers of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.api.memory import MemoryWatch
from outrider.api.reader import Reader
from outrider.core.budget import RoundTrace
from outrider.core.draft import Outcome
from outrider.core.errors import ContractError, ordinary
from outrider.core.interrupts import is_interrupt
from outrider.engine.engine import Engine


@dataclass(slots=True)
class Desk:
    """Readers of requests that were handed in and have not ended. `engine` is there before the
    first of them."""

    memory: MemoryWatch
    engine: Engine | None = None
    _readers: dict[int, Reader] = field(default_factory=dict[int, Reader])
    _dropped: deque[Reader] = field(default_factory=deque[Reader])

    def submit(self, reader: Reader) -> None:
        """Raises what the engine refuses a request for."""
        self._engine.submit(reader.seq)
        self._readers[reader.seq.seq_id] = reader
        reader.start()

    def feed(self, *queues: deque[Reader]) -> None:
        """Submit from `queues`, in order, as many as may wait."""
        for queue in queues:
            while queue and self._engine.has_place:
                self.submit(queue.popleft())

    def advance(self) -> list[Reader]:
        """One engine job; what it emitted goes to whoever reads it. The readers that it ended."""
        if self._dropped:
            self.sweep()
        return self._hear(self._engine.step())

    def retire(self, reader: Reader) -> None:
        """End a request, if it has not ended, and free its memory. What others were told meanwhile
        is not lost."""
        if reader.seq.seq_id in self._readers:
            self._engine.cancel(reader.seq.seq_id)
            self._hear(self._engine.delivered())
        self._end(reader)

    def drop(self, reader: Reader) -> None:
        """Retire it at the next `advance`: for callers that may not be in the engine now."""
        if not reader.has_ended:
            self._dropped.append(reader)

    def sweep(self) -> None:
        """Retire what was dropped."""
        while self._dropped:
            # First retired, or an interrupt would lose it; others may be dropped meanwhile.
            self.retire(self._dropped[0])
            self._dropped.popleft()

    def record(self, trace: RoundTrace) -> None:
        reader = self._readers.get(trace.seq_id)
        if reader is not None:
            reader.traces.append(trace)
            reader.pass_bytes.append(self.memory.during(trace.pass_index))

    @property
    def _engine(self) -> Engine:
        if self.engine is None:
            raise ContractError("the desk has no engine yet")
        return self.engine

    def _hear(self, outcomes: Sequence[Outcome]) -> list[Reader]:
        """Pass on what came of jobs that ended; the readers that these ended."""
        ended = self._tell(outcomes)
        # Failures come without an outcome.
        failed = [self._readers.get(seq.seq_id) for seq in self._engine.given_up()]
        ended += [reader for reader in failed if reader is not None]
        for reader in ended:
            self._end(reader)
        return ended

    def _tell(self, outcomes: Sequence[Outcome]) -> list[Reader]:
        """Pass outcomes on; the readers that heard their last."""
        told: list[Reader] = []
        for outcome in outcomes:
            reader = self._readers.get(outcome.seq_id)
            if reader is not None:
                self._guarded(reader, reader.take, outcome)
                told.append(reader)
        holds = self._engine.holds
        return [r for r in told if r.seq.finish is not None and not holds(r.seq.seq_id)]

    def _guarded(self, reader: Reader, call: Callable[..., None], *given: Outcome) -> None:
        """What a tokenizer raises is the request's failure, and nobody else's."""
        try:
            call(*given)
        except BaseException as error:
            if is_interrupt(error):
                raise
            reader.seq.error = ordinary(error)

    def _end(self, reader: Reader) -> None:
        self._readers.pop(reader.seq.seq_id, None)
        self._guarded(reader, reader.end)
