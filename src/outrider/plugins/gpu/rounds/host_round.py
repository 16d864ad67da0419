"""Rounds whose drafts the host proposes, each verified by one captured launch.

A drafter that reads the text, or the target's states, must know what a round decided before it
proposes again, so nothing is in flight when a round returns: pages may be given back at once.
Prompts have passes of their own. Batches that cannot be captured go to `Stages`, with a sentence in
the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import get_args

import torch

from outrider.core.draft import Outcome, Verdict
from outrider.core.errors import CapacityError
from outrider.core.sequence import LiveSequence
from outrider.engine.round import Batch, Chunks, FinishedRow, RoundTiming, clamp
from outrider.engine.stages import Stages
from outrider.plugins.gpu.rounds.memory import StackModel
from outrider.plugins.gpu.rounds.round import Refusals, unread_prompts
from outrider.plugins.gpu.rounds.sampling import request_refusal
from outrider.plugins.gpu.rounds.trees import Way
from outrider.plugins.gpu.rounds.verify import VerifyCache, padded_row

_WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(slots=True)
class HostRound:
    """`Round` over captured verifications of `target`'s. `rule` is the engine's own."""

    stages: Stages
    target: StackModel
    table: VerifyCache
    rule: str
    refusals: Refusals

    def run(self, batch: Batch, chunks: Chunks, *, num_waiting: int = 0) -> list[Outcome]:
        seconds = 0.0
        if batch:
            self.stages.allot(batch)
            seconds = self.stages.draft(batch)
        return self.verify(batch, chunks, num_waiting=num_waiting, draft_seconds=seconds)

    def verify(
        self, batch: Batch, chunks: Chunks, *, num_waiting: int = 0, draft_seconds: float = 0.0
    ) -> list[Outcome]:
        ways = self._ways(batch)
        refusal = self.refusal(batch, ways)
        if batch and refusal is None:
            prompts = [*chunks, *unread_prompts(batch, self.target.state)]
            if prompts:
                self.stages.verify([], prompts, num_waiting=num_waiting)
            chunks, began = (), perf_counter()
            verdicts = self._decided(batch, ways[0])
            if verdicts is not None:
                timing = RoundTiming(began - draft_seconds, draft_seconds, perf_counter() - began)
                rows = [self._row(*pair) for pair in zip(batch, verdicts, strict=True)]
                return self.stages.finish_round(rows, timing=timing, num_waiting=num_waiting)
        elif refusal is not None:
            self.refusals.report(refusal)
        return self.stages.verify(
            batch, chunks, num_waiting=num_waiting, draft_seconds=draft_seconds
        )

    def refusal(self, batch: Batch, ways: Sequence[Way]) -> str | None:
        """Why the drafts of a batch that fits these ways are verified by stages; None when they are
        not."""
        if self.refusals.failed is not None:
            return self.refusals.failed
        stages, most = self.stages, self.table.most
        obstacles = (
            (stages.drops_keys(batch), "keys of a prompt were dropped"),
            (stages.others.num_likely(batch), "a drafter reads what the target finds likely"),
            (any(len(seq.draft) > most for seq in batch), f"a draft has over {most} tokens"),
            (any(map(_is_odd, batch)), "distributions of a draft are not of float32"),
            (any(map(_is_masked, batch)), "a request has bans or a mask"),
            (not ways, "requests of a batch are judged in different ways"),
        )
        reason = next((reason for seq in batch if (reason := request_refusal(seq))), None)
        return reason or next((reason for stands, reason in obstacles if stands), None)

    def _ways(self, batch: Batch) -> list[Way]:
        """How the batch may be decided."""
        fit = [_ways_of(seq, seq.speculation.sampler or self.rule) for seq in batch]
        return [way for way in _WAYS if all(way in ways for ways in fit)]

    def _decided(self, batch: Batch, way: Way) -> Sequence[Verdict] | None:
        """None where stages have to verify: they find out whose logits are no numbers, and whether
        there is really no memory. Whatever a compiler or a device cannot do is left to them, from
        now on."""
        width, state = self.table.width(batch), self.target.state
        listed = any(not seq.draft.is_chain for seq in batch)
        verdicts: Sequence[Verdict] | None = None
        try:
            staged = state.stage([padded_row(seq, width, listed=listed) for seq in batch])
        except CapacityError:
            return None
        try:
            verdicts = self.table.run(batch, staged, width, way)
        except Exception as error:  # noqa: BLE001 - of whatever kind, stages can go on
            self.refusals.fail(error)
        # Text follows below; what was staged is no more than space that the launch wrote to.
        state.commit({seq.seq_id: () for seq in batch})
        return verdicts

    def _row(self, seq: LiveSequence, verdict: Verdict) -> FinishedRow:
        """Clamp the outcome, and say which nodes' rows the launch left in the order of a text."""
        outcome, ending = clamp(Outcome(seq.seq_id, seq.draft, verdict), seq)
        self.target.state.note_chain(seq.seq_id, (seq.tokens[-1], *outcome.tokens[:-1]))
        return FinishedRow(seq, 1, outcome, ending, in_order=True)


def _is_odd(seq: LiveSequence) -> bool:
    probs_NV = seq.draft.probs_NV
    return probs_NV is not None and probs_NV.dtype != torch.float32


def _is_masked(seq: LiveSequence) -> bool:
    return seq.shaper is not None and seq.shaper.sparse(seq.tokens) is None


def _ways_of(seq: LiveSequence, rule: str) -> Sequence[Way]:
    """Greedy rows have point masses, which every rule judges alike, and so has the token rule of a
    draft without a distribution; the block rule is for chains that were drawn."""
    draft = seq.draft
    if seq.params.greedy:
        return _WAYS if draft.is_chain else ("greedy", "match", "token")
    if rule == "match":
        return ("match",)
    if rule not in ("token", "block"):
        return ()
    if not draft:
        return ("token", "block")
    judged_whole = rule == "block" and draft.probs_NV is not None and draft.is_chain
    return ("block",) if judged_whole else ("token",)
