"""Lanes as threads, each with a CUDA stream: jobs run at once and meet in the engine's thread.

Each lane's native calls have a team of threads of their own, so no two lanes wait for each other.
Nothing is locked while a model runs. No thread waits for a lane whose engine is gone, except at the
end of the process: a thread that returns from PyTorch after the interpreter is gone would abort it.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock, Thread, get_ident
from time import monotonic

import torch

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.errors import ContractError, ordinary
from outrider.core.process import breakable
from outrider.engine.lanes import Call, LaneResult, LaneTask, LaneWork


class Marks:
    """The stream events that ended the last task of each sequence."""

    def __init__(self) -> None:
        self._events: dict[int, torch.cuda.Event] = {}
        self._lock = Lock()

    def of(self, seq_ids: Sequence[int]) -> list[torch.cuda.Event]:
        with self._lock:
            return [self._events[i] for i in seq_ids if i in self._events]

    def put(self, seq_ids: Sequence[int], event: torch.cuda.Event, live: int) -> None:
        with self._lock:
            for seq_id in seq_ids:
                self._events.pop(seq_id, None)
                self._events[seq_id] = event
            # The sequence that was marked longest ago is not running any more.
            while len(self._events) > 2 * live + len(seq_ids):
                del self._events[next(iter(self._events))]


class LaneStream:
    """A stream that runs a lane's tasks after the previous tasks of their sequences: it waits for
    their events, or with `barrier` for the whole device.

    With events a stream waits for the events that its sequences left on other streams, and the host
    waits for nothing. With a barrier the host waits, before a task begins, until the device has
    done all that any lane gave it: easier to reason about, and slower.
    """

    def __init__(self, stream: torch.cuda.Stream, marks: Marks, *, barrier: bool = False) -> None:
        self._stream, self._marks, self._barrier = stream, marks, barrier

    def run(self, call: Call, task: LaneTask) -> LaneWork:
        seq_ids = task.job.seq_ids
        if self._barrier:
            torch.cuda.synchronize(self._stream.device)
        else:
            for event in self._marks.of(seq_ids):
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            work = call(task)
            event = torch.cuda.Event()
            event.record(self._stream)
        if task.chunks:
            # The results of a chunk are never read; if its request were cancelled now, another lane
            # might get pages that are still being written.
            event.synchronize()
        self._marks.put(seq_ids, event, task.num_live)
        return work


def lane_streams(
    lanes: Sequence[str], device: torch.device, count: int, *, sync: str = "event"
) -> dict[str, LaneStream]:
    """Return a stream for each lane, of at most `count` in all, which wait by `sync`: event or
    barrier. Empty if the device has no streams."""
    if device.type != "cuda":
        return {}
    marks = Marks()
    streams = [torch.cuda.Stream(device) for _ in range(min(count, len(lanes)))]
    return {
        lane: LaneStream(streams[index % len(streams)], marks, barrier=sync == "barrier")
        for index, lane in enumerate(lanes)
    }


# (lane's number) -> the work of that thread before its first task.
Setup = Callable[[int], None]

# Seconds that the end of the process waits for threads that hang.
_PATIENCE_SECONDS = 5.0


class ThreadLanes:
    """An executor with a thread for each lane. `setup` is called once in each lane's thread.
    `streams` are the lanes' streams, if the device has any."""

    def __init__(
        self,
        calls: Mapping[str, Call],
        setup: Setup,
        streams: Mapping[str, LaneStream],
        clock: Clock = HOST_CLOCK,
    ) -> None:
        self._calls, self._setup, self._streams, self._clock = calls, setup, streams, clock
        self._signals: SimpleQueue[None] = SimpleQueue()
        self._busy: dict[str, float] = {}
        self._lanes: dict[str, _Lane] = {}
        self._numbers = {lane: number for number, lane in enumerate(calls)}
        self._kept: list[LaneResult] = []
        self._threads: set[int] = set()
        self._close = weakref.finalize(self, _end_all, self._lanes)

    @property
    def busy(self) -> Mapping[str, float]:
        return self._busy

    def is_here(self) -> bool:
        return get_ident() in self._threads

    def start(self, lane: str, task: LaneTask) -> None:
        if lane in self._busy:
            raise ContractError("the lane runs a task")
        if lane not in self._lanes:
            self._lanes[lane] = self._new(lane)
        self._busy[lane] = self._clock()
        self._lanes[lane].tasks.put(task)

    def wait(self, seconds: float | None = None) -> list[LaneResult]:
        # An interrupt may lose a signal, but not the result that it announced.
        while not (found := self._collected()):
            try:
                with breakable():
                    self._signals.get(timeout=seconds)
            except Empty:
                return self._collected()
        return found

    def abandon(self, lane: str) -> None:
        self._lanes.pop(lane).tasks.put(None)
        del self._busy[lane]

    def close(self) -> None:
        """End the threads when their tasks end. Running tasks are awaited, and their results
        retained for `wait`; the next task starts new threads."""
        while any(self._lanes[name].done is None for name in self._busy):
            with breakable():
                self._signals.get()
        self._kept += self._collected()
        self._close()
        self._close = weakref.finalize(self, _end_all, self._lanes)

    def _collected(self) -> list[LaneResult]:
        found, self._kept = self._kept, []
        for name in list(self._busy):
            lane = self._lanes.get(name)
            if lane is not None and lane.done is not None:
                found.append(lane.done)
                lane.done = None
                del self._busy[name]
        return found

    def _new(self, name: str) -> _Lane:
        # Nothing here refers to the engine: a thread must not keep the object alive that would end
        # it.
        call, number, stream = self._calls[name], self._numbers[name], self._streams.get(name)
        lane = _Lane(
            name, number, call, self._setup, stream, self._signals, self._threads, self._clock
        )
        thread = Thread(target=lane.serve, name=f"outrider-{name}", daemon=True)
        thread.start()
        _serving[thread] = lane.tasks
        # Once, and before whatever a task may need is taken down.
        atexit.unregister(_end_with_process)
        atexit.register(_end_with_process)
        return lane


