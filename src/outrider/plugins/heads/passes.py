"""Passes of a head in one native call, and drafts that a batch makes with them.

EAGLE and MTP nets are a Llama layer behind an entrance where a token meets the state before it
(kernels/native/forward.py). Without a native library, or with another layer, the nets run operator
by operator, which is the definition.

Shapes:  N = packed tokens, M = packed logits rows, V = vocabulary, W = ids that are drafted,
         D = hidden size, P = tokens of a part, K = captured layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.core.errors import ContractError, given
from outrider.core.protocols import DraftRow, StepRow
from outrider.drafters.common.growth import NOT_DRAFTED, DraftSampler, FusedDrafts, TextPart
from outrider.drafters.common.native import FusedChains, FusedTrees, HeadMemory, KeyedChains
from outrider.kernels.native.forward import Entrance, ForwardParts, NativeForward
from outrider.kernels.native.rounds import RoundModel
from outrider.kernels.native.sampling import NativeTreeDrafts
from outrider.kernels.operators import Kernels
from outrider.models.decoder import wanted_tokens


@dataclass(frozen=True, slots=True)
class NetOutput:
    """Logits of the rows that requested them, packed, and the block's own states of all tokens."""

    logits_MV: Tensor
    hidden_ND: Tensor


def target_states(parts: Sequence[TextPart]) -> Tensor:
    """Return hidden_PKD of the token before each token of `parts`."""
    states = [_states_before(part.row, part.start, len(part.tokens)) for part in parts]
    return states[0] if len(states) == 1 else torch.cat(states)


def _states_before(row: DraftRow, start: int, count: int) -> Tensor:
    """Return the states before these tokens; the state before a text's first token is zero."""
    hidden_PKD = given(row.hidden, "hidden state").read(max(start - 1, 0), start + count - 1)
    if start > 0:
        return hidden_PKD
    return torch.cat([hidden_PKD.new_zeros(1, *hidden_PKD.shape[1:]), hidden_PKD])


# (the target's states) -> the states that a block reads.
Fuse: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class HeadPass:
    """Passes of one block over `state`. Not thread-safe: every pass overwrites the last one's
    logits, which callers may write into."""

    model: RoundModel
    entrance: Entrance
    state: HeadMemory
    vocab_size: int

    def step(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        """Run a pass as `HeadNet.step` does, over at most as many tokens as the buffers hold."""
        with torch.inference_mode():
            plan = self.state.plan(rows)
            wanted = wanted_tokens(rows)
            self.enter(hidden_ND)
            logits_MW = self.model.logits_MV[: len(wanted)]
            self.model.forward(plan, torch.tensor(wanted, dtype=torch.int32), logits_MW)
            own_ND = self.entrance.own_ND[: plan.num_tokens].clone()
            return NetOutput(self._spread(logits_MW), own_ND)

    @torch.inference_mode()
    def enter(self, states_ND: Tensor) -> None:
        """Give the next pass the state before each of its tokens."""
        self.entrance.states_ND[: len(states_ND)].copy_(states_ND)

    def _spread(self, logits_MW: Tensor) -> Tensor:
        """Return the logits over the target's ids."""
        if self.model.ids_V is None:
            return logits_MW
        logits_MV = logits_MW.new_full((len(logits_MW), self.vocab_size), NOT_DRAFTED)
        return logits_MV.index_copy_(1, self.model.ids_V, logits_MW)


def head_pass(
    kernels: Kernels,
    parts: ForwardParts,
    state: HeadMemory,
    logits_MV: Tensor,
    ids_W: Tensor | None = None,
) -> HeadPass | None:
    """Return the native pass of a block, or None without native kernels. `parts` have an entrance;
    `logits_MV` is space for logits of the `ids_W` that the output head knows, all if None."""
    if kernels.forward is None:
        return None
    forward = kernels.forward(parts)
    if not isinstance(forward, NativeForward):
        raise ContractError("forward is no NativeForward")
    shape = len(logits_MV), parts.head.num_out
    logits_MW = logits_MV.flatten()[: shape[0] * shape[1]].view(shape)
    model = RoundModel(forward, logits_MW, state.page_size, ids_W)
    return HeadPass(model, given(parts.entrance, "entrance"), state, parts.embedding_VD.shape[0])


def fused_head_drafts(
    passes: HeadPass | None, fuse: Fuse, sampler: DraftSampler, *, batch_size: int
) -> FusedDrafts | None:
    """Return a maker of one block's trees or chains; None if it has no native pass."""
    if passes is None:
        return None

    def enter(parts: Sequence[TextPart]) -> bool:
        passes.enter(fuse(target_states(parts)))
        return True

    model, state, size = passes.model, passes.state, passes.vocab_size
    if sampler.branches:
        call = NativeTreeDrafts(model, batch_size=batch_size, vocab_size=size)
        return FusedTrees(call, state, sampler, vocab_size=size, enter=enter)
    chains = KeyedChains(model, sampler, batch_size=batch_size, vocab_size=size)
    return FusedChains(chains, state, enter=enter)
