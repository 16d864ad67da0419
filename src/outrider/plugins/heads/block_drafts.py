"""Drafts from blocks: the loop of block drafters, and chains and trees from a block's logits.

Blocks come from plugins/heads/blocks.py. Logits of positions that do not depend on drafted tokens
give all drafts at once; others grow along paths (plugins/heads/block_heads.py).

Shapes:  B = texts, S = size of a block, K = drafted positions, M = packed logits rows,
         V = vocabulary, W = ids that are drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters.common.growth import draft_some
from outrider.plugins.heads.blocks import Backbone, NewContext
from outrider.plugins.heads.medusa import ParallelHeadSampler
from outrider.plugins.heads.native_blocks import Written

# Makes the drafts of texts, each to its budget, from their blocks.
Write: TypeAlias = Callable[[Sequence[DraftRow], Written], list[Draft]]


class BlockDrafter:
    """A drafter with a backbone, whose blocks `write` makes drafts of that no native pass made. One
    pass reads at most `chunk` tokens of a text; there are blocks up to position `window`. If drafts
    depend on the `whole` block, logits of all its positions are made.

    It drafts nothing before the target has read a text up to its pending token."""

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        write: Write,
        *,
        chunk: int,
        window: int,
        whole: bool = False,
    ) -> None:
        self.name, self._backbone, self._write = name, backbone, write
        self._whole = whole
        self._chunk, self._window = chunk, window
        self.needs = DraftNeeds(hidden_layers=backbone.hidden_layers)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._backbone.state.open(seq_id, prompt[:-1])

    def close(self, seq_id: int) -> None:
        self._backbone.state.close(seq_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return draft_some(rows, [self._depth(row) for row in rows], self._drafts)

    def _depth(self, row: DraftRow) -> int:
        length = len(row.tokens)
        if row.hidden is None or row.hidden.length < length - 1:
            return 0
        most = min(row.budget.depth, self._backbone.config.most)
        return max(0, min(most, self._window - length + 1))

    def _drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        size, drafts = self._backbone.num_texts, list[Draft]()
        for at in range(0, len(rows), size):
            some = rows[at : at + size]
            written = self._written(some)
            drafts += written.drafts or self._write(some, written)
        return drafts

    def _written(self, rows: Sequence[DraftRow]) -> Written:
        """Read these texts up to their pending tokens; return their blocks."""
        state, share = self._backbone.state, self._backbone.config.block_size
        parts: list[NewContext] = []
        for row in rows:
            start, stop = state.length(row.seq_id), len(row.tokens) - 1
            most = share if len(rows) > 1 else self._chunk
            while stop - start > most:
                end = min(start + self._chunk, stop)
                with self._retained([NewContext(row, start, end)]) as part:
                    self._backbone.read(part, writes=False)
                start = end
            parts.append(NewContext(row, start, stop))
        most = self._backbone.config.most
        depth = most if self._whole else max(row.budget.depth for row in rows)
        with self._retained(parts):
            return self._backbone.write(parts, depth)

    @contextmanager
    def _retained(self, parts: Sequence[NewContext]) -> Generator[Sequence[NewContext]]:
        """Retain the context that a pass within reads, and nothing after a failure."""
        kept = {part.row.seq_id: range(0) for part in parts}
        try:
            yield parts
            kept = {part.row.seq_id: range(part.stop - part.start) for part in parts}
        finally:
            self._backbone.state.commit(kept)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Drafts of all positions at once, from logits that do not depend on drafted tokens. `refine`
    changes logits_BKW by pending tokens and hidden_BSD of the block."""

    backbone: Backbone
    sampler: ParallelHeadSampler
    refine: Callable[[Sequence[DraftRow], Tensor, Tensor], Tensor] | None = None

    def __call__(self, rows: Sequence[DraftRow], written: Written) -> list[Draft]:
        return [
            self.sampler.draft(row, logits_KV[: row.budget.depth])
            for row, logits_KV in zip(rows, self._logits(rows, written), strict=True)
        ]

    @torch.inference_mode()
    def _logits(self, rows: Sequence[DraftRow], written: Written) -> Tensor:
        """Return logits_BKV."""
        logits_BKW = written.logits_BKW
        if self.refine is not None:
            logits_BKW = self.refine(rows, written.hidden_BSD, logits_BKW)
        shape = logits_BKW.shape[:2]
        return self.backbone.over_all(logits_BKW.flatten(0, 1)).view(*shape, -1)