@dataclass(eq=False, slots=True)
class _Lane:
    """The state of a lane's thread."""

    name: str
    number: int
    call: Call
    setup: Setup
    stream: LaneStream | None
    signals: SimpleQueue[None]
    threads: set[int]
    clock: Clock
    done: LaneResult | None = None
    is_ready: bool = False
    tasks: SimpleQueue[LaneTask | None] = field(default_factory=SimpleQueue[LaneTask | None])

    def serve(self) -> None:
        self.threads.add(get_ident())
        while (task := self.tasks.get()) is not None:
            self.done = self._run(task)
            self.signals.put(None)
            # While it waits for the next one it must not keep these sequences alive.
            del task
        # The identifier may soon be another thread's.
        self.threads.discard(get_ident())

    def _run(self, task: LaneTask) -> LaneResult:
        began = self.clock()
        work, error = LaneWork(), None
        try:
            if not self.is_ready:
                self.setup(self.number)
                self.is_ready = True
            work = self.call(task) if self.stream is None else self.stream.run(self.call, task)
        except BaseException as caught:  # noqa: BLE001
            # The lane goes on; the engine decides what the error ends. Ctrl-C never comes here.
            error = ordinary(caught)
        return LaneResult(self.name, task, work, error, began, self.clock())


# The task queue of every thread that may still run.
_serving: weakref.WeakKeyDictionary[Thread, SimpleQueue[LaneTask | None]] = (
    weakref.WeakKeyDictionary()
)


def _end_all(lanes: dict[str, _Lane]) -> None:
    while lanes:
        lanes.popitem()[1].tasks.put(None)


def _end_with_process() -> None:
    threads = list(_serving.items())
    for _, tasks in threads:
        tasks.put(None)
    latest = monotonic() + _PATIENCE_SECONDS
    for thread, _ in threads:
        thread.join(max(0.0, latest - monotonic()))
