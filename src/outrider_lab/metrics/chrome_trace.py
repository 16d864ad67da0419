"""Chrome trace (Perfetto) of jobs and rounds: lanes as threads, stages as events, counters.

Format: "Trace Event Format" of the Chromium project, as a JSON object. A job is a complete event
(X) that holds the stages of its round; queues, waiting requests and free memory are counters (C);
an arrow (s, f) leads from a sequence's job to its next one on another lane. Times are whole
nanoseconds since the first job, written in microseconds. Events are written in order of time;
memory holds the records, and the events of running jobs.
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from outrider.core.draft import JobTrace, RoundTrace
from outrider_lab.metrics.timeline import QUEUES

PASSES = ("prefill", "verify")


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a job: prefill, draft, ahead, verify or accept, in seconds of its clock."""

    stage: str
    began: float
    ended: float


def rounds_of(
    jobs: Sequence[JobTrace], rounds: Iterable[RoundTrace]
) -> list[tuple[RoundTrace, ...]]:
    """Return for each job the records of its target pass, one per sequence.

    The entry is () for a job without a target pass, and for one that failed or whose records were
    not kept. A sequence is in one pass at a time, so its records belong to its jobs in order. All
    records of a pass have the same index. If the indices differ, some records are missing: a failed
    sequence has none, and a sequence that is tried again has its record from another pass.
    """
    left: dict[int, deque[RoundTrace]] = {}
    for trace in rounds:
        left.setdefault(trace.seq_id, deque()).append(trace)
    found: list[tuple[RoundTrace, ...]] = [()] * len(jobs)
    for index in sorted(range(len(jobs)), key=lambda i: jobs[i].began):
        job = jobs[index]
        if not set(PASSES) & set(job.kinds):
            continue
        heads = [left[seq_id][0] for seq_id in job.seq_ids if left.get(seq_id)]
        if len(heads) == len(job.seq_ids) and len({trace.pass_index for trace in heads}) == 1:
            found[index] = tuple(left[seq_id].popleft() for seq_id in job.seq_ids)
    return found


def slices(job: JobTrace, rounds: Sequence[RoundTrace] = ()) -> list[Slice]:
    """Return the disjoint parts of a job, in order; without `rounds`, one part with its last stage.

    The record of a job has its begin and end, the record of a round the duration of each part. The
    parts run in the order draft, pass, accept. Pauses between them are not recorded: they show at
    the end of the job. A pass that read any prompt tokens counts as prefill, as it does in
    `outrider/metrics.py`.
    """
    if not rounds:
        return [Slice(job.kinds[-1], job.began, job.ended)]
    shared = rounds[0]
    reads = any(trace.num_prompt_tokens for trace in rounds)
    whole = "prefill" if reads else job.kinds[-1]
    parts = [
        ("draft", shared.draft_seconds if "draft" in job.kinds else 0.0),
        (whole, shared.verify_seconds),
        ("accept", shared.accept_seconds),
    ]
    found: list[Slice] = []
    now = job.began
    for stage, length in parts:
        ended = min(now + length, job.ended)
        if ended > now:
            found.append(Slice(stage, now, ended))
        now = ended
    return found or [Slice(whole, job.began, job.ended)]


Event = dict[str, object]
PROCESS = 1


def trace_pieces(
    jobs: Iterable[JobTrace],
    rounds: Iterable[RoundTrace] = (),
    *,
    about: Mapping[str, object] | None = None,
) -> Iterator[str]:
    """Yield the file piece by piece; `about` becomes its `otherData`.

    The file is valid JSON only once all pieces are written.
    """
    head = {
        "displayTimeUnit": "ms",
        "otherData": {"clock": "ns since the first job", **(about or {})},
    }
    yield json.dumps(head, allow_nan=False)[:-1] + ', "traceEvents": ['
    comma = ""
    for event in trace_events(jobs, rounds):
        yield f"{comma}\n{json.dumps(event, allow_nan=False)}"
        comma = ","
    yield "\n]}\n"


def trace_events(jobs: Iterable[JobTrace], rounds: Iterable[RoundTrace] = ()) -> Iterator[Event]:
    """Yield all events: names first, then by `ts`; a job before the stages inside it."""
    records = sorted(jobs, key=lambda job: (job.began, job.ended))
    threads = {lane: i for i, lane in enumerate(dict.fromkeys(j.lane for j in records), start=1)}
    yield _named("process_name", "outrider")
    for lane, thread in threads.items():
        yield _named("thread_name", lane, thread)
        yield _event("M", "thread_sort_index", 0, thread) | {"args": {"sort_index": thread}}
    if not records:
        return
    arrows = _arrows(records)
    held: list[tuple[int, int, Event]] = []
    order = count()
    found = rounds_of(records, rounds)
    for index, (job, own) in enumerate(zip(records, found, strict=True)):
        scene = _Scene(threads[job.lane], records[0].began)
        now = scene.nanoseconds(job.began)
        while held and held[0][0] < now:
            yield heapq.heappop(held)[-1]
        for event, at in (*scene.job(job, own), *scene.arrow_ends(job, index, arrows)):
            heapq.heappush(held, (at, next(order), event))
    while held:
        yield heapq.heappop(held)[-1]


