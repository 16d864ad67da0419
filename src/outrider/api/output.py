"""Outputs of the engine to readers: outcomes become text events and results, request by request.

`RequestRouter` passes outcomes, traces and endings to the readers of requests; an `OutputStream`
follows one request. A `Gauge` measures the peak of memory for a result. CUDA's allocator has a peak
that can be reset, so each stretch has its own. The peak of a process cannot be reset: if a stretch
raised it, it is the stretch's own, else the usage at the stretch's end counts. MPS reports usage
and no peak.
"""

from __future__ import annotations

import resource
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import torch

from outrider.api.callers import OfOneProcess, Turns
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.stream import StopMatcher, runs_of
from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.draft import Origin, Outcome, RoundEvent, RoundTrace, TokenLogprobs
from outrider.core.errors import ConfigError, ContractError, foreign, with_hint
from outrider.core.logits import ThoughtBudget
from outrider.core.process import own_bytes
from outrider.engine.engine import Engine
from outrider.engine.round import LiveSequence
from outrider.metrics import MemoryTrace, summarise

# Rounds that take less than this run several per job before readers get them: the work between two
# jobs takes a noticeable part of a very small model's round.
CONTROL_SECONDS = 0.003


class Gauge(Protocol):
    """Bytes held by one allocator."""

    def take(self) -> int:
        """The peak since the last call, as far as it is known."""
        ...

    def peak(self) -> int | None:
        """The peak so far; None if it is not counted."""
        ...


class ProcessGauge:
    """Resident memory of this process, of which models and arena are a part."""

    def __init__(self) -> None:
        self._high = _resident_bytes()[1]

    def take(self) -> int:
        now, high = _resident_bytes()
        raised, self._high = high > self._high, high
        return high if raised else now

    def now(self) -> int:
        return _resident_bytes()[0]

    def peak(self) -> int:
        return _resident_bytes()[1]


class CudaGauge:
    """Tensors of this process on a CUDA device. `take` resets the allocator's own peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest = 0

    def take(self) -> int:
        held = torch.cuda.max_memory_allocated(self._device)
        self._highest = max(self._highest, held)
        torch.cuda.reset_peak_memory_stats(self._device)
        return held

    def peak(self) -> int:
        return max(self._highest, torch.cuda.max_memory_allocated(self._device))


class MpsGauge:
    """Memory that Metal allocated for this process."""

    def take(self) -> int:
        return torch.mps.driver_allocated_memory()

    def peak(self) -> None:
        return None


class MemoryWatch:
    """One LLM's memory: while loading, and in each pass.

    Only an `active` watch, that of a profile, reads those: reading resets CUDA's counter. The peak
    is there for every result.
    """

    def __init__(self, gauge: Gauge, *, active: bool) -> None:
        self._gauge = gauge
        self._active = active
        self._load_bytes = gauge.take() if active else 0
        self._pass_index: int | None = None
        self._pass_bytes = 0

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of this process so far, for any purpose; None if unknown."""
        return self._gauge.peak()

    @property
    def load_bytes(self) -> int:
        """Peak memory between the watch's creation and `end_load`."""
        return self._load_bytes

    def end_load(self) -> None:
        if self._active:
            self._load_bytes = self._gauge.take()

    def during(self, pass_index: int) -> int:
        """Peak memory in this pass, if called at its end; 0 from an inactive watch.

        Sequences of one pass get the same answer.
        """
        if self._active and pass_index != self._pass_index:
            self._pass_index, self._pass_bytes = pass_index, self._gauge.take()
        return self._pass_bytes


def gauge(device: torch.device) -> Gauge:
    """The gauge of the allocator of `device`."""
    match device.type:
        case "cuda":
            return CudaGauge(device)
        case "mps":
            return MpsGauge()
        case _:
            return ProcessGauge()


