"""The drafter of empty drafts: plain decoding is the round with one. It has no state."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.draft import Draft
from outrider.core.plugins import DrafterKind
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters.common.context import BuildContext, Stateless


class NoDrafter(Stateless):
    """The drafter for speculation that is off."""

    name = "none"
    needs = DraftNeeds()

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [Draft.empty()] * len(rows)


def build(context: BuildContext) -> NoDrafter:
    del context
    return NoDrafter()


KIND = DrafterKind(name="none", build=build, drafts=False, keeps_apart=True)
