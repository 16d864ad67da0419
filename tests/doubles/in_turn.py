"""Members of a portfolio that lead in turn, whether that pays or not: no time is measured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from outrider.control.leads import Lead, Leads
from outrider.core.draft import RoundTrace


class InTurn(Leads):
    """Leads of all members in turn, as deep as allowed. Look-ups go first in every other round."""

    def __init__(self, names: Sequence[str], *, k: int, num_nodes: int = 0) -> None:
        super().__init__(names, k=k, num_nodes=num_nodes)
        self._names, self._k, self._count = names, k, 0

    @property
    def name(self) -> str:
        return self._names[self._count % len(self._names)]

    def lead(self, seq_ids: Sequence[int], among: Collection[str] = ()) -> Lead:
        name = self.name
        if among and name not in among:
            name = next((one for one in self._names if one in among), "")
        depths = [self._k if name else 0] * len(seq_ids)
        self._count += 1
        return Lead(name, depths, inf if name and self._count % 2 else 1.0)

    def observe(self, trace: RoundTrace) -> None: ...
