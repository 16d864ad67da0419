"""One thread that owns an LLM and runs the requests of any number of event loops.

Requests and cancellations are passed in queues that the thread reads before each job. After a job
each loop with news is called back once, for any number of requests and tokens, and not again until
it has read them: a slow loop gets one larger piece, and never a backlog.
"""

from __future__ import annotations

import math
import threading
import weakref
from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic

from outrider.api.grammar import Grammar
from outrider.api.llm import LLM
from outrider.api.mailbox import Mailbox
from outrider.api.output import OutputStream
from outrider.api.request import RequestHandle
from outrider.api.result import TextEvent
from outrider.api.structure import StructureOptions
from outrider.core.errors import ConfigError, QueueFullError
from outrider.core.logits import AllowedTokens
from outrider.core.params import SamplingParams
from outrider.sched.fair_queue import LEAST_WEIGHT, MOST_WEIGHT, FairQueue


@dataclass(eq=False, slots=True, weakref_slot=True)
class AsyncRequest:
    """A request of a task of `loop`. A `quiet` one is notified only of its end. Requests of several
    `key`s share the engine in proportion to their `weight`.

    The engine's thread writes `handle`, `events`, `ended` and `error`; `waiter` is the loop's.
    """

    loop: AbstractEventLoop
    ids: Sequence[int]
    params: SamplingParams
    allowed: AllowedTokens | Grammar | None = None
    structure: StructureOptions = field(default_factory=StructureOptions)
    sample: int = 0
    written: Sequence[int] = ()
    quiet: bool = False
    key: str = ""
    weight: float = 1.0
    came: float = field(default_factory=monotonic)
    num_charged: int = 0
    handle: RequestHandle | None = None
    events: Mailbox = field(default_factory=Mailbox)
    ended: bool = False
    error: BaseException | None = None
    waiter: Future[None] | None = None

    def __post_init__(self) -> None:
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise ConfigError(
                f"the weight of a request is {self.weight}.",
                hint=f"a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}; 1 is the default",
            )

    @property
    def deadline(self) -> float:
        return self.came + self.params.max_time if self.params.max_time else math.inf

    async def news(self) -> None:
        """Wait for an event or the end; only the request's own loop may call it."""
        self.waiter = self.loop.create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class EngineThread:
    """The owner of `llm`, which other threads may then only read. `max_queued` requests may wait;
    for the next one `add` raises QueueFullError."""

    def __init__(self, llm: LLM, max_queued: int) -> None:
        self._state = _State(llm, max_queued)
        thread = threading.Thread(
            target=_run, args=(self._state,), name="outrider-engine", daemon=True
        )
        # The thread refers to the state alone, so that an unclosed owner ends it too.
        self._reader = ThreadPoolExecutor(1, "outrider-grammars")
        self.close = weakref.finalize(self, _close, self._state, thread, self._reader)
        thread.start()

    def add(self, request: AsyncRequest) -> None:
        """Queue a request. Raises ConfigError once closed, or the error that broke the engine."""
        state = self._state
        with state.changed:
            if state.closing is not None:
                raise state.closing
            # Leaving requests stay until the next job, but do not count against the limit.
            left = {one for one in state.leaving if one.handle is None}
            num_waiting = len(state.new) + len(state.queue) + len(state.reading) - len(left)
            if num_waiting >= state.max_queued:
                state.num_refused += 1
                raise QueueFullError(num_waiting, state.num_refused)
            if request.structure:
                state.reading[request] = None
                self._reader.submit(_read_structure, state, request)
                return
            state.new.append(request)
            state.changed.notify()

    def leave(self, request: AsyncRequest) -> None:
        """Cancel a request before the next job, in any state. From any thread, finalizers too."""
        state = self._state
        with state.changed:
            if not request.ended:
                state.leaving.append(request)
                state.changed.notify()

    def take(self, request: AsyncRequest) -> TextEvent | None:
        with self._state.changed:
            return request.events.take()

    @property
    def num_queued(self) -> int:
        """Requests that wait, without those in the engine's own queue."""
        return len(self._state.new) + len(self._state.queue) + len(self._state.reading)

    @property
    def job_seconds(self) -> float:
        """Duration of the present job so far; 0 between jobs."""
        since = self._state.at_work_since
        return 0.0 if since is None else monotonic() - since

    @property
    def broke(self) -> BaseException | None:
        """The error that ended the thread, if it has ended."""
        return self._state.closing


