"""Chunk size of chunked prefill: how many prompt tokens a job may read, so that no job takes long.

Decisions between jobs (admission, cancelling, Ctrl-C) wait for the longest job, and so do the other
requests of its pass. So a chunk takes at most `CHUNK_SECONDS`, or the time of a few one-row passes
if the model is so large that any pass takes long. When clients stream their texts, a prompt that
takes longer than that, and longer than `LONG_ROUNDS` rounds, is read in chunks that take half as
long as the rounds of the same passes: the other requests then get tokens about two thirds as fast.
The time of a round changes with texts, drafts and the machine, so every eighth pass reads one
prompt token and measures the round anew.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from outrider.sched.jobs import Job, ReadyQueues, Stage

CHUNK_SECONDS = 0.2
# A round of a drafter and a pass is longer than a pass of one row: three rounds are about four such
# passes.
NUM_ROUNDS = 3
# A prompt that takes less than so many rounds is read in few chunks, for which the others wait:
# small chunks cost more than large ones.
LONG_ROUNDS = 16
# The time of a long prompt's chunk as a share of the rounds in the same pass. Rounds differ and a
# chunk's time is estimated: with a half, slow rounds still take less than twice as long as slow
# rounds without a chunk.
SHARE_WITH_ROUNDS = 0.5
# With fewer tokens a pass would read the weights for too little work.
LEAST_CHUNK = 16
# With rounds, which read the weights anyway: as many tokens as kernels compute together.
LEAST_WITH_ROUNDS = 4
PASSES_A_TRIAL = 8
_MANY = 2**31
_PASS = (Stage.PREFILL, Stage.VERIFY)
# The number of remembered passes. Of passes that only read, the fastest counts, for another process
# may have slowed the others down. Of passes with rounds, where a slow pass does harm, the median
# counts, and so it does of rounds, which differ by their drafts.
_NUM_REMEMBERED = 3


class PromptPace:
    """The pace of reading prompts, learned from jobs; at first `seconds` per prompt token."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._reads: deque[float] = deque([seconds] if seconds else [], maxlen=_NUM_REMEMBERED)
        # Seconds of a round, and its number of sequences.
        self._rounds: deque[tuple[float, int]] = deque(maxlen=_NUM_REMEMBERED)
        self._num_with_rounds = 0
        # Whether a prompt that waits now was too long for a chunk when it came.
        self._has_long = False

    @property
    def limit(self) -> int | None:
        """The most prompt tokens of a job; None until some number is known to be too many."""
        most = max(CHUNK_SECONDS, NUM_ROUNDS * self._round_seconds(0))
        return _tokens_in(most, min(self._reads), LEAST_CHUNK) if self._reads else None

    def limit_with_rounds(self, pool: ReadyQueues) -> int | None:
        """Return the limit of a job that also runs the rounds that wait in `pool`, if clients
        stream their texts."""
        most, num_rounds = self.limit, len(pool.draft)
        longest = max([work.num_tokens for work in pool.prefill], default=0)
        if most is None or not self._rounds:
            return most
        # The rest of a long prompt is read as slowly as its beginning, whatever its own length.
        round_seconds = self._round_seconds(num_rounds)
        is_long = longest * min(self._reads) > max(CHUNK_SECONDS, LONG_ROUNDS * round_seconds)
        self._has_long = is_long or (self._has_long and longest > 0)
        if not self._has_long:
            return most
        share = _tokens_in(
            SHARE_WITH_ROUNDS * round_seconds, median(self._reads), LEAST_WITH_ROUNDS
        )
        self._num_with_rounds += 1
        return min(most, share) if self._num_with_rounds % PASSES_A_TRIAL else 1

    def observe(self, job: Job, seconds: float) -> None:
        """Learn from a job that ended. A job that read few prompt tokens counts as a round."""
        read = [work.num_tokens for work in job.works if work.stage in _PASS]
        num_rounds = read.count(1)
        num_tokens = sum(read) - num_rounds
        if num_tokens >= (LEAST_WITH_ROUNDS if num_rounds else LEAST_CHUNK):
            # Rounds may be faster now than when they were measured: the chunk took at least most of
            # its share of the job.
            least = 0.75 * SHARE_WITH_ROUNDS / (1 + SHARE_WITH_ROUNDS) * seconds
            own = max(seconds - self._round_seconds(num_rounds), least)
            self._reads.append((own if num_rounds else seconds) / num_tokens)
        elif not num_tokens and Stage.VERIFY in job.stages:
            self._rounds.append((seconds, num_rounds))

    def _round_seconds(self, num_rounds: int) -> float:
        """Return a round's seconds; 0 while none is known. A larger round than the measured takes
        proportionally longer, for its rows; a smaller one as long, as weights are read once."""
        if not self._rounds:
            return 0.0
        return median([took * max(1, num_rounds / num) for took, num in self._rounds])


def _tokens_in(seconds: float, each: float, least: int) -> int:
    return max(int(min(seconds / each, _MANY)), least)
