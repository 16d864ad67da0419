"""Draft model: a smaller model drafts a chain, or a tree, one pass a token or level for the batch.

Tokens that were fed since the last commit (the pending token and the draft) stay staged in the
draft model's KV cache until the next proposal. Then the tokens that became text are committed and
the rest is dead space: no accepted token is fed twice, and a round without a draft needs no
message. Nodes of a tree's last level are never fed, since nothing is drafted after them.

Shapes:  V = vocabulary, M = logits rows of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.core.draft import Draft, common_prefix
from outrider.core.protocols import CausalLM, DraftNeeds, DraftRow, StepRow
from outrider.core.tree import ROOT
from outrider.drafters.growth import DraftSampler, TextPart, draft_some
from outrider.drafters.native import FusedDrafts

# The pending token, and the last token of a draft that was accepted whole: it was never fed.
LEAST_SHARE = 2


class ModelDrafter:
    """A drafter with `model`, whose tokens `sampler` chooses; it feeds at most `chunk` tokens of a
    prompt in one pass. With `fused`, drafts are made in one call where possible."""

    name = "model"
    needs = DraftNeeds()

    def __init__(
        self,
        model: CausalLM,
        sampler: DraftSampler,
        *,
        chunk: int,
        fused: FusedDrafts | None = None,
    ) -> None:
        self.model, self.sampler = model, sampler
        self._chunk, self._fused = chunk, fused
        # The tokens fed of each sequence since the last commit; without parents they are a chain.
        self._staged: dict[int, list[int]] = {}
        self._parents: dict[int, list[int]] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.model.state.open(seq_id, prompt[:-1])
        self.note(seq_id, ())

    def close(self, seq_id: int) -> None:
        self.model.state.close(seq_id)
        del self._staged[seq_id]
        self._parents.pop(seq_id, None)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return draft_some(rows, [row.budget.depth for row in rows], self._drafts)

    def share(self, num_rows: int) -> int:
        """Return the unread tokens of each of so many rows that one pass takes."""
        return max(self._chunk // num_rows, LEAST_SHARE)

    def begin(
        self, seq_id: int, tokens: Sequence[int], *, most: int = LEAST_SHARE
    ) -> Sequence[int]:
        """Commit the drafted tokens that became part of the text `tokens`. If more than `most`
        tokens are left to read, read all but the last. Return the tokens that are then left to
        read. For a round that runs the model by itself."""
        state = self.model.state
        length = state.length(seq_id)
        kept = self._kept(seq_id, tokens[length:-1])
        state.commit({seq_id: kept})
        self.note(seq_id, ())
        start, end = length + len(kept), len(tokens) - 1
        if end - start >= most:
            for at in range(start, end, self._chunk):
                self._read(seq_id, tokens[at : min(at + self._chunk, end)])
            start = end
        return tokens[start:]

    def note(self, seq_id: int, fed: Sequence[int], parents: Sequence[int] = ()) -> None:
        """Record that the model has `fed` staged: the end of the text and a draft, which is a chain
        except for a drafter of trees."""
        self._staged[seq_id] = list(fed)
        if self.sampler.branches:
            self._parents[seq_id] = list(parents)

    def _kept(self, seq_id: int, text: Sequence[int]) -> Sequence[int]:
        """Return the staged nodes that `text` runs through."""
        staged = self._staged[seq_id]
        if not self.sampler.branches:
            return range(common_prefix(staged, text))
        parents, path = self._parents[seq_id], [ROOT]
        for token in text:
            below = range(path[-1] + 1, len(staged))
            child = (n for n in below if parents[n] == path[-1] and staged[n] == token)
            node = next(child, None)
            if node is None:
                break
            path.append(node)
        return path[1:]

    def _read(self, seq_id: int, tokens: Sequence[int]) -> None:
        self.model.step([StepRow.chain(seq_id, tokens, logits_from=len(tokens))], self.needs)
        self.model.state.commit({seq_id: range(len(tokens))})

    def _drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        most = self.share(len(rows))
        parts = [TextPart.end(row, self.begin(row.seq_id, row.tokens, most=most)) for row in rows]
        fused = None if self._fused is None else self._fused.try_rows(parts)
        if fused is not None:
            for row, one in zip(rows, fused, strict=True):
                self.note(row.seq_id, one.tokens, one.parents)
            return [one.draft for one in fused]
        steps = [part.step for part in parts]
        logits_MV = self._step(steps)
        builder = self.sampler.builder(rows, [step.logits_from for step in steps])
        while steps := builder.grow(logits_MV):
            logits_MV = self._step(steps)
        return builder.drafts()

    def _step(self, steps: Sequence[StepRow]) -> Tensor:
        """Stage these tokens; return the logits that follow them."""
        logits_MV = self.model.step(steps, self.needs).logits_MV
        for step in steps:
            self._staged[step.seq_id] += step.tokens
            if self.sampler.branches:
                self._parents[step.seq_id] += step.parents
        return logits_MV