def _resident_bytes() -> tuple[int, int]:
    """Resident bytes now, and at most so far. Without /proc, the latter is both."""
    now, high = own_bytes(b"VmRSS"), own_bytes(b"VmHWM")
    if now is None or high is None:
        high = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        high *= 1 if sys.platform == "darwin" else 1024
        return high, high
    return now, max(now, high)


@dataclass(slots=True)
class OutputStream:
    """Output of one request. Its events wait here for the reader; several requests may run at once.

    With `live` text or stop strings, tokens become text round by round: `text` is then the
    sequence's stop matcher too, and has read every accepted token by the time that their outcome
    arrives here. Otherwise the text is made once, for the result. `has_ended` says that all of its
    outcomes have arrived and no more will: a lane may end a text before that. `thoughts` counts
    tokens of thoughts, if the model has any. `on_event` is called for each event and `on_end` at
    the end, in any thread's turn. `is_asked` is True while its owner waits for an event,
    `is_dropped` once the next job is to end it, and it gets no more outcomes.
    """

    seq: LiveSequence
    text: StopMatcher
    live: bool
    notes: tuple[str, ...] = ()
    thoughts: ThoughtBudget | None = None
    clock: Clock = HOST_CLOCK
    traces: list[RoundTrace] = field(default_factory=list[RoundTrace])
    pass_bytes: list[int] = field(default_factory=list[int])
    has_ended: bool = False
    was_cancelled: bool = False
    is_asked: bool = False
    is_dropped: bool = False
    on_event: Callable[[OutputStream], None] | None = None
    on_end: Callable[[OutputStream], None] | None = None
    _events: deque[TextEvent] = field(default_factory=deque[TextEvent])
    _pieces: list[str] = field(default_factory=list[str])
    _origins: list[Origin] = field(default_factory=list[Origin])
    _logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    _round_events: list[RoundEvent] = field(default_factory=list[RoundEvent])
    _arrivals: list[float] = field(default_factory=list[float])
    _started: float = 0.0
    _waited: float = 0.0

    def start(self) -> None:
        self._started = self.clock()
        if self.live:
            self.seq.match = self._match

    def came_earlier(self, seconds: float) -> None:
        """Add the time that the request waited before the engine got it."""
        self._started -= seconds
        self._waited = round(seconds, 9)

    def go_on(self, written: Sequence[int]) -> None:
        """Begin after tokens that were written before, perhaps elsewhere: they belong to the text
        and the result, but no event has them. Random numbers continue. If they are a whole text, it
        has ended."""
        seq = self.seq
        if not written:
            return
        if len(written) > seq.limit or not seq.stop_ids.isdisjoint(written[:-1]):
            raise ConfigError("the tokens written before are longer than the text.")
        kept = self.text.push(written)
        if kept is not None and kept < len(written):
            raise ConfigError("the tokens written before continue after a stop string.")
        seq.tokens += written
        self._pieces += self.text.take()
        self._origins.extend("plain" for _ in written)
        if kept is not None or written[-1] in seq.stop_ids:
            seq.finish = "stop"
        elif len(written) == seq.limit:
            seq.finish = "length"
        self.notes += (f"went on after {len(written)} tokens that were written before",)
        if seq.finish is not None:
            self._pieces.append(self.text.finish())
            self.has_ended = True

    def take(self, outcome: Outcome) -> None:
        """Read a round's emitted tokens. Its ids are on the host: the device is done with them."""
        arrival = round(self.clock() - self._started, 9)
        self._arrivals += [arrival] * len(outcome.tokens)
        self._logprobs += outcome.logprobs
        self._round_events += outcome.events
        origins = outcome.origins
        self._origins += origins
        if not self.live:
            return
        pieces = self.text.take(len(outcome.tokens))
        if self.seq.finish in ("stop", "length") and self.text.is_taken:
            pieces = (*pieces[:-1], pieces[-1] + self.text.finish())
        self._pieces += pieces
        event = TextEvent(outcome.tokens, origins, pieces, outcome.logprobs, outcome.events)
        self._events.append(event)
        if self.on_event is not None:
            self.on_event(self)

    def end(self) -> None:
        """End the stream. If the text ran out of time, its withheld end is shown."""
        if self.has_ended:
            return
        try:
            if self.live and self.seq.finish == "timeout":
                self._show_held()
        finally:
            self.has_ended = True
            if self.on_end is not None:
                self.on_end(self)

    def check(self) -> None:
        """Raise the error for which the engine gave the sequence up, if any."""
        if self.seq.error is not None:
            raise self.seq.error

    @property
    def has_read(self) -> bool:
        """True if its prompt is in the KV cache, where others find it, or will never be."""
        return self.seq.num_emitted > 0 or self.has_ended

    def events(self) -> Iterator[TextEvent]:
        """Yield and forget the events so far."""
        while self._events:
            yield self._events.popleft()

    def result(
        self, *, drafter: str, k: int, profile: bool, exact: bool, memory: MemoryWatch
    ) -> GenerationResult:
        token_ids = tuple(self.seq.tokens[self.seq.prompt_length :])
        if not self.live:
            with foreign():
                self.text.push(token_ids)
                self._pieces = [*self.text.take(), self.text.finish()]
        total = self._arrivals[-1] if self._arrivals else 0.0
        asked = self.seq.speculation
        drafter, k = asked.drafter or drafter, asked.most(k)
        thoughts = (None, None) if self.thoughts is None else self.thoughts.count(token_ids)
        held = MemoryTrace(memory.load_bytes, tuple(self.pass_bytes))
        return GenerationResult(
            text="".join(self._pieces),
            token_ids=token_ids,
            finish_reason="error" if self.seq.error else self.seq.finish,
            stats=summarise(self.traces, drafter=drafter, k=k, total_seconds=total),
            notes=(*self.notes, *self._fate()),
            rounds=tuple(self.traces) if profile else (),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self.seq.prompt_logprobs),
            stop=self.text.matched,
            round_events=tuple(self._round_events),
            seed=self.seq.params.seed,
            error=None if self.seq.error is None else with_hint(self.seq.error),
            exact=exact or asked.exact,
            token_seconds=tuple(self._arrivals),
            num_cached_tokens=self.seq.num_cached,
            queue_seconds=self._waited,
            prediction_tokens=self._predicted() if self.seq.params.prediction else None,
            thought_tokens=thoughts[0],
            thoughts_cut=thoughts[1],
            drafter_failed=bool(self.seq.no_drafts),
            peak_memory_bytes=memory.peak_bytes,
            memory=held if profile else None,
            runs=runs_of(self._pieces, self._origins),
        )

    def _predicted(self) -> tuple[int, int]:
        """Accepted tokens of the prediction, and refused ones."""
        drafts = [trace for trace in self.traces if trace.drafter == "prediction"]
        num_kept = sum(trace.num_accepted for trace in drafts)
        return num_kept, sum(trace.num_drafted for trace in drafts) - num_kept

    def _fate(self) -> tuple[str, ...]:
        """Notes on incidents of the request."""
        seq, found = self.seq, list[str]()
        if seq.no_drafts:
            found.append(f"speculation was turned off: {seq.no_drafts}")
        if seq.rested:
            found.append(f"speculation rested: {seq.rested}")
        if self.was_cancelled and seq.finish is None:
            found.append("cancelled before its end")
        if seq.num_preempted:
            found.append(f"pre-empted {seq.num_preempted} times for want of memory")
        masking, total = sum(trace.mask_seconds for trace in self.traces), sum(self._arrivals[-1:])
        if masking > max(1, total / 2):
            found.append(f"its allowed-token mask took {masking:.1f} of {total:.1f} seconds")
        return tuple(found)

    def _show_held(self) -> None:
        if self.text.num_read > self.seq.num_emitted:
            self.text.rewind()
        held = "".join(self.text.take()) + self.text.finish()
        if held:
            self._pieces.append(held)
            self._events.append(TextEvent((), ("plain",), (held,)))

    def _match(self, tokens: Sequence[int]) -> int | None:
        """The sequence's stop matcher. Text read beyond the sequence belongs to a round that failed
        before it was committed; the present round replaces it."""
        if self.text.num_read > self.seq.num_emitted:
            self.text.rewind()
        return self.text.push(tokens)


