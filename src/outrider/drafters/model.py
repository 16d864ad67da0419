"""A smaller model drafts a chain, one pass a token for the whole batch.

What was fed since the last commit, the pending token and the chain below it, stays staged in the
draft model's memory until the next proposal. Then those tokens that turned out to be the text are
committed and the rest is dead space: nothing that was kept is ever fed twice, and a round that did
not ask for a draft needs no message.

Shapes:  V = vocabulary, M = rows that draft at this depth, N = nodes of a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.protocols import CausalLM, DraftNeeds, DraftRow, StepRow
from outrider.core.rng import DrawNode, pick_node
from outrider.core.sampling import PLAIN, Sampling
from outrider.drafters.growing import ChangeLaws, GrowingChain, Growth

# The pending token, and the last of a draft that was kept whole: it was never fed.
LEAST_SHARE = 2


class ModelDrafter:
    """Drafts with `model`; feeds at most `chunk` tokens of a prompt in one pass.

    `draw` takes each token from its law at temperature > 0, which `sampling` makes and `change`, if
    given, changes.
    """

    name = "model"
    needs = DraftNeeds()

    def __init__(
        self,
        model: CausalLM,
        argmax: Callable[[Tensor], list[int]],
        *,
        chunk: int,
        draw: DrawNode = pick_node,
        sampling: Sampling = PLAIN,
        change: ChangeLaws | None = None,
    ) -> None:
        self._model = model
        self._growth = Growth(argmax, "the draft model", draw, sampling, change)
        self._chunk = chunk
        self._staged: dict[int, list[int]] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._model.state.open(seq_id, prompt[:-1])
        self._staged[seq_id] = []

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        chains = [GrowingChain(row, row.budget.depth) for row in rows]
        live = [chain for chain in chains if not chain.complete]
        if not live:
            return [chain.draft() for chain in chains]
        logits_MV = self._read([chain.row for chain in live])
        while True:
            self._growth.extend(live, logits_MV)
            live = [chain for chain in live if not chain.complete]
            if not live:
                break
            logits_MV = self._extend(live)
        # The last token of a chain is never fed: nothing is drafted after it.
        return [chain.draft() for chain in chains]

    def close(self, seq_id: int) -> None:
        self._model.state.close(seq_id)
        del self._staged[seq_id]

    def share(self, num_rows: int) -> int:
        """Unread tokens of each of so many rows that one pass takes."""
        return max(self._chunk // num_rows, LEAST_SHARE)

    def begin(
        self, seq_id: int, tokens: Sequence[int], *, most: int = LEAST_SHARE
    ) -> Sequence[int]:
        """Commit what was rightly drafted of the text `tokens`. If more than `most` of it are left
        to read, read all but the last; what is left to read then is returned. For a round that runs
        the model by itself."""
        state = self._model.state
        length = state.length(seq_id)
        kept = _num_common(self._staged[seq_id], tokens[length:-1])
        state.commit({seq_id: range(kept)})
        self._staged[seq_id] = []
        start, end = length + kept, len(tokens) - 1
        if end - start >= most:
            for at in range(start, end, self._chunk):
                self._feed(seq_id, tokens[at : min(at + self._chunk, end)])
            start = end
        return tokens[start:]

    def note(self, seq_id: int, fed: Sequence[int]) -> None:
        """Say that the model has `fed`, a chain, staged: the end of the text and a draft."""
        self._staged[seq_id] = list(fed)

    def _read(self, rows: Sequence[DraftRow]) -> Tensor:
        """Read up to each row's last token, which stays staged; the logits that follow it."""
        most = self.share(len(rows))
        texts = [self.begin(row.seq_id, row.tokens, most=most) for row in rows]
        feeds = [StepRow.chain(row.seq_id, text) for row, text in zip(rows, texts, strict=True)]
        feeds = [replace(feed, logits_from=len(feed.tokens) - 1) for feed in feeds]
        logits_MV = self._model.step(feeds, self.needs).logits_MV
        for feed in feeds:
            self.note(feed.seq_id, feed.tokens)
        return logits_MV

    def _feed(self, seq_id: int, tokens: Sequence[int]) -> None:
        self._model.step([StepRow.chain(seq_id, tokens, logits_from=len(tokens))], self.needs)
        self._model.state.commit({seq_id: range(len(tokens))})

    def _extend(self, chains: Sequence[GrowingChain]) -> Tensor:
        """Stage each chain's newest token below the one before; the logits that follow it."""
        state = self._model.state
        feeds = [
            StepRow.chain(
                chain.row.seq_id,
                chain.tokens[-1:],
                parent=state.num_staged(chain.row.seq_id) - 1,
            )
            for chain in chains
        ]
        logits_MV = self._model.step(feeds, self.needs).logits_MV
        for feed in feeds:
            self._staged[feed.seq_id] += feed.tokens
        return logits_MV


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
