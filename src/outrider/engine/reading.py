"""From a target pass's logits to what the acceptance rule reads.

Shapes:  M = packed logits rows, N = laws of one sequence, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.draft import Outcome
from outrider.core.errors import NumericsError, SequenceError, blaming
from outrider.core.logits import suffixes_of
from outrider.core.protocols import JudgeRow
from outrider.core.sampling import PLAIN, Laws, Sampling, log_law, processed_probs, token_logprobs
from outrider.core.sequence import LiveSequence


@dataclass(frozen=True, slots=True)
class Reading:
    """One sequence's share of a pass: a row for the rule, and log-laws if they are to be told."""

    row: JudgeRow
    log_NV: Tensor | None

    def tell(self, outcome: Outcome, num_top: int) -> Outcome:
        """`outcome` with the log-probabilities of its tokens."""
        if self.log_NV is None:
            return outcome
        laws = [0, *(node + 1 for node in outcome.verdict.path)][: len(outcome.tokens)]
        told = token_logprobs(self.log_NV, laws, outcome.tokens, num_top)
        return replace(outcome, logprobs=told)


def read_pass(
    batch: Sequence[LiveSequence],
    logits_MV: Tensor,
    argmax: Callable[[Tensor], list[int]],
    *,
    exact: bool,
    sampling: Sampling = PLAIN,
) -> list[Reading]:
    """One processed law a draft node and one for the root, of each sequence of `batch`.

    Raises SequenceError for a sequence whose shaping fails or whose logits are not numbers. Shaped
    logits are written over the model's own, and on a CPU so are the laws made of them. Greedy rows
    share one argmax over the whole pass, a greedy round's only host sync. A rule that is not
    `exact` also gets soft laws.
    """
    _shape(batch, logits_MV)
    best = argmax(logits_MV) if any(seq.params.greedy for seq in batch) else []
    readings: list[Reading] = []
    start = 0
    for seq in batch:
        end = start + 1 + len(seq.draft)
        logits_NV = logits_MV[start:end]
        if seq.params.greedy:
            if -1 in best[start:end]:
                raise _not_numbers(seq)
            laws = Laws(tokens=tuple(best[start:end]))
        else:
            laws = _laws(seq, logits_NV, sampling)
        readings.append(_read(seq, logits_NV, laws, exact=exact))
        start = end
    return readings


def _shape(batch: Sequence[LiveSequence], logits_MV: Tensor) -> None:
    start = 0
    for seq in batch:
        num_rows = 1 + len(seq.draft)
        if seq.shaper is not None:
            logits_NV = logits_MV[start : start + num_rows]
            suffixes = suffixes_of(seq.draft.tokens, seq.draft.parents)
            with blaming(seq.seq_id), torch.inference_mode():
                logits_NV.copy_(seq.shaper.shape(logits_NV, seq.tokens, suffixes))
        start += num_rows


def _not_numbers(seq: LiveSequence) -> SequenceError:
    """Of a sequence with a row that has no largest logit."""
    error = SequenceError(seq.seq_id)
    error.__cause__ = NumericsError("the target")
    return error


def _laws(seq: LiveSequence, logits_NV: Tensor, sampling: Sampling) -> Laws:
    # Nobody reads these logits again, and room for new laws would have to be found every round.
    out_NV = logits_NV if logits_NV.is_cpu else None
    return Laws(probs_NV=processed_probs(logits_NV, seq.params, sampling, out_NV))


def _read(seq: LiveSequence, logits_NV: Tensor, laws: Laws, *, exact: bool) -> Reading:
    soft_NV = log_NV = None
    if not exact:
        soft_NV = logits_NV.softmax(-1) if laws.probs_NV is None else laws.probs_NV
    if seq.params.logprobs:
        log_NV = log_law(logits_NV) if laws.probs_NV is None else laws.probs_NV.log()
    return Reading(JudgeRow(seq.draft, laws, seq.noise, soft_NV), log_NV)
