"""A draft model whose embedding table has another padding than the target's.

Tables of one family are padded to different sizes (Qwen2.5: 152,064 rows of 7B, 151,936 of 0.5B),
though they share one tokenizer, which has fewer ids. Ids below `num_common` have a token and a row
in both models; no other is drafted, with probability 0 in every distribution. The target may sample
an id from its own padding: the draft model then reads its own last row for it.

Shapes:  M = packed logits rows, V = the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.core.protocols import CacheStore, CausalLM, DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.drafters.heads import NOT_DRAFTED


class CommonIds:
    """A CausalLM: `model` over the `vocab_size` ids of the target, of which the first `num_common`
    may be drafted."""

    def __init__(self, model: CausalLM, *, vocab_size: int, num_common: int) -> None:
        self.model = model
        self.ids_V = torch.arange(num_common)
        self._spec = replace(model.spec, vocab_size=vocab_size)

    @classmethod
    def over(cls, model: CausalLM, *, vocab_size: int, num_common: int) -> CausalLM:
        """Return the draft model over the target's ids: `model` itself if it has as many. With
        `num_common` 0 all ids that both have may be drafted."""
        size = model.spec.vocab_size
        if size == vocab_size:
            return model
        return cls(model, vocab_size=vocab_size, num_common=num_common or min(size, vocab_size))

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def state(self) -> CacheStore:
        return self.model.state

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        out = self.model.step([self._readable(row) for row in rows], needs)
        num_rows, num_common = len(out.logits_MV), len(self.ids_V)
        logits_MV = out.logits_MV.new_full((num_rows, self._spec.vocab_size), NOT_DRAFTED)
        logits_MV[:, :num_common] = out.logits_MV[:, :num_common]
        return replace(out, logits_MV=logits_MV)

    def _readable(self, row: StepRow) -> StepRow:
        last = self.model.spec.vocab_size - 1
        if max(row.tokens, default=0) <= last:
            return row
        return replace(row, tokens=tuple(min(token, last) for token in row.tokens))
