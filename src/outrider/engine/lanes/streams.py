"""CUDA streams of lanes, and how one waits for what another gave its sequences.

With events a stream waits for those that its sequences left on other streams, and the host for
none. With a barrier the host waits, before a task begins, until the device has done all that any
lane gave it: easier to reason about, and slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import torch

from outrider.engine.lanes.task import Call, Task, Work


class Marks:
    """Where on its stream the last task of each sequence ended."""

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
            # Whoever was marked longest ago is not live any more.
            while len(self._events) > 2 * live + len(seq_ids):
                del self._events[next(iter(self._events))]


class LaneStream:
    """Runs a lane's tasks on `stream`, behind the tasks that their sequences were in before: it
    waits for their events, or with `barrier` for the whole device."""

    def __init__(self, stream: torch.cuda.Stream, marks: Marks, *, barrier: bool = False) -> None:
        self._stream, self._marks, self._barrier = stream, marks, barrier

    def run(self, call: Call, task: Task) -> Work:
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
            # Nobody reads what a chunk gave; were its request cancelled now, another lane might get
            # pages that are still written.
            event.synchronize()
        self._marks.put(seq_ids, event, task.num_live)
        return work


def lane_streams(
    lanes: Sequence[str], device: torch.device, count: int, *, sync: str = "event"
) -> dict[str, LaneStream]:
    """A stream for each lane, of at most `count` in all, which wait by `sync`: event or barrier.
    None where the device has no streams."""
    if device.type != "cuda":
        return {}
    marks = Marks()
    streams = [torch.cuda.Stream(device) for _ in range(min(count, len(lanes)))]
    return {
        lane: LaneStream(streams[index % len(streams)], marks, barrier=sync == "barrier")
        for index, lane in enumerate(lanes)
    }
