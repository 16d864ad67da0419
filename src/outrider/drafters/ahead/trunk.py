"""Reading the drafts that are being verified: one pass of the draft model for a whole batch.

A trunk is the pending token and the draft. Its rows stay staged, so that branches can hang from
them, and its logits say what may follow each of its tokens. Memory for all branches is held before
anything is fed: what does not fit is not begun.

Shapes:  N = places of a draft, the root first, V = vocabulary, M = rows of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.core.errors import CapacityError
from outrider.core.protocols import AheadRow, CausalLM, DraftNeeds, StepRow
from outrider.drafters.ahead.room import AheadRoom
from outrider.drafters.model import ModelDrafter

_NO_NEEDS = DraftNeeds()


@dataclass(frozen=True, slots=True)
class Trunk:
    """A draft that was read: `root` is the staged node of the pending token, and at most
    `num_branches` may be grown. `logits_NV` are the model's until its next step."""

    row: AheadRow
    root: int
    num_branches: int
    logits_NV: Tensor

    @property
    def draft(self) -> tuple[int, ...]:
        return self.row.draft.tokens


@dataclass(frozen=True, slots=True)
class _Feed:
    row: AheadRow
    step: StepRow
    num_branches: int


class Trunks:
    """Reads with `model`, through `jit`, which keeps its memory."""

    def __init__(self, model: CausalLM, jit: ModelDrafter, room: AheadRoom) -> None:
        self._model = model
        self._jit = jit
        self._room = room

    def read(
        self, rows: Sequence[AheadRow], texts: Mapping[int, Sequence[int]], fan_out: int
    ) -> list[Trunk]:
        """`texts` end with the pending tokens. With room for `fan_out` branches each, or fewer;
        those that there is no room for are left out."""
        steps = [(row, step) for row in rows if (step := self._step(row, texts[row.seq_id]))]
        feeds = self._with_memory(self._with_rows(steps), fan_out)
        if not feeds:
            return []
        logits_MV = self._model.step([feed.step for feed in feeds], _NO_NEEDS).logits_MV
        trunks: list[Trunk] = []
        start = 0
        for feed in feeds:
            step, end = feed.step, start + feed.step.num_logits
            self._jit.note(step.seq_id, step.tokens)
            logits_NV = logits_MV[start:end]
            trunks.append(Trunk(feed.row, step.logits_from, feed.num_branches, logits_NV))
            start = end
        return trunks

    def _step(self, row: AheadRow, text: Sequence[int]) -> StepRow | None:
        """What the model has not read up to the end of the draft; reads all but the last of it."""
        try:
            rest = self._jit.begin(row.seq_id, text)
        except CapacityError:
            return None
        tokens = [*rest, *row.draft.tokens]
        return StepRow.chain(row.seq_id, tokens, logits_from=len(rest) - 1)

    def _with_rows(
        self, steps: Sequence[tuple[AheadRow, StepRow]]
    ) -> list[tuple[AheadRow, StepRow]]:
        """As many of them, from the first, as fit into one pass."""
        kept: list[tuple[AheadRow, StepRow]] = []
        num_rows, num_logits = 0, 0
        for row, step in steps:
            num_rows += len(step.tokens)
            num_logits += step.num_logits
            if num_rows > self._room.num_rows or num_logits > self._room.num_logits:
                break
            kept.append((row, step))
        return kept

    def _with_memory(self, steps: Sequence[tuple[AheadRow, StepRow]], fan_out: int) -> list[_Feed]:
        """Each with as many branches as there are rows and free memory for."""
        if not steps:
            return []
        most = min(fan_out, min(self._room.num_rows, self._room.num_logits) // len(steps))
        held: dict[int, int] = {}
        feeds: list[_Feed] = []
        for row, step in steps:
            count = most
            while count and not self._held(held, step, count * row.budget.depth):
                count //= 2
            if count:
                feeds.append(_Feed(row, step, count))
        return feeds

    def _held(self, held: dict[int, int], step: StepRow, num_nodes: int) -> bool:
        wanted = len(step.tokens) + num_nodes
        try:
            self._model.state.reserve({**held, step.seq_id: wanted})
        except CapacityError:
            return False
        held[step.seq_id] = wanted
        return True
