"""The target drafts for itself, cheaper: over its own memory, with fewer bits or fewer layers.

The drafter's model reads the keys and values of the text where the target left them, so it has no
prompt to read and no memory of its own. What it drafts lies staged behind the text, in the very
slots that the target's next pass writes, every layer of them, before it reads any. Nothing of it
is ever committed: before `propose` returns, well or with an error, all of it is dead space.

So it drafts where the target has read all of a text but its pending token, which an engine sees to
(`shares_memory`), and nothing else. Pages
are reserved as the target's own are, and those that it takes are the ones that verifying the draft
needs. (Zhang et al. 2023, "Draft & Verify"; Tiwari et al. 2025, "QuantSpec".)

It loses where a draft pass costs nearly what the target's costs: small models that fit a cache, and
passes whose time goes into attention over a long text, which both models share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import ContractError
from outrider.core.protocols import (
    CausalLM,
    DraftNeeds,
    DraftRow,
    StateStore,
    StepOutput,
    StepRow,
)
from outrider.core.rng import DrawNode, pick_node
from outrider.core.sampling import PLAIN, Sampling
from outrider.core.spec import ModelSpec
from outrider.drafters.model import ModelDrafter


@dataclass(frozen=True, slots=True)
class BorrowedMemory:
    """A StateStore over another's: it may stage nodes there and take them back, no more. Who opens
    and closes sequences is the owner."""

    owner: StateStore

    def open(self, seq_id: int, tokens: Sequence[int]) -> int:
        del tokens
        return self.owner.length(seq_id)

    def fork(self, source: int, new: int, length: int | None = None) -> None:
        raise AssertionError(f"borrowed memory of {source} cannot become {new} of {length} tokens")

    def length(self, seq_id: int) -> int:
        return self.owner.length(seq_id)

    def num_staged(self, seq_id: int) -> int:
        return self.owner.num_staged(seq_id)

    def reserve(self, counts: Mapping[int, int]) -> None:
        self.owner.reserve(counts)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> int:
        if any(paths.values()):
            raise ContractError("only the owner keeps what was fed")
        return self.owner.commit(paths)

    def close(self, seq_id: int) -> None:
        del seq_id

    @property
    def num_free_tokens(self) -> int:
        return self.owner.num_free_tokens


@dataclass(frozen=True, slots=True)
class _Borrower:
    """`model`, as if its memory were only borrowed."""

    model: CausalLM
    state: BorrowedMemory

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        return self.model.step(rows, needs)


class SelfDrafter:
    """Chains by `model`, whose `state` is the target's own. Otherwise it drafts as a draft model
    does (drafters/model.py): the same draws, the same laws reported.

    `name` is what traces call it: quantised-self or layer-skip.
    """

    needs = DraftNeeds(shares_memory=True)

    def __init__(
        self,
        model: CausalLM,
        argmax: Callable[[Tensor], list[int]],
        *,
        name: str,
        draw: DrawNode = pick_node,
        sampling: Sampling = PLAIN,
    ) -> None:
        self.name = name
        self._memory = BorrowedMemory(model.state)
        borrower = _Borrower(model, self._memory)
        # It never meets text that it has to read, so the chunk does not matter.
        self._chains = ModelDrafter(borrower, argmax, chunk=1, draw=draw, sampling=sampling)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._chains.open(seq_id, prompt)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        ready = [row for row in rows if self._memory.length(row.seq_id) == len(row.tokens) - 1]
        try:
            drafted = self._chains.propose(ready)
        finally:
            self._forget(ready)
        drafts = {row.seq_id: draft for row, draft in zip(ready, drafted, strict=True)}
        return [drafts.get(row.seq_id, Draft.empty()) for row in rows]

    def close(self, seq_id: int) -> None:
        self._chains.close(seq_id)

    def _forget(self, rows: Sequence[DraftRow]) -> None:
        """Leave nothing staged, so that the target's pass begins behind its text."""
        self._memory.commit({row.seq_id: () for row in rows})
        for row in rows:
            self._chains.note(row.seq_id, ())
