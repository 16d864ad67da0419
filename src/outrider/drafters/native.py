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

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import CapacityError, ContractError
from outrider.core.protocols import CausalLM, DraftRow, StepRow
from outrider.core.rng import KeyedRng, pick_node
from outrider.core.sampling import MIN_TEMPERATURE
from outrider.drafters.growth import ChainBuilder, Growth, chosen_draft, tree_limits
from outrider.drafters.heads import NOT_DRAFTED, NetOutput
from outrider.drafters.hidden import Part, target_states
from outrider.kernels.native.forward import Entrance, ForwardParts, NativeForward
from outrider.kernels.native.rounds import CacheSpan, ChainRow, NativeChains, RoundModel
from outrider.kernels.native.trees import Grown, NativeTreeDrafts, most_fed
from outrider.kernels.registry import Kernels
from outrider.models.decoder import wanted_tokens
from outrider.models.heads import HeadMemory
from outrider.models.llama import LlamaModel


@dataclass(frozen=True, slots=True)
class HeadBuffers:
    """Memory of an entrance for so many packed tokens."""

    states_ND: Tensor
    pair_N2D: Tensor
    own_ND: Tensor

    @classmethod
    def of(cls, num_tokens: int, hidden_size: int) -> HeadBuffers:
        sizes = (hidden_size, 2 * hidden_size, hidden_size)
        return cls(*(torch.empty(num_tokens, size) for size in sizes))


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
            self.entrance.states_ND[: plan.num_tokens].copy_(hidden_ND)
            logits_MW = self.model.logits_MV[: len(wanted)]
            self.model.forward(plan, torch.tensor(wanted, dtype=torch.int32), logits_MW)
            own_ND = self.entrance.own_ND[: plan.num_tokens].clone()
            return NetOutput(self._spread(logits_MW), own_ND)

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
    *,
    max_logits: int,
    ids_W: Tensor | None = None,
) -> HeadPass | None:
    """None without native kernels. `parts` have an entrance; `ids_W` are the ids that the output
    head knows, all if None."""
    if kernels.forward is None:
        return None
    forward = kernels.forward(parts)
    if not isinstance(forward, NativeForward):
        raise ContractError("forward is no NativeForward")
    if parts.entrance is None:
        raise ContractError("there is no entrance")
    logits_MW = torch.empty(max_logits, parts.head.num_out)
    model = RoundModel(forward, logits_MW, state.page_size, ids_W)
    return HeadPass(model, parts.entrance, state, parts.embedding_VD.shape[0])


class NativeChainDrafts:
    """WholeChains of one block: one call for the pass that reads and those that draft on.

    Not for requests that shape their logits, and drawn tokens only with keyed numbers of their own.
    """

    def __init__(
        self,
        passes: HeadPass,
        fuse: Callable[[Tensor], Tensor],
        growth: Growth,
        *,
        batch_size: int,
    ) -> None:
        self._passes, self._fuse, self._growth = passes, fuse, growth
        self._call = NativeChains(passes.model, batch_size=batch_size, vocab_size=passes.vocab_size)

    def draft(self, chains: Sequence[ChainBuilder], parts: Sequence[Part]) -> bool:
        if not all(map(self._takes, chains)):
            return False
        state = self._passes.state
        told = list(zip(chains, parts, strict=True))
        state.reserve({part.row.seq_id: len(part.tokens) + c.depth - 1 for c, part in told})
        rows = [self._row(chain, part) for chain, part in told]
        if not self._call.fits(rows):
            return False
        states_ND = self._fuse(target_states(parts))
        with torch.inference_mode():
            self._passes.entrance.states_ND[: len(states_ND)].copy_(states_ND)
        made = self._call(rows)
        if made is None:
            return False
        for index, (chain, part) in enumerate(told):
            state.note_chain(part.row.seq_id, part.tokens)
            chain.tokens = list(made.drafted[index])
            if made.laws_BKV is not None and not chain.row.params.greedy:
                chain.laws_NV = made.laws_BKV[index, : chain.depth]
        return True

    def _takes(self, chain: ChainBuilder) -> bool:
        row, growth = chain.row, self._growth
        if row.shaper is not None:
            return False
        return row.params.greedy or (
            growth.draw is pick_node
            and growth.change is None
            and isinstance(row.noise, KeyedRng)
            and row.noise.choose == growth.sampling.pick
        )

    def _row(self, chain: ChainBuilder, part: Part) -> ChainRow:
        row, state = chain.row, self._passes.state
        feed = CacheSpan(state.length(row.seq_id), part.tokens, state.pages(row.seq_id))
        if row.params.greedy:
            return ChainRow(feed, chain.depth)
        if not isinstance(row.noise, KeyedRng):
            raise ContractError("noise is no KeyedNoise")
        return ChainRow(
            feed,
            chain.depth,
            temperature=max(row.params.temperature, MIN_TEMPERATURE),
            top_k=min(row.params.top_k, self._passes.vocab_size),
            top_p=row.params.top_p,
            min_p=row.params.min_p,
            seed=row.noise.seed,
            sample=row.noise.sample,
            start=row.noise.start,
        )


