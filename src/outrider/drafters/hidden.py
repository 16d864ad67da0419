"""Chains and trees drafted from the target's hidden states: the loop that EAGLE and MTP share.

At position p a block reads the token there and the state of the token before. Text is read with the
target's states. Drafted tokens are read with the block's own states and dropped when the draft is
done; accepted ones are read again with the target's states, together with the pending token. So
every entry of the block's KV cache is of text and never changes, and reading what is new is one
pass of at most K + 1 tokens.

Shapes:  P = tokens of one text, N = packed tokens, M = packed logits rows, R = texts,
         K = captured layers, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import ContractError
from outrider.core.protocols import DraftNeeds, DraftRow, StepRow
from outrider.drafters.growth import DraftSampler, TextPart, draft_some
from outrider.drafters.heads import HeadNet, NetOutput, target_states
from outrider.drafters.native import FusedDrafts


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLimits:
    """Limits of a block. One pass reads at most `chunk` tokens of a text alone, and `reach`
    together with other texts: K + 1 is what a round may add. A block has `window` positions. It
    reads a text from its token `first` on; the state before the text's first token is zero."""

    chunk: int
    reach: int
    window: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class BlocksOutput:
    """A pass's output for the newest tokens: the logits that follow them, and the states of the
    blocks, by number, that read them, each of shape [M, D]."""

    logits_MV: Tensor
    states: Mapping[int, Tensor]

    def of(self, rows: Sequence[int]) -> Mapping[int, Tensor]:
        """Return the states of some of them."""
        return {block: states_MD[list(rows)] for block, states_MD in self.states.items()}


