"""Native calls for drafts on CPUs: a pass of a head, or the chains or trees of a batch.

EAGLE and MTP nets are a Llama layer behind an entrance where a token meets the state before it
(kernels/native/forward.py). Without a native library, or with another layer, the nets run operator
by operator, which is the definition. With logits processors, drafts grow in Python.

Shapes:  N = packed tokens, M = packed logits rows, V = vocabulary, W = ids that are drafted,
         D = hidden size, K = depth of the deepest draft, B = texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.core.draft import Budget, Draft
from outrider.core.errors import CapacityError, ContractError, given
from outrider.core.protocols import AheadRow, CausalLM, DraftRow, StepRow
from outrider.core.rng import KeyedRng, Rng, pick_node, race_node
from outrider.core.sampling import MIN_TEMPERATURE
from outrider.drafters.common.growth import (
    NOT_DRAFTED,
    CommonIds,
    DraftSampler,
    FusedDraft,
    FusedDrafts,
    TextPart,
    chosen_draft,
    drawn_params,
    settled_shape,
    tree_limits,
)
from outrider.kernels.native.forward import Entrance, ForwardParts, NativeForward
from outrider.kernels.native.rounds import (
    CacheSpan,
    ChainRow,
    DraftedChains,
    Draws,
    NativeChains,
    RoundModel,
)
from outrider.kernels.native.sampling import Grown, NativeTreeDrafts, PlannedTree
from outrider.kernels.operators import Kernels
from outrider.models.decoder import wanted_tokens
from outrider.models.heads import HeadMemory
from outrider.models.llama import LlamaModel


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


class FusedChains:
    """FusedDrafts of chains: one call for the pass that reads and those that draft on. The draft
    tokens that were read stay staged with `keeps_drafts`, else only the text does.

    Not for requests with logits processors, and drawn tokens only with keyed numbers of their own.
    `enter` is called just before the passes; if it returns False, the chains grow in Python.
    """

    def __init__(
        self,
        chains: KeyedChains,
        state: HeadMemory,
        *,
        enter: Callable[[Sequence[TextPart]], bool],
        keeps_drafts: bool = False,
    ) -> None:
        self._chains, self._state = chains, state
        self._enter, self._keeps_drafts = enter, keeps_drafts

    def try_rows(self, parts: Sequence[TextPart]) -> list[FusedDraft] | None:
        if not all(part.row.shaper is None for part in parts):
            return None
        state = self._state
        rows = [self._chains.row(part.row, part.row.rng, _span(state, part)) for part in parts]
        if None in rows:
            return None
        state.reserve({p.row.seq_id: len(p.tokens) + p.row.budget.depth - 1 for p in parts})
        made = self._chains.draft(rows, lambda: self._enter(parts))
        if made is None:
            return None
        drafts: list[FusedDraft] = []
        for index, part in enumerate(parts):
            probs_NV = None
            if made.probs_BKV is not None and not part.row.params.greedy:
                probs_NV = made.probs_BKV[index, : part.row.budget.depth]
            draft = Draft.chain(made.drafted[index], probs_NV)
            fed = [*part.tokens, *draft.tokens[:-1]] if self._keeps_drafts else part.tokens
            state.note_chain(part.row.seq_id, fed)
            drafts.append(FusedDraft(draft, fed if self._keeps_drafts else ()))
        return drafts


_GREEDY = Draws()


def keyed_draws(
    sampler: DraftSampler, row: DraftRow | AheadRow, rng: Rng, vocab_size: int
) -> Draws | None:
    """Return how a call draws the tokens of `row`; None if it cannot."""
    params = row.params
    if params.greedy:
        return _GREEDY
    draw = sampler.draw_for(params)
    if (
        draw not in (pick_node, race_node)
        or sampler.change is not None
        or not isinstance(rng, KeyedRng)
        or rng.choose != sampler.sampling.pick
    ):
        return None
    return Draws(
        temperature=max(drawn_params(row).temperature, MIN_TEMPERATURE),
        top_k=min(params.top_k, vocab_size),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=rng.seed,
        sample=rng.sample,
        start=rng.start,
        rule="coupled" if draw is race_node else "token",
    )


class KeyedChains:
    """A maker of one model's chains in one call, with the choices of `sampler`."""

    def __init__(
        self, model: RoundModel, sampler: DraftSampler, *, batch_size: int, vocab_size: int
    ) -> None:
        self._sampler, self._vocab_size = sampler, vocab_size
        self._call = NativeChains(model, batch_size=batch_size, vocab_size=vocab_size)

    def row(
        self, row: DraftRow | AheadRow, rng: Rng, span: CacheSpan, *, branch_slot: int = 0
    ) -> ChainRow | None:
        """Return the row of a call; None if its tokens are not drawn as the call draws them."""
        draws = keyed_draws(self._sampler, row, rng, self._vocab_size)
        if draws is None:
            return None
        return ChainRow(span, row.budget.depth, draws, branch_slot)

    def draft(
        self, rows: Sequence[ChainRow | None], enter: Callable[[], bool]
    ) -> DraftedChains | None:
        """Return the drafted chains; None if a row is None, memory is too small, `enter` returns
        False, or logits are no numbers."""
        known = [row for row in rows if row is not None]
        if len(known) < len(rows) or not self._call.fits(known) or not enter():
            return None
        return self._call(known)