def whole_chains(
    passes: HeadPass | None, fuse: Callable[[Tensor], Tensor], growth: Growth, *, batch_size: int
) -> NativeChainDrafts | None:
    """Of one block, whose states `fuse` makes; None where its passes are not native."""
    if passes is None:
        return None
    return NativeChainDrafts(passes, fuse, growth, batch_size=batch_size)


class TreePass:
    """Trees below texts of one memory. `prepare` is called when it is sure that a pass is made."""

    def __init__(self, model: RoundModel, state: HeadMemory, *, batch_size: int) -> None:
        self._state = state
        self._call = NativeTreeDrafts(model, batch_size=batch_size)

    def __call__(
        self,
        rows: Sequence[DraftRow],
        unread: Sequence[Sequence[int]],
        prepare: Callable[[], None] = lambda: None,
    ) -> list[Grown] | None:
        """By row, of which memory holds all but the tokens `unread`. None, with nothing done that
        counts, if trees have to grow level by level."""
        if not all(row.params.greedy and row.shaper is None for row in rows):
            return None
        limits = [tree_limits(row) for row in rows]
        if not self._call.fits(unread, limits):
            return None
        needed = {
            row.seq_id: len(tokens) + most_fed(limit)
            for row, tokens, limit in zip(rows, unread, limits, strict=True)
        }
        try:
            self._state.reserve(needed)
        except CapacityError:
            # Levels are seldom as wide as they may be.
            return None
        prepare()
        return self._call([self._feed(*one) for one in zip(rows, unread, strict=True)], limits)

    def _feed(self, row: DraftRow, unread: Sequence[int]) -> CacheSpan:
        return CacheSpan(self._state.length(row.seq_id), unread, self._state.pages(row.seq_id))


class ModelTrees:
    """Of a draft model; what was read for them stays staged."""

    def __init__(self, model: LlamaModel, forward: NativeForward, *, batch_size: int) -> None:
        self._model, self._forward = model, forward
        room = RoundModel(forward, model.logits, model.state.page_size)
        self._pass = TreePass(room, model.state, batch_size=batch_size)

    def grow(self, rows: Sequence[DraftRow], unread: Sequence[Sequence[int]]) -> list[Grown] | None:
        """As TreePass says."""
        # Kernels may have been exchanged since.
        if self._model.forward() is not self._forward:
            return None
        grown = self._pass(rows, unread)
        for row, one in zip(rows, grown or (), strict=bool(grown)):
            self._model.state.note_tree(row.seq_id, one.tokens, one.parents)
        return grown


class HeadTrees:
    """Of one block, whose states `fuse` makes of the target's."""

    def __init__(
        self, passes: HeadPass, fuse: Callable[[Tensor], Tensor], *, batch_size: int
    ) -> None:
        self._passes, self._fuse = passes, fuse
        self._pass = TreePass(passes.model, passes.state, batch_size=batch_size)

    def draft(self, parts: Sequence[Part]) -> list[Draft] | None:
        """Stage `parts`, the end of each text, and draft below it. None as TreePass says."""

        def prepare() -> None:
            states_ND = self._fuse(target_states(parts))
            with torch.inference_mode():
                self._passes.entrance.states_ND[: len(states_ND)].copy_(states_ND)

        grown = self._pass([part.row for part in parts], [part.tokens for part in parts], prepare)
        if grown is None:
            return None
        for part in parts:
            self._passes.state.note_chain(part.row.seq_id, part.tokens)
        return [chosen_draft(one.kept) for one in grown]


def model_trees(model: CausalLM, *, batch_size: int) -> ModelTrees | None:
    """None where a pass of `model` is no native call."""
    if not isinstance(model, LlamaModel):
        return None
    forward = model.forward()
    if not isinstance(forward, NativeForward):
        return None
    return ModelTrees(model, forward, batch_size=batch_size)


def head_trees(
    passes: HeadPass | None, fuse: Callable[[Tensor], Tensor], *, batch_size: int
) -> HeadTrees | None:
    """None where a pass of the block is no native call."""
    return None if passes is None else HeadTrees(passes, fuse, batch_size=batch_size)