class Blocks:
    """Nets, one for each trained depth, that read the same texts in step. Within `drafting`,
    `catch_up` and `read` stage the new tokens of texts, `follow` drafts below them.

    A model that was trained to several depths has a block for each (DeepSeek-V3, arXiv 2412.19437,
    2.2): block j reads the state that block j - 1 made of the token before, the first one the
    target's states. Draft i comes from block i, or from the last block, which then reads its own
    states. A block whose turn has not come reads the drafts too, or it would have gaps.
    """

    def __init__(self, nets: Sequence[HeadNet], limits: HeadLimits) -> None:
        self._nets, self._limits = nets, limits
        # The number of staged tokens that are text.
        self._read: dict[int, int] = {}
        # The states that all blocks but the last made of the last token that is retained, or will
        # be.
        self._ends: dict[int, list[Tensor]] = {}
        self._new_ends: dict[int, list[Tensor]] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        # A page is found by its tokens, so they must be all that its entries depend on; and a later
        # block cannot continue a text that it did not read itself.
        shared = () if self._limits.first or len(self._nets) > 1 else prompt[:-1]
        for net in self._nets:
            net.state.open(seq_id, shared)

    def close(self, seq_id: int) -> None:
        for net in self._nets:
            net.state.close(seq_id)
        self._ends.pop(seq_id, None)

    def depth(self, row: DraftRow) -> int:
        """Return how deep to draft: 0 before the target has read the text up to its pending token,
        and for a text that was drafted for before. The last draft token is not read, so it may lie
        past the window."""
        length = len(row.tokens)
        if row.hidden is None or row.hidden.length < length - 1 or self._num_unread(row) < 1:
            return 0
        return max(0, min(row.budget.depth, self._limits.window - length + 1))

    @contextmanager
    def drafting(self, seq_ids: Sequence[int]) -> Generator[None]:
        """Retain, at the end, the text that was read within, and no draft. After a failure it
        retains nothing, so that the same texts, except the failed one, can be drafted for."""
        try:
            yield
        except BaseException:
            for seq_id in seq_ids:
                self._read.pop(seq_id, None)
                self._new_ends.pop(seq_id, None)
            raise
        finally:
            self._settle(seq_ids)

    def catch_up(self, rows: Sequence[DraftRow]) -> list[TextPart]:
        """Read from each text what one pass cannot read together with others; return the rest, up
        to its pending token. There must be something new."""
        parts: list[TextPart] = []
        for row in rows:
            start = len(row.tokens) - self._num_unread(row)
            far = len(row.tokens) - self._limits.reach
            for at in range(start, far, self._limits.chunk):
                tokens = row.tokens[at : min(at + self._limits.chunk, far)]
                self.read([TextPart(row, at, tokens)])
                self._settle([row.seq_id])
            parts.append(TextPart.end(row, row.tokens[max(start, far) :]))
        return parts

    def read(self, parts: Sequence[TextPart]) -> BlocksOutput:
        """Stage these tokens; return the output for the last of each text."""
        rows = [part.step for part in parts]
        needed = {row.seq_id: len(row.tokens) for row in rows}
        for net in self._nets:
            net.state.reserve(needed)
        out = self._nets[0].step(rows, self._nets[0].fuse(target_states(parts)))
        made = [torch.split(out.hidden_ND, list(needed.values()))]
        rows = [replace(row, logits_from=len(row.tokens)) for row in rows]
        for net in self._nets[1:]:
            before = torch.cat(self._before(rows, made))
            later = net.step(rows, before)
            made.append(torch.split(later.hidden_ND, list(needed.values())))
        self.note(parts)
        if len(self._nets) > 1:
            for index, part in enumerate(parts):
                self._new_ends[part.row.seq_id] = [own[index][-1].clone() for own in made[:-1]]
        states = {n: torch.stack([own_PD[-1] for own_PD in own]) for n, own in enumerate(made)}
        return BlocksOutput(out.logits_MV, states)

    def note(self, parts: Sequence[TextPart]) -> None:
        """Record that a pass in which no block failed has read these."""
        for part in parts:
            self._read[part.row.seq_id] = len(part.tokens)

    def follow(
        self, steps: Sequence[StepRow], above: Mapping[int, Tensor], offset: int
    ) -> BlocksOutput:
        """Stage the newest drafted tokens, `offset` tokens below the pending one; `above` are the
        states at the token before each, in the same order."""
        last = len(self._nets) - 1
        first = min(offset, last)
        outputs: dict[int, NetOutput] = {}
        for block in range(first, last + 1):
            if block == first + 1:  # Later blocks only read.
                steps = [replace(step, logits_from=len(step.tokens)) for step in steps]
            source = block - 1 if offset <= block else block
            outputs[block] = self._nets[block].step(steps, above[source])
        states = {block: out.hidden_ND for block, out in outputs.items()}
        return BlocksOutput(outputs[first].logits_MV, states)

    def _num_unread(self, row: DraftRow) -> int:
        """Return the number of new tokens of a text; 0 if this text was drafted for before."""
        return len(row.tokens) - self._limits.first - self._nets[0].state.length(row.seq_id)

    def _settle(self, seq_ids: Sequence[int]) -> None:
        """Retain the tokens that were read of these texts, and no draft. All blocks then hold the
        same tokens, whatever failed before."""
        paths = {seq_id: range(self._read.pop(seq_id, 0)) for seq_id in seq_ids}
        for net in self._nets:
            net.state.commit(paths)
        for seq_id in seq_ids:
            if seq_id in self._new_ends:
                self._ends[seq_id] = self._new_ends.pop(seq_id)

    def _before(self, rows: Sequence[StepRow], made: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the newest block's states of the token before each token, by text."""
        block = len(made) - 1
        before: list[Tensor] = []
        for row, own_PD in zip(rows, made[block], strict=True):
            ends = self._ends.get(row.seq_id)
            end_D = torch.zeros_like(own_PD[0]) if ends is None else ends[block]
            before.append(torch.cat([end_D[None], own_PD[:-1]]))
        return before


class HiddenDrafter:
    """A drafter with `nets`, whose logits are over the target's ids: chains, or trees of one net.

    It drafts nothing before the target has read a text up to its pending token, nor beyond the end
    of the blocks' window. A second request for the same text, as after a failure of the target,
    also gets an empty draft: that round costs a draft. With `fused`, which requires a single block,
    drafts are made in one call where possible.
    """

    def __init__(
        self,
        name: str,
        nets: Sequence[HeadNet],
        sampler: DraftSampler,
        limits: HeadLimits,
        fused: FusedDrafts | None = None,
    ) -> None:
        if len(nets) != 1 and (fused is not None or sampler.branches):
            raise ContractError("trees, and drafts in one call, are of one net")
        self.name, self._sampler, self._fused = name, sampler, fused
        self.needs = DraftNeeds(hidden_layers=nets[0].hidden_layers)
        self._blocks = Blocks(nets, limits)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._blocks.open(seq_id, prompt)

    def close(self, seq_id: int) -> None:
        self._blocks.close(seq_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return draft_some(rows, [self._blocks.depth(row) for row in rows], self._drafts)

    def _drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        with self._blocks.drafting([row.seq_id for row in rows]):
            return self._drafted(rows)

    def _drafted(self, rows: Sequence[DraftRow]) -> list[Draft]:
        parts = self._blocks.catch_up(rows)
        fused = None if self._fused is None else self._fused.try_rows(parts)
        if fused is not None:
            self._blocks.note(parts)
            return [one.draft for one in fused]
        out = self._blocks.read(parts)
        builder = self._sampler.builder(rows, [len(part.tokens) - 1 for part in parts])
        for offset in count(1):
            steps = builder.grow(out.logits_MV)
            if not steps:
                break
            out = self._blocks.follow(steps, out.of(builder.above), offset)
        return builder.drafts()
