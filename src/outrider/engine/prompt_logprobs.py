"""Log-probabilities of prompt tokens, for the requests that want them.

Their prompts are read in passes of their own, of few rows, so that no more logits are stored than
for a round of drafts. Each token is read once, and writes the same memory as ever. They share no
pages with others: a token whose row another request read has no logits.

Shapes:  N = rows of a pass, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from outrider.core.draft import TokenLogprobs
from outrider.core.errors import NumericsError, SequenceError
from outrider.core.protocols import CausalLM, DraftNeeds, StepRow
from outrider.core.sampling import log_probs, token_logprobs
from outrider.core.sequence import LiveSequence
from outrider.engine.round import Batch, Chunk, Chunks, RoundTiming

# Rows of logits in a pass over such a prompt. Any target has space for so many (memory_parts).
SCORED_ROWS = 16


@dataclass(frozen=True, slots=True)
class PromptScorer:
    """Scorer of prompts, in passes of its own. `finish` ends a pass that emits no token."""

    target: CausalLM
    needs: DraftNeeds
    finish: Callable[..., object]

    def score(self, batch: Batch, chunks: Chunks) -> Chunks:
        """Read the unread prompt tokens of `batch`, except pending ones, and of `chunks`, and give
        their sequences the log-probabilities. Return the remaining chunks."""
        if not any(seq.is_unscored for seq in (*batch, *(chunk.seq for chunk in chunks))):
            return chunks
        left: list[Chunk] = []
        for seq in batch:
            self._score(Chunk(seq, len(seq.tokens) - 1 - self.target.state.length(seq.seq_id)))
        for chunk in chunks:
            num_left = chunk.num_tokens - self._score(chunk)
            if num_left:
                left.append(Chunk(chunk.seq, num_left))
        return left

    def _score(self, chunk: Chunk) -> int:
        """Read a chunk if its prompt has to be scored; return the number of tokens read."""
        seq, length = chunk.seq, self.target.state.length
        start = length(seq.seq_id)
        end = min(start + chunk.num_tokens, seq.prompt_length - 1)
        while seq.is_unscored and length(seq.seq_id) < end:
            at = length(seq.seq_id)
            self._read(seq, at, min(at + SCORED_ROWS, end))
        return length(seq.seq_id) - start

    def _read(self, seq: LiveSequence, start: int, end: int) -> None:
        """Run a pass over tokens `start` to `end`; some are known after a pre-emption."""
        began = perf_counter()
        known = min(len(seq.prompt_logprobs) - 1, end)
        row = StepRow.chain(seq.seq_id, seq.tokens[start:end], logits_from=known - start)
        out = self.target.step([row], self.needs)
        # Stored before memory is committed: after a failure between the two the tokens are read
        # again, and are then known.
        seq.prompt_logprobs += _logprobs(seq, out.logits_MV, seq.tokens[known + 1 : end + 1])
        timing = RoundTiming(began, 0.0, perf_counter() - began)
        self.finish([row], timing=timing, num_target_passes=out.num_passes)


def _logprobs(seq: LiveSequence, logits_NV: Tensor, tokens: Sequence[int]) -> list[TokenLogprobs]:
    if not tokens:
        return []
    num_top = seq.params.prompt_logprobs or 0
    found = token_logprobs(log_probs(logits_NV), range(len(tokens)), tokens, num_top)
    if any(math.isnan(one.logprob) for one in found):
        raise SequenceError(seq.seq_id) from NumericsError("the target")
    return list(found)