@dataclass(slots=True)
class _State:
    """Shared state. `changed` guards the fields that several threads use: `reading` (requests whose
    grammar is read in a thread of its own), `new`, `leaving`, `news`, `closing` and the events of
    requests. A finalizer that runs while it is held can acquire it again. `queue`, `timed` (queued
    requests with a deadline), `running` and `fresh` are the engine thread's."""

    llm: LLM
    max_queued: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    reading: dict[AsyncRequest, None] = field(default_factory=dict[AsyncRequest, None])
    new: deque[AsyncRequest] = field(default_factory=deque[AsyncRequest])
    leaving: deque[AsyncRequest] = field(default_factory=deque[AsyncRequest])
    news: dict[AbstractEventLoop, list[AsyncRequest]] = field(
        default_factory=dict[AbstractEventLoop, list[AsyncRequest]]
    )
    closing: BaseException | None = None
    num_refused: int = 0
    at_work_since: float | None = None
    queue: FairQueue[AsyncRequest] = field(default_factory=FairQueue[AsyncRequest])
    timed: dict[AsyncRequest, None] = field(default_factory=dict[AsyncRequest, None])
    running: dict[int, AsyncRequest] = field(default_factory=dict[int, AsyncRequest])
    fresh: dict[int, OutputStream] = field(default_factory=dict[int, OutputStream])


def _run(state: _State) -> None:
    """Body of the thread: rounds until `closing`. An error of the engine ends every request."""
    try:
        while _wait(state):
            state.at_work_since = monotonic()
            _take_in(state)
            if state.llm.has_work:
                state.llm.advance()
            state.at_work_since = None
            _pass_on(state)
    except BaseException as error:  # noqa: BLE001 - passed to every reader
        with state.changed:
            state.closing = error
    _end_all(state)


def _wait(state: _State) -> bool:
    """Wait until there is work; False once the thread is to end."""
    with state.changed:
        while state.closing is None:
            if state.new or state.leaving or state.queue or state.llm.has_work:
                return True
            state.changed.wait()
    return False


def _read_structure(state: _State, request: AsyncRequest) -> None:
    """Read a grammar in the reader's thread: that takes time, and no token should wait for it."""
    error = None
    try:
        request.allowed = state.llm.requests.constraint(
            request.allowed, request.structure, tried=True
        )
    except Exception as raised:  # noqa: BLE001 - a request's mistake is its own
        error = raised
    with state.changed:
        if not _stopped_reading(state, request):
            return
        if error is None:
            state.new.append(request)
            state.changed.notify()
    if error is not None:
        _post(state, request, ended=True, error=error)


def _stopped_reading(state: _State, request: AsyncRequest) -> bool:
    """Remove a request from those whose grammar is read, or waits to be; False if it was none."""
    with state.changed:
        return state.reading.pop(request, request) is None


def _take_in(state: _State) -> None:
    """Take in requests and cancellations since the last job."""
    with state.changed:
        for request in state.new:
            state.queue.add(request, request.key, weight=request.weight)
            if request.params.max_time:
                state.timed[request] = None
        state.new.clear()
        leaving, state.leaving = state.leaving, deque()
    for request in leaving:
        if request.handle is not None:
            state.llm.cancel(request.handle)
        elif state.queue.remove(request, request.key) or _stopped_reading(state, request):
            state.timed.pop(request, None)
            _post(state, request, ended=True)
    _hand_in(state)


def _hand_in(state: _State) -> None:
    """Submit as many requests as the engine can start, so that a later request may still be
    earlier. A key without running requests takes the slot of the youngest request of a key that has
    several: that one waits for the next slot, and continues there."""
    now, queue = monotonic(), state.queue
    for request in [one for one in state.timed if one.deadline <= now]:
        # The engine ends it like any request whose time is up.
        queue.take(request, request.key)
        _submit(state, request)
    while queue:
        if state.llm.has_free_slot:
            _submit(state, queue.pop())
            continue
        owing = queue.owing_key
        if owing is None:
            return
        running = [one.handle for one in state.running.values() if one.key == owing]
        first = queue.pop()
        _submit(state, first)
        if first.handle is not None:
            any(state.llm.give_way(one) for one in reversed(running) if one is not None)


