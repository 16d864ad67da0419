"""Native calls for drafts on CPUs: a pass of a head, a whole chain, or the greedy trees of a batch.

EAGLE and MTP nets are a Llama layer behind an entrance where a token meets the state before it
(kernels/native/forward.py). Without a native library, or with another layer, the nets run operator
by operator, which is the definition. Drawn trees, and trees of requests with logits processors,
grow level by level in Python.

Shapes:  N = packed tokens, M = packed logits rows, V = vocabulary, W = ids that are drafted,
         D = hidden size, K = depth of the deepest draft, B = texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import CapacityError, ContractError, given
from outrider.core.protocols import CausalLM, DraftRow, StepRow
from outrider.core.rng import KeyedRng, pick_node
from outrider.core.sampling import MIN_TEMPERATURE
from outrider.drafters.growth import (
    DraftSampler,
    TextPart,
    chosen_draft,
    drawn_params,
    tree_limits,
)
from outrider.drafters.heads import NOT_DRAFTED, NetOutput, target_states
from outrider.kernels.native.forward import Entrance, ForwardParts, NativeForward
from outrider.kernels.native.rounds import CacheSpan, ChainRow, NativeChains, RoundModel
from outrider.kernels.native.trees import NativeTreeDrafts, most_fed
from outrider.kernels.registry import Kernels
from outrider.models.decoder import wanted_tokens
from outrider.models.heads import HeadMemory
from outrider.models.llama import LlamaModel

# From the target's states to what a block reads in their place.
Fuse: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class HeadPass:
    """One block's passes over `state`. Not thread-safe: every pass writes over the last one's
    logits, which callers may write into."""

    model: RoundModel
    entrance: Entrance
    state: HeadMemory
    vocab_size: int

    def step(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        """As `HeadNet.step` says; at most as many tokens as there is room for."""
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
        """Over the target's ids."""
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
    """None without native kernels. `parts` have an entrance; `logits_MV` is room for logits of the
    `ids_W` that the output head knows, all if None."""
    if kernels.forward is None:
        return None
    forward = kernels.forward(parts)
    if not isinstance(forward, NativeForward):
        raise ContractError("forward is no NativeForward")
    shape = len(logits_MV), parts.head.num_out
    logits_MW = logits_MV.flatten()[: shape[0] * shape[1]].view(shape)
    model = RoundModel(forward, logits_MW, state.page_size, ids_W)
    return HeadPass(model, given(parts.entrance, "entrance"), state, parts.embedding_VD.shape[0])


@dataclass(frozen=True, slots=True)
class FusedDraft:
    """A draft, and what the model has read for it, text first; nothing if that is not kept."""

    draft: Draft
    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()


class FusedDrafts(Protocol):
    """Drafts of a batch in one call, with nothing between their tokens."""

    def try_rows(self, parts: Sequence[TextPart]) -> Sequence[FusedDraft] | None:
        """Stage `parts`, the end of each text, and draft below them. None, with nothing done that
        counts, if that takes a pass for each token or level."""
        ...


class FusedChains:
    """FusedDrafts: one call for the pass that reads and those that draft on. Only the text stays
    staged.

    Not for requests with logits processors, and drawn tokens only with keyed numbers of their own.
    `enter` is called just before the passes; where it says no, the chains grow in Python.
    """

    def __init__(
        self,
        model: RoundModel,
        state: HeadMemory,
        sampler: DraftSampler,
        *,
        batch_size: int,
        vocab_size: int,
        enter: Callable[[Sequence[TextPart]], bool],
    ) -> None:
        self._state, self._sampler, self._vocab_size = state, sampler, vocab_size
        self._enter = enter
        self._call = NativeChains(model, batch_size=batch_size, vocab_size=vocab_size)

    def try_rows(self, parts: Sequence[TextPart]) -> list[FusedDraft] | None:
        if not all(self._takes(part.row) for part in parts):
            return None
        state = self._state
        state.reserve({p.row.seq_id: len(p.tokens) + p.row.budget.depth - 1 for p in parts})
        rows = [self._row(part) for part in parts]
        if not self._call.fits(rows) or not self._enter(parts):
            return None
        made = self._call(rows)
        if made is None:
            return None
        drafts: list[FusedDraft] = []
        for index, part in enumerate(parts):
            state.note_chain(part.row.seq_id, part.tokens)
            probs_NV = None
            if made.probs_BKV is not None and not part.row.params.greedy:
                probs_NV = made.probs_BKV[index, : part.row.budget.depth]
            drafts.append(FusedDraft(Draft.chain(made.drafted[index], probs_NV)))
        return drafts

    def _takes(self, row: DraftRow) -> bool:
        sampler = self._sampler
        if row.shaper is not None:
            return False
        return row.params.greedy or (
            sampler.draw_for(row.params) is pick_node
            and sampler.change is None
            and isinstance(row.rng, KeyedRng)
            and row.rng.choose == sampler.sampling.pick
        )

    def _row(self, part: TextPart) -> ChainRow:
        row, span = part.row, _span(self._state, part)
        if row.params.greedy:
            return ChainRow(span, row.budget.depth)
        if not isinstance(row.rng, KeyedRng):
            raise ContractError("rng is no KeyedRng")
        return ChainRow(
            span,
            row.budget.depth,
            temperature=max(drawn_params(row).temperature, MIN_TEMPERATURE),
            top_k=min(row.params.top_k, self._vocab_size),
            top_p=row.params.top_p,
            min_p=row.params.min_p,
            seed=row.rng.seed,
            sample=row.rng.sample,
            start=row.rng.start,
        )


