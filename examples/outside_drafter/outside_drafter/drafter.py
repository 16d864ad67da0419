"""A drafter: after each token comes the one that came after it last time."""

from collections.abc import Sequence

from outrider.core.draft import Draft
from outrider.core.plugins import DrafterKind
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters.common.context import BuildContext


class BigramDrafter:
    name = "bigram"
    needs = DraftNeeds()

    def __init__(self) -> None:
        self._after: dict[int, dict[int, int]] = {}
        self._num_read: dict[int, int] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        del prompt  # Every row begins with it.
        self._after[seq_id], self._num_read[seq_id] = {}, 1

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [self._draft(row) for row in rows]

    def close(self, seq_id: int) -> None:
        del self._after[seq_id], self._num_read[seq_id]

    def _draft(self, row: DraftRow) -> Draft:
        after, tokens = self._after[row.seq_id], row.tokens
        # Only what the target kept is in the text, so there is nothing to take back.
        for place in range(self._num_read[row.seq_id], len(tokens)):
            after[tokens[place - 1]] = tokens[place]
        self._num_read[row.seq_id] = len(tokens)
        chain, last = list[int](), tokens[-1]
        while len(chain) < row.budget.depth and last in after:
            last = after[last]
            chain.append(last)
        return Draft.chain(chain)


def build(context: BuildContext) -> BigramDrafter:
    """The context has settings, the target and perhaps a draft model; this drafter needs none."""
    del context
    return BigramDrafter()


KIND = DrafterKind(name="bigram", build=build)