def _submit(state: _State, request: AsyncRequest) -> None:
    state.timed.pop(request, None)
    params, waited = request.params, monotonic() - request.came
    if params.max_time:
        # The engine counts from here on.
        params = replace(params, max_time=max(params.max_time - waited, 1e-6))
    try:
        handle = state.llm.submit(
            request.ids,
            params,
            allowed=request.allowed,
            sample=request.sample,
            written=request.written,
        )
    except Exception as error:  # noqa: BLE001 - a request's mistake is its own
        state.queue.ended(request.key)
        _post(state, request, ended=True, error=error)
        return
    state.queue.charge(request.key, len(request.ids))
    request.num_charged, request.handle = len(request.written), handle
    reader = handle.reader
    reader.came_earlier(waited)
    state.running[reader.seq.seq_id] = request

    def note(reader: OutputStream, fresh: dict[int, OutputStream] = state.fresh) -> None:
        fresh[reader.seq.seq_id] = reader

    reader.on_end = note
    if not request.quiet:
        reader.on_event, reader.seq.is_watched = note, True
    # Callers of the LLM itself may have driven it meanwhile.
    note(reader)


def _pass_on(state: _State) -> None:
    """Pass on the output of the last job."""
    while state.fresh:
        seq_id, reader = state.fresh.popitem()
        request = state.running.get(seq_id)
        if request is None:
            continue
        events = () if request.quiet else tuple(reader.events())
        num_tokens = reader.seq.num_emitted
        state.queue.charge(request.key, num_tokens - request.num_charged)
        request.num_charged = num_tokens
        if reader.has_ended:
            del state.running[seq_id]
            state.queue.ended(request.key)
        if events or reader.has_ended:
            _post(state, request, *events, ended=reader.has_ended, error=reader.seq.error)


def _post(
    state: _State,
    request: AsyncRequest,
    *events: TextEvent,
    ended: bool,
    error: BaseException | None = None,
) -> None:
    """Put events into the request's mailbox and wake its loop, unless it will look anyway."""
    with state.changed:
        request.events.put(events)
        request.ended, request.error = ended, error
        pending = state.news.setdefault(request.loop, [])
        pending.append(request)
        is_first = len(pending) == 1
    if is_first:
        try:
            request.loop.call_soon_threadsafe(_wake, state, request.loop)
        except RuntimeError:  # the loop is closed, so there are no readers
            _forget(state, request.loop)


def _wake(state: _State, loop: AbstractEventLoop) -> None:
    """Wake the waiting readers; called in the loop."""
    with state.changed:
        requests = state.news.pop(loop, ())
    for request in requests:
        request.wake()


def _forget(state: _State, loop: AbstractEventLoop) -> None:
    with state.changed:
        state.news.pop(loop, None)
        state.leaving += [r for r in (*state.running.values(), *state.queue) if r.loop is loop]


def _end_all(state: _State) -> None:
    """End all requests and release their memory, at the end of the thread."""
    with state.changed:
        waiting = [*state.queue, *state.new, *state.reading]
        state.queue, state.timed = FairQueue(), {}
        state.new.clear()
        state.reading.clear()
    running = list(state.running.values())
    state.running.clear()
    for request in (*running, *waiting):
        _post(state, request, ended=True, error=state.closing)
    for request in running:
        # A broken engine may fail to cancel.
        with suppress(Exception):
            if request.handle is not None:
                state.llm.cancel(request.handle)


def _close(state: _State, thread: threading.Thread, reader: ThreadPoolExecutor) -> None:
    reader.shutdown(wait=False, cancel_futures=True)
    with state.changed:
        if state.closing is None:
            state.closing = ConfigError("this AsyncLLM was closed.", hint="make another one")
        state.changed.notify()
    if thread is not threading.current_thread():
        thread.join()
    state.llm.close()
