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

from outrider.core.draft import Draft, NodeTrace, NodeVerdict, Outcome, TokenLogprobs, Verdict
from outrider.core.errors import NumericsError, SequenceError
from outrider.core.protocols import CausalLM, DraftNeeds, StepRow, VerifyRow
from outrider.core.rng import NotingRng
from outrider.core.sampling import log_probs, mass, probs_at, token_logprobs
from outrider.core.sequence import LiveSequence
from outrider.core.tree import ROOT
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


# Traces of every node of a draft, with probabilities and verdicts, for requests that want them.
#
# Shapes:  N = draft nodes and the root, V = vocabulary.
def node_traces(
    row: VerifyRow, verdict: Verdict, outcome: Outcome, log_NV: Tensor | None
) -> tuple[NodeTrace, ...]:
    """Return traces of the draft's nodes and of the target's own token. `outcome` is `verdict` up
    to the text's end. `log_NV` are greedy decoding's log-probabilities at temperature 1."""
    draft, num_tokens = row.draft, len(outcome.tokens)
    kept = verdict.path[:num_tokens]
    tokens, parents = [*draft.tokens], [*draft.parents]
    verdicts: list[NodeVerdict] = verdicts_of(draft, kept, ended=num_tokens == len(kept))
    if num_tokens > len(kept):
        tokens.append(verdict.next_token)
        parents.append(kept[-1] if kept else ROOT)
        verdicts.append(_own_verdict(draft, parents[-1]))
    rows = [parent + 1 for parent in parents]
    p: Sequence[float]
    if row.distributions.probs_NV is not None:
        p = probs_at(row.distributions.probs_NV, rows, tokens)
    else:
        p = [
            mass(row.distributions.at(index), token)
            for index, token in zip(rows, tokens, strict=True)
        ]
    q: list[float | None] = [None] * len(tokens)
    if draft.probs_NV is not None and len(draft):
        q[: len(draft)] = probs_at(draft.probs_NV, range(len(draft)), draft.tokens)
    soft: Sequence[float | None] = [None] * len(tokens)
    if log_NV is not None:
        soft = [math.exp(value) for value in probs_at(log_NV, rows, tokens)]
    coins = _coins(row, len(tokens))
    each = zip(tokens, parents, p, q, verdicts, soft, *coins, strict=True)
    return tuple(NodeTrace(*fields) for fields in each)


def _coins(row: VerifyRow, num_nodes: int) -> tuple[list[float | None], list[float | None]]:
    """Return the probability and the random number that judged each node, if any."""
    chances: list[float | None] = [None] * num_nodes
    draws: list[float | None] = [None] * num_nodes
    rng = row.rng
    if not isinstance(rng, NotingRng):
        return chances, draws
    for node, (chance, draw) in rng.coins.items():
        chances[node], draws[node] = chance, draw
    if rng.picks and num_nodes > len(row.draft):
        draws[-1] = rng.picks[-1]
    return chances, draws


def verdicts_of(draft: Draft, kept: Sequence[int], *, ended: bool) -> list[NodeVerdict]:
    """Return the verdict on each drafted token, if the nodes `kept` became text. Children of an
    accepted node were tried in order until one was accepted; none where the text `ended`."""
    follower = dict(zip((ROOT, *kept), kept, strict=False))
    tried = {ROOT, *kept} - ({kept[-1]} if ended and kept else set())
    verdicts: list[NodeVerdict] = []
    for node, parent in enumerate(draft.parents):
        if follower.get(parent) == node:
            verdicts.append("accepted")
        elif parent in tried and node < follower.get(parent, len(draft)):
            verdicts.append("refused")
        else:
            verdicts.append("unused")
    return verdicts


def _own_verdict(draft: Draft, leaf: int) -> NodeVerdict:
    if not len(draft):
        return "plain"
    return "recovered" if draft.children(leaf) else "bonus"
