"""The plan of a pass of a hybrid, and the rows that it stages in recurrent memory.

Tensors are those of kernels/plan.py; nothing here touches one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core.errors import ContractError
from outrider.core.protocols import StepRow
from outrider.kernels.plan import PackedPlan
from outrider.kernels.reference.delta import Run
from outrider.state.recurrent import RecurrentSequence, Wants


@dataclass(frozen=True, slots=True)
class HybridPlan:
    packed: PackedPlan
    runs: tuple[Run, ...]


@dataclass(slots=True)
class Staging:
    """One row's cells, which become the sequence's own once the pass has written them. What is kept
    of committed inputs goes to `fold`, if there are any."""

    seq: RecurrentSequence
    row: StepRow
    wants: Wants
    states: list[int] = field(default_factory=list[int])
    inputs: list[int] = field(default_factory=list[int])
    fold: int | None = None

    @property
    def folds(self) -> bool:
        return bool(self.seq.kept) and not self.seq.parents

    def stage(self, first: int) -> list[Run]:
        """Add the row's nodes to its sequence; `first` is the packed index of its first token."""
        seq, row = self.seq, self.row
        start = len(seq.parents)
        seq.staged += row.tokens
        seq.parents += row.parents
        seq.states.update(zip(self.wants.states, self.states, strict=True))
        seq.inputs.update(zip(self.wants.inputs, self.inputs, strict=True))
        runs: list[Run] = []
        for nodes in seq.runs(row):
            origin = seq.origin(seq.parents[nodes.start])
            if origin is None:
                raise ContractError("there is no origin")
            source, replayed, fold = origin.source, origin.replayed, self.fold
            if runs and fold is not None and origin.num_kept:
                source, replayed, fold = fold, replayed[origin.num_kept :], None
            runs.append(
                Run(
                    first + nodes.start - start,
                    tuple(seq.states.get(node) for node in nodes),
                    tuple(seq.inputs.get(node) for node in nodes),
                    source,
                    replayed,
                    None if runs else fold,
                )
            )
        return runs

    def forget(self) -> None:
        """After a pass that failed: the nodes stay, but nothing is held of them."""
        for node in self.wants.states:
            del self.seq.states[node]
        for node in self.wants.inputs:
            del self.seq.inputs[node]
