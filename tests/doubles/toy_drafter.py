"""A drafter as a newcomer would add it: this file, as `outrider/drafters/toy.py`."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.draft import Draft
from outrider.core.plugins import DrafterKind
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters.common.context import BuildContext


class ToyDrafter:
    """Drafts the last token again and again."""

    name = "toy"
    needs = DraftNeeds()

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [Draft.chain((row.tokens[-1],) * row.budget.depth) for row in rows]

    def close(self, seq_id: int) -> None: ...


def build(context: BuildContext) -> ToyDrafter:
    del context
    return ToyDrafter()


KIND = DrafterKind(name="toy", build=build)
