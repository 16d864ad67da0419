"""Which rounds a job held, and its time cut into stages.

A job's record says when it began and ended, a round's how long its parts took. Joined, they say
what a lane did when: parts run in the order draft, pass, accept, each right after the one before.
Pauses between them are not recorded, so what is left of a job shows at its end. A pass that read
prompt tokens counts as prefill, as it does in `metrics/summary.py`, whatever else was in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.core.budget import JobTrace, RoundTrace

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
    """Disjoint and in order, inside the job. Without `rounds`, the whole job by its last stage."""
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
