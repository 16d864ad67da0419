"""`AsyncLLM`, an LLM for asyncio: tasks stream and generate, and one thread runs the engine.

async with AsyncLLM("outrider/embedded") as llm:
    async for event in llm.stream("def quicksort(items):"):
        print(event.text, end="")

Requests and cancellations are passed in queues that the thread reads before each job. After a job
each loop with news is called back once, for any number of requests and tokens, and not again until
it has read them: a slow loop gets one larger piece, and never a backlog.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Self, TypeVar, Unpack

from outrider.api.callers import (
    Message,
    OfOneProcess,
    Prompt,
    RequestOptions,
    sampling_of,
    several_prompts,
    structure_in,
)
from outrider.api.llm import EMBEDDED, LLM
from outrider.api.output import OutputStream
from outrider.api.request import AsyncRequest, check_any, result_of
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.structure import StructureOptions
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, OutriderError, QueueFullError
from outrider.core.logits import AllowedTokens
from outrider.core.options import EngineOptions
from outrider.core.params import SamplingParams, params_for_each, params_for_one
from outrider.core.protocols import Controller
from outrider.sched.admission import FairQueue


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

    async def next_event(self, request: AsyncRequest) -> TextEvent | None:
        """The next event of a request, None at the end. Raises the request's error."""
        while True:
            # Read before taking an event: the last events come with the end.
            ended = request.ended
            with self._state.changed:
                event = request.events.take()
            if event is not None:
                return event
            if ended:
                if request.error is not None:
                    raise request.error
                return None
            await request.news()

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


# Threads that turn prompts into ids; the tokenizer library works outside Python's lock.
_NUM_ENCODERS = 2
_Found = TypeVar("_Found")


class AsyncTextStream(OfOneProcess, AsyncIterator[TextEvent]):
    """The events of a request, one or more rounds each: a slow reader gets fewer, larger ones, and
    no text is lost. The request starts when the first event is requested, with the ids of `encode`.

    Leaving the loop, cancelling the task, `aclose` or dropping the stream cancels the request
    before the engine's next job. `cancel` does so from any thread, and the loop over it ends.
    """

    def __init__(
        self,
        owner: AsyncLLM,
        encode: Callable[[], list[int]],
        params: SamplingParams,
        allowed: AllowedTokens | None,
        structure: StructureOptions,
    ) -> None:
        self._owner, self._encode = owner, encode
        self._params, self._allowed, self._structure = params, allowed, structure
        self._request: AsyncRequest | None = None
        self._left = False
        self._is_asked = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextEvent:
        if self._is_asked:
            raise ConfigError("another task is waiting for this stream.", hint="one stream a task")
        self._is_asked = True
        try:
            event = await self._next()
        except BaseException:
            self.cancel()
            raise
        finally:
            self._is_asked = False
        if event is None:
            raise StopAsyncIteration
        return event

    @property
    def result(self) -> GenerationResult:
        """The result, once the loop over the stream has ended. Raises the error that ended the
        request, and ConfigError while it runs or if it never ran."""
        return result_of(self._request)

    def cancel(self) -> None:
        """End the request, if it has not ended; from any thread."""
        self._left = True
        if self._request is not None and not self._request.ended:
            self._owner.engine.leave(self._request)

    async def aclose(self) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    async def _next(self) -> TextEvent | None:
        """The next event, None at the end."""
        request = self._request
        if request is None:
            if self._left:
                return None
            ids = await self._owner.encoded(self._encode)
            loop, allowed = asyncio.get_running_loop(), self._allowed
            request = AsyncRequest(loop, ids, self._params, allowed, self._structure)
            self._request = request
            self._owner.engine.add(request)
            if self._left:
                # Cancelled from another thread during tokenization.
                self.cancel()
        return await self._owner.engine.next_event(request)


