"""Chunk size of chunked prefill: how many prompt tokens a job may read, so that no job takes long.

Decisions between jobs (admission, cancelling, Ctrl-C) wait for the longest job, and so do the other
requests of its pass. So a chunk takes at most `CHUNK_SECONDS`, or the time of a few one-row passes
of a model that is so large that a pass takes long anyway. Where texts are read while they are
written, a prompt that takes longer than that, and than `LONG_ROUNDS` rounds, is read in chunks
that take half as long as the rounds beside them: others then get tokens about two thirds as fast.
What a round takes changes with texts, drafts and the machine, so every eighth pass reads one token
and times it anew.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from outrider.sched.jobs import Job, ReadyQueues, Stage

CHUNK_SECONDS = 0.2
# A round of a drafter and a pass is longer than a pass of one row: three are about four of those.
NUM_ROUNDS = 3
# Others wait as long as for so many rounds at most; small chunks cost more than large ones, so
# prompts that take less are read in few.
LONG_ROUNDS = 16
# Of a long prompt beside rounds, in the time of these. Rounds differ and a chunk's time is guessed:
# with a half the slow ones are still within twice the slow rounds that nothing is read beside.
SHARE_BESIDE = 0.5
# Fewer tokens would leave the weights that a pass reads without use.
LEAST_CHUNK = 16
# Beside rounds, which read the weights anyway, as many as kernels take together.
LEAST_BESIDE = 4
PASSES_A_TRIAL = 8
_MANY = 2**31
_PASS = (Stage.PREFILL, Stage.VERIFY)
# Of so many passes that read the fastest counts, for another process may have slowed the others
# down; beside rounds, where a pass that is slow is a harm, the middle one. So it does of rounds,
# which differ by what was drafted.
_NUM_REMEMBERED = 3


class PromptPace:
    """Learns from the jobs of an engine; `seconds` a prompt token are expected at first."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._reads: deque[float] = deque([seconds] if seconds else [], maxlen=_NUM_REMEMBERED)
        # Seconds, and of how many sequences.
        self._rounds: deque[tuple[float, int]] = deque(maxlen=_NUM_REMEMBERED)
        self._num_beside = 0
        # Of the prompts that wait now, one was too long for a chunk when it came.
        self._has_long = False

    @property
    def limit(self) -> int | None:
        """Prompt tokens of a job at most; None while nothing says that any number is too many."""
        most = max(CHUNK_SECONDS, NUM_ROUNDS * self._round_seconds(0))
        return _tokens_in(most, min(self._reads), LEAST_CHUNK) if self._reads else None

    def limit_beside(self, pool: ReadyQueues) -> int | None:
        """The same for a job that also has the rounds that wait in `pool`, of texts which are read
        while they are written."""
        most, num_rounds = self.limit, len(pool.draft)
        longest = max([work.num_tokens for work in pool.prefill], default=0)
        if most is None or not self._rounds:
            return most
        # What is left of a long prompt is as long for those beside it as its beginning was.
        round_seconds = self._round_seconds(num_rounds)
        is_long = longest * min(self._reads) > max(CHUNK_SECONDS, LONG_ROUNDS * round_seconds)
        self._has_long = is_long or (self._has_long and longest > 0)
        if not self._has_long:
            return most
        beside = _tokens_in(SHARE_BESIDE * round_seconds, median(self._reads), LEAST_BESIDE)
        self._num_beside += 1
        return min(most, beside) if self._num_beside % PASSES_A_TRIAL else 1

    def observe(self, job: Job, seconds: float) -> None:
        """A job ended. Those in which few tokens were read are rounds."""
        read = [work.num_tokens for work in job.works if work.stage in _PASS]
        num_rounds = read.count(1)
        num_tokens = sum(read) - num_rounds
        if num_tokens >= (LEAST_BESIDE if num_rounds else LEAST_CHUNK):
            # Rounds may take less by now than they did: the chunk had most of its share of the job
            # at least.
            least = 0.75 * SHARE_BESIDE / (1 + SHARE_BESIDE) * seconds
            own = max(seconds - self._round_seconds(num_rounds), least)
            self._reads.append((own if num_rounds else seconds) / num_tokens)
        elif not num_tokens and Stage.VERIFY in job.stages:
            self._rounds.append((seconds, num_rounds))

    def _round_seconds(self, num_rounds: int) -> float:
        """Of so many sequences; 0 while none is known. Of more than were seen it takes as much
        longer, for rows are computed, and no shorter of fewer, for weights are read once."""
        if not self._rounds:
            return 0.0
        return median([took * max(1, num_rounds / num) for took, num in self._rounds])


def _tokens_in(seconds: float, each: float, least: int) -> int:
    return max(int(min(seconds / each, _MANY)), least)
