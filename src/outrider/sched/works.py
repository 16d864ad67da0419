"""How works are chosen from a pool: the few rules that schedules have in common."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.sched.jobs import Job, Pool, Stage, Work


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