class AsyncLLM(OfOneProcess):
    """An `LLM` whose callers are tasks, of one event loop or several. The constructor loads the
    models, as an LLM's does; `await asyncio.to_thread(AsyncLLM, ...)` keeps the loop running.

    `model` may be an existing LLM; `options` are fields of EngineConfig. Threads of their own turn
    prompts into ids, and one thread runs the engine, so no call blocks the loop. At most
    `max_queued` requests wait in addition to those in the engine's own queue; one more raises
    QueueFullError. `async with` closes it at the end.
    """

    def __init__(
        self,
        model: str | Path | LLM = EMBEDDED,
        *,
        draft: str | Path | None = None,
        config: EngineConfig | None = None,
        controller: Controller | str | None = None,
        max_queued: int = 100_000,
        **options: Unpack[EngineOptions],
    ) -> None:
        if isinstance(model, LLM):
            if options or any(given is not None for given in (draft, config, controller)):
                raise ConfigError(
                    "a loaded LLM has its draft model and configuration already.",
                    hint="give the LLM alone",
                )
            self.llm = model
        else:
            self.llm = LLM(model, draft=draft, config=config, controller=controller, **options)
        self.engine = EngineThread(self.llm, max_queued)
        self._encoders = ThreadPoolExecutor(_NUM_ENCODERS, "outrider-encode")
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Async{repr(self.llm).removeprefix('<')}"

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        allowed: AllowedTokens | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncTextStream:
        """The events of one completion; `allowed` and `options` are those of `LLM.stream`. The
        first event raises the error of a bad prompt."""
        wanted, structure = params_for_one(params, sampling_of(options)), structure_in(options)
        encode = partial(self.llm.encode, prompt)
        return AsyncTextStream(self, encode, wanted, allowed, structure)

    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncTextStream:
        """The assistant's next turn, through the checkpoint's own chat template."""
        wanted, structure = params_for_one(params, sampling_of(options)), structure_in(options)
        encode = partial(self.llm.encode_chat, messages)
        return AsyncTextStream(self, encode, wanted, None, structure)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        allowed: AllowedTokens | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]:
        """Run all prompts. Returns `n` results for each, in order, as `LLM.generate` does: a prompt
        that cannot be run has a result with its `error`, and if none can be run the first error is
        raised. Cancelling the task cancels the requests."""
        batch = several_prompts(prompts)
        each = [one.seeded() for one in params_for_each(params, len(batch), sampling_of(options))]
        structure = structure_in(options)
        requests: list[AsyncRequest] = []
        try:
            for prompt, wanted in zip(batch, each, strict=True):
                requests += await self._add_all(prompt, wanted, allowed, structure)
            for request in requests:
                while not request.ended:
                    await request.news()
            check_any([request.error for request in requests])
            return [self._outcome(request) for request in requests]
        finally:
            for request in requests:
                self.engine.leave(request)

    async def _add_all(
        self,
        prompt: Prompt,
        params: SamplingParams,
        allowed: AllowedTokens | None,
        structure: StructureOptions,
    ) -> Sequence[AsyncRequest]:
        """The `n` requests of a prompt, which have ended if the prompt has an error."""
        single, loop = replace(params, n=1), asyncio.get_running_loop()
        try:
            ids = await self.encoded(partial(self.llm.encode, prompt))
        except OutriderError as error:
            return [AsyncRequest(loop, (), single, ended=True, error=error)] * params.n
        requests = [
            AsyncRequest(loop, ids, single, allowed, structure, sample, quiet=True)
            for sample in range(params.n)
        ]
        for index, request in enumerate(requests):
            try:
                self.engine.add(request)
            except OutriderError:
                for added in requests[:index]:
                    self.engine.leave(added)
                raise
        return requests

    def _outcome(self, request: AsyncRequest) -> GenerationResult:
        """The result of an ended request, with its error if it failed."""
        handle, error = request.handle, request.error
        if handle is None and isinstance(error, OutriderError):
            return self.llm.failed(error)
        if handle is not None and handle.reader.seq.error is error:
            return handle.make_result(handle.reader)
        # The engine was closed meanwhile.
        raise error or ConfigError("the request was cancelled before it started.")

    async def aclose(self) -> None:
        """Cancel running requests, whose readers get an error, and end all threads."""
        self._is_closed = True
        await asyncio.to_thread(self.engine.close)
        self._encoders.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def encoded(self, encode: Callable[[], _Found]) -> _Found:
        """The result of `encode`, called in another thread. Raises ConfigError once closed."""
        if self._is_closed:
            raise ConfigError("this AsyncLLM is closed.", hint="make another one")
        return await asyncio.get_running_loop().run_in_executor(self._encoders, encode)