@dataclass(slots=True)
class RequestRouter:
    """Readers of submitted requests that have not ended. `engine` is set before the first."""

    memory: MemoryWatch
    engine: Engine | None = None
    _readers: dict[int, OutputStream] = field(default_factory=dict[int, OutputStream])
    _dropped: deque[OutputStream] = field(default_factory=deque[OutputStream])

    def submit(self, reader: OutputStream) -> None:
        """Submit a request. Raises the engine's error if it refuses it; a request whose text was
        already whole does not reach the engine."""
        if reader.has_ended:
            return
        self._engine.submit(reader.seq)
        self._readers[reader.seq.seq_id] = reader
        reader.start()

    def feed(self, *queues: deque[OutputStream]) -> None:
        """Submit from `queues`, in order, as many as may wait."""
        for queue in queues:
            while queue and self._engine.has_queue_slot:
                self.submit(queue.popleft())

    def advance(self) -> list[OutputStream]:
        """Run one engine job and pass on its outcomes. Returns the readers that it ended."""
        if self._dropped:
            self.sweep()
        return self._pass_on_ended(self._engine.step(CONTROL_SECONDS))

    def retire(self, reader: OutputStream) -> None:
        """End a request, if it has not ended, and free its memory; others' outcomes go on."""
        if reader.seq.seq_id in self._readers:
            self._engine.cancel(reader.seq.seq_id)
            self._pass_on_ended(self._engine.delivered())
        self._end(reader)

    def end(self, readers: Sequence[OutputStream], turn: AbstractContextManager[bool]) -> None:
        """Retire `readers` in a `turn`. The next `advance` does it if the turn is not granted, or
        if a signal ends the wait for the turn or for a job of theirs."""
        if not readers:
            return
        try:
            with turn as given:
                for reader in readers if given else ():
                    self.retire(reader)
        finally:
            for reader in readers:
                self.drop(reader)

    def drop(self, reader: OutputStream) -> None:
        """Retire a reader at the next `advance`: for callers that may not enter the engine now."""
        if not (reader.has_ended or reader.is_dropped):
            self._dropped.append(reader)
            reader.is_dropped = True

    def sweep(self) -> None:
        """Retire dropped readers."""
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
            raise ContractError("the router has no engine yet")
        return self.engine

    def _pass_on_ended(self, outcomes: Sequence[Outcome]) -> list[OutputStream]:
        """Pass on the outcomes of ended jobs. Returns the readers that these ended."""
        ended = self._pass_on(outcomes)
        # Failures come without an outcome.
        failed = [self._readers.get(seq.seq_id) for seq in self._engine.given_up()]
        ended += [reader for reader in failed if reader is not None]
        for reader in ended:
            self._end(reader)
        return ended

    def _pass_on(self, outcomes: Sequence[Outcome]) -> list[OutputStream]:
        """Pass outcomes on. Returns the readers that got their last."""
        readers: list[OutputStream] = []
        for outcome in outcomes:
            reader = self._readers.get(outcome.seq_id)
            if reader is not None and not reader.is_dropped:
                self._guarded(reader, reader.take, outcome)
                readers.append(reader)
        holds = self._engine.holds
        return [r for r in readers if r.seq.finish is not None and not holds(r.seq.seq_id)]

    def _guarded(self, reader: OutputStream, call: Callable[..., None], *given: Outcome) -> None:
        """Call a reader. An error of the tokenizer fails this request, and no other one."""
        try:
            with foreign():
                call(*given)
        except Exception as error:  # noqa: BLE001 - a tokenizer may be third-party code
            reader.seq.error = error

    def _end(self, reader: OutputStream) -> None:
        self._readers.pop(reader.seq.seq_id, None)
        self._guarded(reader, reader.end)


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
