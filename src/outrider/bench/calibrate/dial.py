"""A controller whose K is set from outside: every round takes the next one of a list."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.budget import Budget, RoundTrace
from outrider.core.errors import ContractError


class Dial:
    """K is the mean of a round's sequences: of four, 5.25 gives three 5 tokens and one 6, so that a
    pass can have any number of rows. Takes no notice of what becomes of drafts. The first rounds
    draft nothing."""

    def __init__(self) -> None:
        self._ks: Sequence[float] = (0,)
        self._turn = 0

    def set(self, ks: Sequence[float]) -> None:
        """From the next round on, `ks` in turns."""
        if not ks:
            raise ContractError("there is no length")
        self._ks, self._turn = ks, 0

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        k = self._ks[self._turn % len(self._ks)]
        self._turn += 1
        depth, num_deeper = divmod(round(k * len(seq_ids)), len(seq_ids))
        return [Budget(depth + (place < num_deeper)) for place in range(len(seq_ids))]

    def observe(self, trace: RoundTrace) -> None:
        del trace