def _span(state: HeadMemory, part: TextPart) -> CacheSpan:
    seq_id = part.row.seq_id
    return CacheSpan(state.length(seq_id), part.tokens, state.pages(seq_id))


class FusedTrees:
    """FusedDrafts of trees, with the choices of `sampler`; the tokens that were read for them stay
    staged. `enter` is called just before the passes; if it returns False, the trees grow in Python.

    Not for requests with logits processors, and drawn tokens only with keyed numbers of their own.
    """

    def __init__(
        self,
        call: NativeTreeDrafts,
        state: HeadMemory,
        sampler: DraftSampler,
        *,
        vocab_size: int,
        enter: Callable[[Sequence[TextPart]], bool],
    ) -> None:
        self._call, self._state, self._enter = call, state, enter
        self._sampler, self._vocab_size = sampler, vocab_size

    def try_rows(self, parts: Sequence[TextPart]) -> list[FusedDraft] | None:
        trees = [tree for part in parts if (tree := self._planned(part)) is not None]
        if len(trees) < len(parts) or not self._call.fits(trees):
            return None
        needed = {
            part.row.seq_id: len(part.tokens) + tree.most_fed
            for part, tree in zip(parts, trees, strict=True)
        }
        try:
            self._state.reserve(needed)
        except CapacityError:
            # Levels are seldom as wide as allowed, so growing level by level may still fit.
            return None
        grown = self._call(trees) if self._enter(parts) else None
        if grown is None:
            return None
        for part, one in zip(parts, grown, strict=True):
            self._state.note_tree(part.row.seq_id, one.tokens, one.parents)
        return [
            FusedDraft(_draft_of(one, part.row.budget), one.tokens, one.parents)
            for part, one in zip(parts, grown, strict=True)
        ]

    def _planned(self, part: TextPart) -> PlannedTree | None:
        """Return the tree's plan; None if nodes are not chosen as the call chooses them."""
        row = part.row
        draws = keyed_draws(self._sampler, row, row.rng, self._vocab_size)
        if row.shaper is not None or draws is None:
            return None
        shape = None if row.params.greedy else settled_shape(row.budget)
        return PlannedTree(_span(self._state, part), tree_limits(row), draws, shape)


def _draft_of(grown: Grown, budget: Budget) -> Draft:
    if grown.probs_NV is None:
        return chosen_draft(grown.kept, budget)
    return Draft(tuple(grown.kept.tokens), tuple(grown.kept.parents), grown.probs_NV)


def fused_model_drafts(
    model: CausalLM, sampler: DraftSampler, *, batch_size: int
) -> FusedDrafts | None:
    """Return a maker of `sampler`'s trees or chains; None if `model` has no native pass."""
    own = NativeModel.of(model)
    if own is None:
        return None
    state, size = own.model.state, own.vocab_size
    if sampler.branches:
        call = NativeTreeDrafts(own.passes, batch_size=batch_size, vocab_size=size)
        return FusedTrees(call, state, sampler, vocab_size=size, enter=lambda _: own.is_same())
    chains = own.chains(sampler, batch_size=batch_size)
    return FusedChains(chains, state, enter=lambda _: own.is_same(), keeps_drafts=True)


@dataclass(frozen=True, slots=True)
class NativeModel:
    """A model whose pass is one native call, as it was when drafts were built, and the size of the
    vocabulary of its drafts."""

    model: LlamaModel
    passes: RoundModel
    vocab_size: int

    @classmethod
    def of(cls, model: CausalLM) -> NativeModel | None:
        own, ids_V = (model.model, model.ids_V) if isinstance(model, CommonIds) else (model, None)
        forward = own.forward() if isinstance(own, LlamaModel) else None
        if not isinstance(own, LlamaModel) or not isinstance(forward, NativeForward):
            return None
        passes = RoundModel(forward, own.logits, own.state.page_size, ids_V)
        return cls(own, passes, model.spec.vocab_size)

    def chains(self, sampler: DraftSampler, *, batch_size: int) -> KeyedChains:
        size = self.vocab_size
        return KeyedChains(self.passes, sampler, batch_size=batch_size, vocab_size=size)

    def is_same(self) -> bool:
        """Return whether the kernels are still the same: they may be exchanged later."""
        return self.model.forward() is self.passes.forward


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
