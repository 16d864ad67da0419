"""The kill switch for batched verification: the same rows, fed token by token.

Logits must be bit-identical to the batched pass on row-invariant kernels, so switching this on and
off distinguishes a numerics problem from a bookkeeping one. A round costs as many passes as its
longest row has tokens with logits.

Shapes:  M = packed logits rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.cache.pool import Keep
from outrider.core.errors import ContractError
from outrider.core.protocols import CacheStore, CausalLM, DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.engine.compaction import CompactingLM


@dataclass(frozen=True, slots=True)
class StepwiseLM:
    """A CausalLM over `model` whose passes compute logits of at most one token of a row."""

    model: CausalLM

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def state(self) -> CacheStore:
        return self.model.state

    def compact(self, seq_id: int, keep: Keep) -> None:
        """Compact a sequence, if the model can."""
        if not isinstance(self.model, CompactingLM):
            raise ContractError("model is no CompactingLM")
        self.model.compact(seq_id, keep)

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        logits: list[list[Tensor]] = [[] for _ in rows]
        heads = [_part(row, 0, row.logits_from + 1) for row in rows]
        self._pass(list(enumerate(heads)), logits, needs)
        for at in range(1, max((row.num_logits for row in rows), default=0)):
            parts = [
                (index, _part(row, row.logits_from + at, row.logits_from + at + 1))
                for index, row in enumerate(rows)
                if at < row.num_logits
            ]
            self._pass(parts, logits, needs)
        num_passes = max([1, *(row.num_logits for row in rows)])
        flat = [row_V for row_logits in logits for row_V in row_logits]
        if not flat:
            return StepOutput(torch.empty(0, self.spec.vocab_size), num_passes=num_passes)
        return StepOutput(torch.stack(flat), num_passes=num_passes)

    def _pass(
        self, parts: Sequence[tuple[int, StepRow]], logits: list[list[Tensor]], needs: DraftNeeds
    ) -> None:
        out = self.model.step([part for _, part in parts], needs)
        if out.hidden_NKD is not None:
            raise ContractError("hidden states have to be stored in memory")
        wanted = [index for index, part in parts if part.num_logits]
        for index, row_V in zip(wanted, out.logits_MV.clone(), strict=True):
            logits[index].append(row_V)


def _part(row: StepRow, start: int, end: int) -> StepRow:
    tokens, parents = row.tokens[start:end], row.parents[start:end]
    return StepRow(row.seq_id, tokens, parents, max(row.logits_from - start, 0))
