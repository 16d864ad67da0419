"""Both models' memory around captured rounds: read prompts before, count tokens after.

A captured round writes keys and values to places that the host set aside when a sequence entered:
room for all that it may ever hold, which is what its admission was charged for. So page tables do
not change while it runs. When the host reads a round it counts the tokens as committed; nothing is
copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.draft import Outcome
from outrider.core.sequence import FinishReason, LiveSequence
from outrider.drafters.model import ModelDrafter
from outrider.engine.captured.passes import StackModel
from outrider.engine.settle import Settled, settle


@dataclass(frozen=True, slots=True)
class Drafting:
    """A model and the drafter that owns its memory."""

    model: StackModel
    drafter: ModelDrafter


@dataclass(frozen=True, slots=True)
class Entry:
    """What the device is told of a sequence when it enters. `lag` is 1 if the draft model has yet
    to read the token before the pending one, else 0."""

    seq: LiveSequence
    budget: int
    lag: int
    target_pages: Sequence[int]
    draft_pages: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RoundMemory:
    """`k` is how many tokens every round drafts and stages, even where fewer count."""

    target: StackModel
    drafting: Drafting | None
    k: int

    def most_tokens(self, seq: LiveSequence) -> int:
        """Positions that rounds of `seq` may come to write."""
        return seq.prompt_length + seq.limit + self.k

    def enter(self, seq: LiveSequence, budget: int) -> Entry:
        """Let the draft model read up to the pending token, as the target has, and set pages aside.

        Raises CapacityError if an arena lacks them.
        """
        target_pages = self._pages(self.target, seq)
        if self.drafting is None:
            return Entry(seq, budget, 0, target_pages)
        unread = self.drafting.drafter.begin(seq.seq_id, seq.tokens)
        draft_pages = self._pages(self.drafting.model, seq)
        return Entry(seq, budget, len(unread) - 1, target_pages, draft_pages)

    def keep(self, seq: LiveSequence, outcome: Outcome, ending: FinishReason | None) -> None:
        """Count what a round emitted as text that both models have read, all but its last token."""
        start = len(seq.tokens)
        self.target.state.note_chain(seq.seq_id, (seq.tokens[-1], *outcome.tokens[:-1]))
        settle(self.target.state, [Settled(seq, 1, outcome, ending)])
        if self.drafting is None:
            return
        state = self.drafting.model.state
        # The last of K drafts was never fed.
        ready = start + min(outcome.num_accepted, self.k - 1)
        read = seq.tokens[state.length(seq.seq_id) : ready]
        state.note_chain(seq.seq_id, read)
        state.commit({seq.seq_id: range(len(read))})

    def _pages(self, model: StackModel, seq: LiveSequence) -> Sequence[int]:
        missing = self.most_tokens(seq) - model.state.length(seq.seq_id)
        model.state.reserve({seq.seq_id: missing})
        return tuple(model.state.pages(seq.seq_id))
