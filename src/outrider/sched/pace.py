"""Chunk size of chunked prefill: how many prompt tokens a job may read, so that no job takes long.

Decisions between jobs (admission, cancelling, Ctrl-C) wait for the longest job, and so do the other
requests of its pass. So a chunk takes at most `CHUNK_SECONDS`, or the time of a few one-row passes
of a model that is so large that a pass takes long anyway.
"""

from __future__ import annotations

from collections import deque

from outrider.sched.jobs import Job, Stage

CHUNK_SECONDS = 0.2
# A round of a drafter and a pass is longer than a pass of one row: three are about four of those.
NUM_ROUNDS = 3
# Fewer tokens would leave the weights that a pass reads without use.
LEAST_CHUNK = 16
_MANY = 2**31
_PASS = (Stage.PREFILL, Stage.VERIFY)
# The fastest of so many counts: another process may have slowed the others down.
_NUM_REMEMBERED = 3


class PromptPace:
    """Learns from the jobs of an engine; `seconds` a prompt token are expected at first."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._reads: deque[float] = deque([seconds] if seconds else [], maxlen=_NUM_REMEMBERED)
        self._rounds: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    @property
    def limit(self) -> int | None:
        """Prompt tokens of a job at most; None while nothing says that any number is too many."""
        if not self._reads:
            return None
        most = max(CHUNK_SECONDS, NUM_ROUNDS * min(self._rounds, default=0.0))
        return max(int(min(most / min(self._reads), _MANY)), LEAST_CHUNK)

    def observe(self, job: Job, seconds: float) -> None:
        """A job ended. Those in which few tokens were read are rounds."""
        read = [work.num_tokens for work in job.works if work.stage in _PASS]
        num_tokens = sum(read)
        if num_tokens >= LEAST_CHUNK + len(read):
            self._reads.append(seconds / num_tokens)
        elif read and num_tokens == len(read) and job.works[-1].stage is Stage.VERIFY:
            self._rounds.append(seconds)
