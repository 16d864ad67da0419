"""Rounds whose drafts the host proposes, each verified by one captured launch.

A drafter that reads the text, or the target's states, must know what a round decided before it
proposes again, so nothing is in flight when a round returns: pages may be given back at once.
Prompts have passes of their own. Other batches go to `Stages`, with a sentence in the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import get_args

import torch

from outrider.core.draft import Outcome, Verdict
from outrider.core.errors import CapacityError
from outrider.engine.round import (
    Batch,
    Chunks,
    FinishedRow,
    LiveSequence,
    RoundTiming,
    clamp,
    unread_prompts,
)
from outrider.engine.stages import Stages
from outrider.plugins.gpu.rounds.memory import StackModel
from outrider.plugins.gpu.rounds.round import Refusals
from outrider.plugins.gpu.rounds.sampling import request_refusal
from outrider.plugins.gpu.rounds.trees import Way
from outrider.plugins.gpu.rounds.verify import VerifyCache, padded_row

_WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(slots=True)
class HostRound:
    """A `Round` over captured verifications of `target`. `rule` is the engine's own rule."""

    stages: Stages
    target: StackModel
    table: VerifyCache
    rule: str
    refusals: Refusals

    def run(self, batch: Batch, chunks: Chunks, *, num_waiting: int = 0) -> list[Outcome]:
        seconds = 0.0
        if batch:
            self.stages.assign_budgets(batch)
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
        """Return why stages must verify a batch with these ways; None if they need not."""
        if self.refusals.failed is not None:
            return self.refusals.failed
        stages, most = self.stages, self.table.most
        obstacles = (
            (stages.drops_keys(batch), "keys of a prompt were dropped"),
            (stages.others.num_likely(batch), "a drafter reads the target's likely next tokens"),
            (any(len(seq.draft) > most for seq in batch), f"a draft has over {most} tokens"),
            (any(map(_is_odd, batch)), "distributions of a draft are not of float32"),
            (any(map(_is_masked, batch)), "a request has bans or a mask"),
            (not ways, "requests of a batch are judged in different ways"),
        )
        reason = next((reason for seq in batch if (reason := request_refusal(seq))), None)
        return reason or next((reason for applies, reason in obstacles if applies), None)

    def _ways(self, batch: Batch) -> list[Way]:
        """Return the ways in which the batch may be decided."""
        fit = [_ways_of(seq, seq.speculation.sampler or self.rule) for seq in batch]
        return [way for way in _WAYS if all(way in ways for ways in fit)]

    def _decided(self, batch: Batch, way: Way) -> Sequence[Verdict] | None:
        """Return the verdicts of a captured launch; None if stages have to verify. Stages find the
        sequence whose logits are no numbers, and whether memory is really short. After a failure of
        the compiler or the device they take over all later rounds."""
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
        # Text is recorded below; the staged rows were only space for the launch to write to.
        state.commit({seq.seq_id: () for seq in batch})
        return verdicts

    def _row(self, seq: LiveSequence, verdict: Verdict) -> FinishedRow:
        """Clamp the outcome, and record the rows that the launch left in text order."""
        outcome, ending = clamp(Outcome(seq.seq_id, seq.draft, verdict), seq)
        self.target.state.note_chain(seq.seq_id, (seq.tokens[-1], *outcome.tokens[:-1]))
        return FinishedRow(seq, 1, outcome, ending, in_order=True)


def _is_odd(seq: LiveSequence) -> bool:
    probs_NV = seq.draft.probs_NV
    return probs_NV is not None and probs_NV.dtype != torch.float32


def _is_masked(seq: LiveSequence) -> bool:
    return seq.shaper is not None and seq.shaper.sparse(seq.tokens) is None


def _ways_of(seq: LiveSequence, rule: str) -> Sequence[Way]:
    """Return the ways in which a draft may be judged. Greedy rows have point masses, which every
    rule judges alike, as the token rule does a draft without a distribution. The block rule is for
    sampled chains."""
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
