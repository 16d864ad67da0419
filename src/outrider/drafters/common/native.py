"""Native calls for drafts on CPUs: the chains or trees of a batch.

Shapes:  N = nodes, M = packed logits rows, V = vocabulary, W = ids that are drafted,
         K = depth of the deepest draft, B = texts, G = KV heads, S = slots, D = size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from outrider.core.draft import Budget, Draft
from outrider.core.errors import CapacityError
from outrider.core.protocols import AheadRow, CacheStore, CausalLM, DraftRow, StepRow
from outrider.core.rng import KeyedRng, Rng, pick_node, race_node
from outrider.core.sampling import MIN_TEMPERATURE
from outrider.drafters.common.growth import (
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
from outrider.kernels.native.forward import NativeForward
from outrider.kernels.native.rounds import (
    CacheSpan,
    ChainRow,
    DraftedChains,
    Draws,
    NativeChains,
    RoundModel,
)
from outrider.kernels.native.sampling import Grown, NativeTreeDrafts, PlannedTree
from outrider.kernels.native.shaping import DraftShaping
from outrider.kernels.plan import PackedPlan
from outrider.models.llama import LlamaModel


class HeadMemory(CacheStore, Protocol):
    """Keys and values of heads, which plan their passes themselves; `layers` are (k_GSD, v_GSD).
    `pages` and the methods after it serve drafts in one native call, as in PagedKV."""

    @property
    def layers(self) -> Sequence[tuple[Tensor, Tensor]]: ...
    @property
    def page_size(self) -> int: ...
    def plan(self, rows: Sequence[StepRow]) -> PackedPlan:
        """Stage the rows' tokens and say where each reads and writes. Raises CapacityError."""
        ...

    def pages(self, seq_id: int) -> Sequence[int]: ...
    def note_chain(self, seq_id: int, tokens: Sequence[int]) -> None: ...
    def note_tree(self, seq_id: int, tokens: Sequence[int], parents: Sequence[int]) -> None: ...


class FusedChains:
    """FusedDrafts of chains: one call for the pass that reads and those that draft on. The draft
    tokens that were read stay staged with `keeps_drafts`, else only the text does.

    It draws tokens only for requests that have keyed random numbers. `enter` is called just before
    the passes; if it returns False, the chains grow in Python.
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
        state = self._state
        rows = [self._chains.shaped_row(part.row, _span(state, part)) for part in parts]
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
    """A maker of one model's chains in one call, with the choices of `sampler`; in one pass of a
    model that reads a `mask` in place of tokens that are not drafted yet."""

    def __init__(
        self,
        model: RoundModel,
        sampler: DraftSampler,
        *,
        batch_size: int,
        vocab_size: int,
        mask: int = -1,
    ) -> None:
        self._sampler, self._vocab_size = sampler, vocab_size
        self._call = NativeChains(model, batch_size=batch_size, vocab_size=vocab_size, mask=mask)

    def shaped_row(self, row: DraftRow, span: CacheSpan) -> ChainRow | None:
        """Return the row of a call, with the logits processor; None if its tokens are not drawn as
        the call draws them."""
        found = self.row(row, row.rng, span)
        if row.shaper is None or found is None:
            return found
        return replace(found, shaping=DraftShaping.of(row))

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

    It draws tokens only for requests that have keyed random numbers.
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
            FusedDraft(grown_draft(one, part.row.budget), one.tokens, one.parents)
            for part, one in zip(parts, grown, strict=True)
        ]

    def _planned(self, part: TextPart) -> PlannedTree | None:
        """Return the tree's plan; None if nodes are not chosen as the call chooses them."""
        span = _span(self._state, part)
        return planned_tree(self._sampler, part.row, span, self._vocab_size)


def planned_tree(
    sampler: DraftSampler, row: DraftRow, span: CacheSpan, vocab_size: int
) -> PlannedTree | None:
    """Return the plan of a tree below `span`; None if a call does not choose its nodes so."""
    draws = keyed_draws(sampler, row, row.rng, vocab_size)
    if draws is None:
        return None
    shape = None if row.params.greedy else settled_shape(row.budget)
    return PlannedTree(span, tree_limits(row), draws, shape, DraftShaping.of(row))


def grown_draft(grown: Grown, budget: Budget) -> Draft:
    """Return the draft of a tree that a call grew."""
    if grown.probs_NV is None:
        return chosen_draft(grown.kept, budget)
    return Draft(tuple(grown.kept.tokens), tuple(grown.kept.parents), grown.probs_NV)


def fused_model_drafts(
    model: CausalLM, sampler: DraftSampler, *, batch_size: int, mask: int = -1
) -> FusedDrafts | None:
    """Return a maker of `sampler`'s trees or chains; None if `model` has no native pass. With a
    `mask` chains take one pass, and only the text stays staged."""
    own = NativeModel.of(model)
    if own is None:
        return None
    state, size = own.model.state, own.vocab_size
    if sampler.branches:
        call = NativeTreeDrafts(own.passes, batch_size=batch_size, vocab_size=size)
        return FusedTrees(call, state, sampler, vocab_size=size, enter=lambda _: own.is_same())
    chains = own.chains(sampler, batch_size=batch_size, mask=mask)
    return FusedChains(chains, state, enter=lambda _: own.is_same(), keeps_drafts=mask < 0)


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

    def chains(self, sampler: DraftSampler, *, batch_size: int, mask: int = -1) -> KeyedChains:
        size = self.vocab_size
        return KeyedChains(self.passes, sampler, batch_size=batch_size, vocab_size=size, mask=mask)

    def is_same(self) -> bool:
        """Return whether the kernels are still the same: they may be exchanged later."""
        return self.model.forward() is self.passes.forward
