"""What a drafter has not read of each text, and the seconds that it takes to read it.

A draft model reads a text when it drafts for it: the prompt at first, and later what the target
wrote alone. Drafters that look up take next to nothing for that, and are measured alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.core.budget import RoundTrace
from outrider.estimate.online import BySequence, RunningMedian

# So many readings are remembered, of those that are long enough to tell.
NUM_READINGS = 31
LEAST_READ = 16


class Reading:
    """Learns from the traces of passes, in their order."""

    def __init__(self) -> None:
        # 0 of those that were drafted for in their last round.
        self._unread: BySequence[int] = BySequence()
        self._seconds_a_token = RunningMedian(NUM_READINGS)

    def ended(self, traces: Sequence[RoundTrace]) -> int:
        """A pass; the tokens that its drafter had to read first. What was never seen is a token."""
        unread, total = self._unread, 0
        for trace in traces:
            seq_id = trace.seq_id
            if trace.num_drafted:
                total += unread.get(seq_id, 1)
                unread.note(seq_id, 0)
            else:
                fresh = trace.num_prompt_tokens + trace.num_emitted
                unread.note(seq_id, unread.get(seq_id, 0) + fresh)
        return total

    def add(self, seconds: float, num_tokens: int) -> None:
        """So many tokens were read."""
        if num_tokens >= LEAST_READ:
            self._seconds_a_token.add(max(seconds, 0.0) / num_tokens)

    def is_due(self, seq_id: int) -> bool:
        """Whether the drafter would have to read something of this text."""
        return bool(self._unread.get(seq_id))

    def seconds(self, seq_ids: Iterable[int]) -> float:
        """What reading the rest of these texts takes; nothing before it was measured."""
        if not self._seconds_a_token:
            return 0.0
        num_tokens = sum(self._unread.get(seq_id, 0) for seq_id in seq_ids)
        return self._seconds_a_token.low * num_tokens