def _span(state: HeadMemory, part: TextPart) -> CacheSpan:
    seq_id = part.row.seq_id
    return CacheSpan(state.length(seq_id), part.tokens, state.pages(seq_id))


class FusedTrees:
    """FusedDrafts of greedy trees; what was read for them stays staged. `enter`, if given, is
    called when it is sure that a pass is made; the trees grow in Python unless `usable`."""

    def __init__(
        self,
        model: RoundModel,
        state: HeadMemory,
        *,
        batch_size: int,
        enter: Callable[[Sequence[TextPart]], object] = lambda _: None,
        usable: Callable[[], bool] = lambda: True,
    ) -> None:
        self._state, self._enter, self._usable = state, enter, usable
        self._call = NativeTreeDrafts(model, batch_size=batch_size)

    def try_rows(self, parts: Sequence[TextPart]) -> list[FusedDraft] | None:
        if not self._usable() or not all(map(_is_greedy, parts)):
            return None
        limits = [tree_limits(part.row) for part in parts]
        if not self._call.fits([part.tokens for part in parts], limits):
            return None
        needed = {
            part.row.seq_id: len(part.tokens) + most_fed(limit)
            for part, limit in zip(parts, limits, strict=True)
        }
        try:
            self._state.reserve(needed)
        except CapacityError:
            # Levels are seldom as wide as they may be.
            return None
        self._enter(parts)
        grown = self._call([_span(self._state, part) for part in parts], limits)
        if grown is None:
            return None
        for part, one in zip(parts, grown, strict=True):
            self._state.note_tree(part.row.seq_id, one.tokens, one.parents)
        return [FusedDraft(chosen_draft(one.kept), one.tokens, one.parents) for one in grown]


def _is_greedy(part: TextPart) -> bool:
    return part.row.params.greedy and part.row.shaper is None


def fused_model_trees(model: CausalLM, *, batch_size: int) -> FusedTrees | None:
    """None where a pass of `model` is no native call."""
    own = _NativeModel.of(model)
    if own is None:
        return None
    passes, state = own.passes, own.model.state
    return FusedTrees(passes, state, batch_size=batch_size, usable=own.is_same)


def fused_model_chains(
    model: CausalLM, sampler: DraftSampler, *, batch_size: int
) -> FusedChains | None:
    """None where a pass of `model` is no native call."""
    own = _NativeModel.of(model)
    if own is None:
        return None
    size = own.model.spec.vocab_size
    return FusedChains(
        own.passes,
        own.model.state,
        sampler,
        batch_size=batch_size,
        vocab_size=size,
        enter=lambda _: own.is_same(),
    )


@dataclass(frozen=True, slots=True)
class _NativeModel:
    """A model whose pass is one native call, as it was when drafts were built."""

    model: LlamaModel
    passes: RoundModel

    @classmethod
    def of(cls, model: CausalLM) -> _NativeModel | None:
        forward = model.forward() if isinstance(model, LlamaModel) else None
        if not isinstance(model, LlamaModel) or not isinstance(forward, NativeForward):
            return None
        return cls(model, RoundModel(forward, model.logits, model.state.page_size))

    def is_same(self) -> bool:
        """Kernels may be exchanged later."""
        return self.model.forward() is self.passes.forward


def fused_head_drafts(
    passes: HeadPass | None, fuse: Fuse, sampler: DraftSampler, *, batch_size: int
) -> FusedDrafts | None:
    """Trees or chains of one block, as `sampler` says; None where its pass is no native call."""
    if passes is None:
        return None

    def enter(parts: Sequence[TextPart]) -> bool:
        passes.enter(fuse(target_states(parts)))
        return True

    model, state = passes.model, passes.state
    if sampler.branches:
        return FusedTrees(model, state, batch_size=batch_size, enter=enter)
    size = passes.vocab_size
    return FusedChains(model, state, sampler, batch_size=batch_size, vocab_size=size, enter=enter)
