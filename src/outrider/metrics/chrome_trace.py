"""Chrome trace (Perfetto) of jobs and rounds: lanes as threads, stages as events, counters.

Format: "Trace Event Format" of the Chromium project, as a JSON object. A job is a complete event
(X) that holds the stages of its round; queues, waiting requests and free memory are counters (C);
an arrow (s, f) leads from a sequence's job to its next one on another lane. Times are whole
nanoseconds since the first job, written in microseconds. Events come in order of time, and only
those of running jobs are held besides the records themselves.
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from outrider.core.budget import JobTrace, RoundTrace
from outrider.metrics.timeline import QUEUES

PASSES = ("prefill", "verify")


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of a job: prefill, draft, ahead, verify or accept. Seconds of the job's clock."""

    stage: str
    began: float
    ended: float


def rounds_of(
    jobs: Sequence[JobTrace], rounds: Iterable[RoundTrace]
) -> list[tuple[RoundTrace, ...]]:
    """For each job, the records of its target pass, an entry a sequence; () for a job without one,
    and for one that failed or whose records were not kept.

    A sequence is in one pass at a time, so its records, which come in order, belong to its jobs in
    order. Records of one pass share an index, which tells when some are missing: a sequence that
    failed has none, and those that are tried again have theirs from other passes.
    """
    left: dict[int, deque[RoundTrace]] = {}
    for trace in rounds:
        left.setdefault(trace.seq_id, deque()).append(trace)
    found: list[tuple[RoundTrace, ...]] = [()] * len(jobs)
    for place in sorted(range(len(jobs)), key=lambda i: jobs[i].began):
        job = jobs[place]
        if not set(PASSES) & set(job.kinds):
            continue
        heads = [left[seq_id][0] for seq_id in job.seq_ids if left.get(seq_id)]
        if len(heads) == len(job.seq_ids) and len({trace.pass_index for trace in heads}) == 1:
            found[place] = tuple(left[seq_id].popleft() for seq_id in job.seq_ids)
    return found


def slices(job: JobTrace, rounds: Sequence[RoundTrace] = ()) -> list[Slice]:
    """Disjoint and in order, inside the job. Without `rounds`, the whole job by its last stage.

    A job's record says when it began and ended, a round's how long its parts took. Parts run in the
    order draft, pass, accept, each right after the one before. Pauses between them are not
    recorded, so the rest of a job shows at its end. A pass that read prompt tokens counts as
    prefill, as it does in `metrics/summary.py`, whatever else was in it.
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
    """The file, piece by piece; `about` is kept in it as `otherData`.

    It is whole and valid JSON only when all pieces were taken.
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
    """All events: names first, then by `ts`; a job before the stages inside it."""
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
    for place, (job, own) in enumerate(zip(records, found, strict=True)):
        scene = _Scene(threads[job.lane], records[0].began)
        now = scene.nanoseconds(job.began)
        while held and held[0][0] < now:
            yield heapq.heappop(held)[-1]
        for event, at in (*scene.job(job, own), *scene.arrow_ends(job, place, arrows)):
            heapq.heappush(held, (at, next(order), event))
    while held:
        yield heapq.heappop(held)[-1]


@dataclass(frozen=True, slots=True)
class _Arrow:
    """Sequence `seq_id` went from the job at `source` to the one at `goal`."""

    number: int
    seq_id: int
    source: int
    goal: int


def _arrows(records: Sequence[JobTrace]) -> dict[int, list[_Arrow]]:
    """By the places of the jobs they start from and lead to. A job's source is the job of the same
    sequence that ended last before it began: a draft for both its verification and what is drafted
    ahead meanwhile."""
    found: dict[int, list[_Arrow]] = {}
    recent: dict[int, list[int]] = {}
    numbers = count(1)
    for place, job in enumerate(records):
        for seq_id in job.seq_ids:
            past = recent.setdefault(seq_id, [])
            ended = [i for i in past if records[i].ended <= job.began]
            if ended:
                source = max(ended, key=lambda i: records[i].ended)
                # What ended before it can be nobody's source any more.
                past[:] = [i for i in past if i == source or i not in ended]
                if records[source].lane != job.lane:
                    arrow = _Arrow(next(numbers), seq_id, source, place)
                    for end in (source, place):
                        found.setdefault(end, []).append(arrow)
            past.append(place)
    return found


_Placed = tuple[Event, int]


@dataclass(frozen=True, slots=True)
class _Scene:
    """Events of one job's lane, each with its moment in nanoseconds."""

    thread: int
    origin: float

    def nanoseconds(self, moment: float) -> int:
        return round(1e9 * (moment - self.origin))

    def job(self, job: JobTrace, rounds: Sequence[RoundTrace]) -> Iterator[_Placed]:
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
        self, job: JobTrace, place: int, arrows: Mapping[int, Sequence[_Arrow]]
    ) -> Iterator[_Placed]:
        """An arrow hangs on the job that runs at its moment, so it starts just before the end."""
        began, ended = self.nanoseconds(job.began), self.nanoseconds(job.ended)
        for arrow in arrows.get(place, ()):
            starts = arrow.source == place
            at = max(began, ended - 1) if starts else began
            event = _event("s" if starts else "f", f"sequence {arrow.seq_id}", at, self.thread)
            event |= {"cat": "sequence", "id": arrow.number}
            yield event if starts else event | {"bp": "e"}, at

    def _slice(
        self, name: str, kind: str, began: float, ended: float, args: dict[str, object]
    ) -> _Placed:
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
