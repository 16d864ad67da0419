"""Records of jobs that nobody ran."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.budget import JobTrace


def trace(
    kinds: str,
    sequences: int | Sequence[int],
    seconds: float,
    *,
    ended: float | None = None,
    num_live: int = 1,
    num_failed: int = 0,
) -> JobTrace:
    """Of so many sequences, or of these; `kinds` is written with commas."""
    seq_ids = tuple(range(sequences)) if isinstance(sequences, int) else tuple(sequences)
    end = seconds if ended is None else ended
    return JobTrace(
        lane="verify",
        kinds=tuple(kinds.split(",")),
        seq_ids=seq_ids,
        num_tokens=len(seq_ids),
        began=end - seconds,
        ended=end,
        queues=(0, 0, 0),
        num_waiting=0,
        num_live=num_live,
        num_free_tokens=99,
        num_failed=num_failed,
    )
