"""How works are chosen from a pool: the few rules that schedules have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.sched.jobs import Job, Pool, Stage, Work

# The names of lanes that schedules have in common.
PREFILL, DECODE, VERIFY = "prefill", "decode", "verify"


@dataclass(frozen=True, slots=True)
class LaneSizes:
    """Most prompt tokens in a pass, and most sequences in a job of each lane."""

    chunk: int
    prefill: int = 1024
    decode: int = 1024
    verify: int = 1024


def job_of(works: Sequence[Work]) -> Job | None:
    return Job(tuple(works)) if works else None


def rounds(works: Sequence[Work]) -> list[Work]:
    """Draft and verify of each of `works`, in one job."""
    found: list[Work] = []
    for work in works:
        found.append(Work(work.seq_id, Stage.DRAFT, work.num_tokens))
        found.append(Work(work.seq_id, Stage.VERIFY, work.num_tokens))
    return found


def shares(pool: Pool, room: int, most: int) -> list[Work]:
    """Unread tokens, pending ones included, of at most `most` sequences that wait for PREFILL, for
    a pass that has room for `room` tokens.

    The oldest gets half of the room, or all that it needs if that is less, so that it comes to its
    end; the rest goes to those that need least, which so do not wait for long prompts. What nobody
    else needs is the oldest's again.
    """
    if not pool.prefill:
        return []
    room = pool.chunk(room)
    oldest, *others = pool.prefill
    first = min(oldest.num_tokens, max(room // 2, 1))
    given: list[Work] = []
    left = room - first
    for work in sorted(others, key=lambda work: work.num_tokens)[: most - 1]:
        count = min(work.num_tokens, left)
        if count > 0:
            given.append(Work(work.seq_id, Stage.PREFILL, count))
        left -= count
    first = min(oldest.num_tokens, first + left)
    return [Work(oldest.seq_id, Stage.PREFILL, first), *given]


def chunks(pool: Pool, room: int, most: int) -> list[Work]:
    """Prompt tokens to read, without pending ones: those need a round."""
    waiting = {work.seq_id: work.num_tokens for work in pool.prefill}
    given = shares(pool, room, most)
    counts = [min(work.num_tokens, waiting[work.seq_id] - 1) for work in given]
    return [
        Work(work.seq_id, Stage.PREFILL, count)
        for work, count in zip(given, counts, strict=True)
        if count > 0
    ]


def beside(lane: str, pool: Pool, sizes: LaneSizes) -> Job | None:
    """What a lane takes that only reads prompts, or only verifies drafts that are there."""
    if lane == PREFILL:
        return job_of(chunks(pool, sizes.chunk, sizes.prefill))
    return job_of(pool.verify[: sizes.verify])
