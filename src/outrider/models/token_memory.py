"""The smallest StateStore: it remembers token ids and checks every use of itself.

It is the memory of models without tensors, and says by its assertions what any caller of a
StateStore must keep to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.core.errors import CapacityError, ContractError
from outrider.core.protocols import StepRow
from outrider.core.rng import ROOT


@dataclass(slots=True)
class _Memory:
    committed: list[int] = field(default_factory=list[int])
    staged: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])


class TokenMemory:
    """StateStore that remembers token ids alone. Misuse fails an assertion."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._sequences: dict[int, _Memory] = {}

    def open(self, seq_id: int, tokens: Sequence[int]) -> int:
        if seq_id in self._sequences:
            raise ContractError("the sequence is open already")
        if not all(token >= 0 for token in tokens):
            raise ContractError("ids are not negative")
        self._sequences[seq_id] = _Memory()
        return 0

    def fork(self, source: int, new: int, length: int | None = None) -> None:
        if new in self._sequences:
            raise ContractError("the sequence is open already")
        committed = self._sequences[source].committed
        if not (length is None or 0 <= length <= len(committed)):
            raise ContractError("a fork is no longer than its source")
        self._sequences[new] = _Memory(committed[:length])

    def length(self, seq_id: int) -> int:
        return len(self._sequences[seq_id].committed)

    def num_staged(self, seq_id: int) -> int:
        return len(self._sequences[seq_id].staged)

    def reserve(self, counts: Mapping[int, int]) -> None:
        if sum(counts.values()) > self.num_free_tokens:
            raise CapacityError("the scripted model's memory is full.", hint="raise num_slots")

    def commit(self, paths: Mapping[int, Sequence[int]]) -> int:
        for seq_id, path in paths.items():
            memory = self._sequences[seq_id]
            if not all(node >= 0 for node in path):
                raise ContractError("a path has no root in it")
            if [memory.parents[node] for node in path] != [ROOT, *path][: len(path)]:
                raise ContractError("a path goes from the root down")
            memory.committed += [memory.staged[node] for node in path]
            memory.staged, memory.parents = [], []
        return 0

    def close(self, seq_id: int) -> None:
        del self._sequences[seq_id]

    @property
    def num_free_tokens(self) -> int:
        held = (len(m.committed) + len(m.staged) for m in self._sequences.values())
        return self._num_slots - sum(held)

    def stage(self, rows: Sequence[StepRow]) -> None:
        """Raises CapacityError, with nothing staged, if the tokens do not fit."""
        if sum(len(row.tokens) for row in rows) > self.num_free_tokens:
            raise CapacityError("the scripted model's memory is full.", hint="raise num_slots")
        for row in rows:
            memory = self._sequences[row.seq_id]
            first = len(memory.staged)
            if not all(ROOT <= p < first + i for i, p in enumerate(row.parents)):
                raise ContractError("parents come before their children")
            memory.staged += row.tokens
            memory.parents += row.parents

    def context(self, seq_id: int, node: int, order: int) -> tuple[int, ...]:
        """The last `order` tokens that a staged node sees, its own the last."""
        memory = self._sequences[seq_id]
        path: list[int] = []
        while node != ROOT and len(path) < order:
            path.append(memory.staged[node])
            node = memory.parents[node]
        rest = order - len(path)
        return (*memory.committed[max(0, len(memory.committed) - rest) :], *path[::-1])