@dataclass(frozen=True, slots=True)
class _Arrow:
    """A sequence's way from one job to its next; `source` and `goal` are indices of jobs."""

    number: int
    seq_id: int
    source: int
    goal: int


def _arrows(records: Sequence[JobTrace]) -> dict[int, list[_Arrow]]:
    """Return the arrows that start or end at each job, by index. An arrow starts at the sequence's
    job that ended last before the other began, so a draft may have two: to its verification, and to
    drafting ahead."""
    found: dict[int, list[_Arrow]] = {}
    recent: dict[int, list[int]] = {}
    numbers = count(1)
    for index, job in enumerate(records):
        for seq_id in job.seq_ids:
            past = recent.setdefault(seq_id, [])
            ended = [i for i in past if records[i].ended <= job.began]
            if ended:
                source = max(ended, key=lambda i: records[i].ended)
                # Earlier jobs cannot be the source of any later job.
                past[:] = [i for i in past if i == source or i not in ended]
                if records[source].lane != job.lane:
                    arrow = _Arrow(next(numbers), seq_id, source, index)
                    for end in (source, index):
                        found.setdefault(end, []).append(arrow)
            past.append(index)
    return found


_TimedEvent = tuple[Event, int]


@dataclass(frozen=True, slots=True)
class _Scene:
    """Events of one job's lane, each with its moment in nanoseconds."""

    thread: int
    origin: float

    def nanoseconds(self, moment: float) -> int:
        return round(1e9 * (moment - self.origin))

    def job(self, job: JobTrace, rounds: Sequence[RoundTrace]) -> Iterator[_TimedEvent]:
        args: dict[str, object] = {
            "sequences": list(job.seq_ids),
            "tokens": job.num_tokens,
            "live": job.num_live,
            "failed": job.num_failed,
        }
        if rounds:
            args["rounds"] = [_round(trace) for trace in rounds]
        yield self._slice("+".join(job.kinds), "job", job.began, job.ended, args)
        if rounds:
            for part in slices(job, rounds):
                yield self._slice(part.stage, "stage", part.began, part.ended, {})
        at = self.nanoseconds(job.began)
        waiting = dict(zip(QUEUES, job.queues, strict=True))
        for name, values in (
            ("queues", waiting),
            ("requests", {"waiting": job.num_waiting, "live": job.num_live}),
            ("free memory", {"tokens": job.num_free_tokens}),
        ):
            yield _event("C", name, at) | {"args": values}, at

    def arrow_ends(
        self, job: JobTrace, index: int, arrows: Mapping[int, Sequence[_Arrow]]
    ) -> Iterator[_TimedEvent]:
        """Yield the arrow events of a job. Perfetto attaches an arrow to the job that runs at the
        event's time, so an arrow starts just before the end of its job."""
        began, ended = self.nanoseconds(job.began), self.nanoseconds(job.ended)
        for arrow in arrows.get(index, ()):
            starts = arrow.source == index
            at = max(began, ended - 1) if starts else began
            event = _event("s" if starts else "f", f"sequence {arrow.seq_id}", at, self.thread)
            event |= {"cat": "sequence", "id": arrow.number}
            yield event if starts else event | {"bp": "e"}, at

    def _slice(
        self, name: str, kind: str, began: float, ended: float, args: dict[str, object]
    ) -> _TimedEvent:
        at = self.nanoseconds(began)
        length = max(self.nanoseconds(ended) - at, 0)
        event = _event("X", name, at, self.thread) | {"dur": length / 1000, "cat": kind}
        return event | ({"args": args} if args else {}), at


def _round(trace: RoundTrace) -> dict[str, object]:
    found: dict[str, object] = {
        "sequence": trace.seq_id,
        "prompt": trace.num_prompt_tokens,
        "drafted": trace.num_drafted,
        "accepted": trace.num_accepted,
        "emitted": trace.num_emitted,
    }
    if trace.mask_seconds:
        found["mask_ms"] = round(1e3 * trace.mask_seconds, 3)
    return found if trace.hit is None else found | {"hit": trace.hit}


def _named(what: str, name: str, thread: int = 0) -> Event:
    return _event("M", what, 0, thread) | {"args": {"name": name}}


def _event(kind: str, name: str, nanoseconds: int, thread: int = 0) -> Event:
    return {"ph": kind, "name": name, "ts": nanoseconds / 1000, "pid": PROCESS, "tid": thread}
