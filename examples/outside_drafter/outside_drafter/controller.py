"""A controller: after a round that kept no draft half as long a draft, after others twice."""

from collections.abc import Sequence

from outrider.core.draft import Budget, RoundTrace
from outrider.core.plugins import ControllerKind


class Halves:
    def __init__(self, most: Budget) -> None:
        self._most = most
        self._depths: dict[int, int] = {}

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        return [self._most.cut(self._depths.get(i, self._most.depth)) for i in seq_ids]

    def observe(self, trace: RoundTrace) -> None:
        if trace.num_drafted:
            depth = self._depths.get(trace.seq_id, self._most.depth)
            depth = depth * 2 if trace.num_accepted else depth // 2
            self._depths[trace.seq_id] = min(max(depth, 1), self._most.depth)


KIND = ControllerKind(name="halves", build=Halves)
