"""Branches of all predicted verdicts of a batch, one draft-model pass a token for all of them.

The draft that is being verified is the trunk: the pending token and the draft, staged in the draft
model's memory. A branch hangs below the trunk's last accepted token, so it attends to the text, the
trunk up to there and itself. It is drawn with the numbers of the round that would start there, so a
cached draft is, token for token, the draft that would otherwise be made later.

Shapes:  V = vocabulary, K = nodes of a chain, B = branches of a sequence, M = rows of a pass,
         N = positions of a draft, the root first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import CapacityError, NumericsError
from outrider.core.protocols import AheadRow, CausalLM, DraftNeeds, StepRow
from outrider.core.rng import Rng
from outrider.core.sampling import empty_probs
from outrider.core.spec import DraftCapacity
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import DraftSampler, drawn_params
from outrider.drafters.common.native import NativeModel
from outrider.kernels.native.rounds import CacheSpan, ChainRow
from outrider.plugins.lanes.ahead.table import Branch

_NO_NEEDS = DraftNeeds()


@dataclass(slots=True)
class Tree:
    """The branches of one sequence. `root` is the staged node of its pending token. A tree whose
    logits are not numbers is `lost`: the draft made later will report it."""

    row: AheadRow
    root: int
    branches: Sequence[Branch]
    sampler: DraftSampler
    lost: bool = False
    _chains: list[list[int]] = field(default_factory=list[list[int]])
    _tips: list[int] = field(default_factory=list[int])
    _rngs: list[Rng] = field(default_factory=list[Rng])
    _probs_KBV: Tensor | None = None

    def __post_init__(self) -> None:
        self._chains = [[] for _ in self.branches]
        self._tips = [self.root + branch.accepted for branch in self.branches]
        self._rngs = [self.row.rng_after(branch.accepted + 1) for branch in self.branches]

    @property
    def complete(self) -> bool:
        return self.lost or not self.branches or len(self._chains[0]) >= self.row.budget.depth

    def feed(self, first: int) -> StepRow:
        """Return the newest token of each branch; they become nodes `first` and on."""
        tokens = [
            chain[-1] if chain else branch.token
            for chain, branch in zip(self._chains, self.branches, strict=True)
        ]
        step = StepRow(self.row.seq_id, tuple(tokens), tuple(self._tips))
        self._tips = list(range(first, first + len(tokens)))
        return step

    def grow(self, logits_BV: Tensor, best: Sequence[int]) -> None:
        """Add one token to each branch, by the logits after the last ones and their maxima."""
        if -1 in best:
            self.lost = True
            return
        tokens = best if self.row.params.greedy else self._drawn(logits_BV)
        for chain, token in zip(self._chains, tokens, strict=True):
            chain.append(token)

    def take(self, drafted: Sequence[Sequence[int]], probs_BKV: Tensor | None) -> None:
        """Take branches that were grown in one call, and the distributions of sampled ones."""
        self._chains = [list(chain) for chain in drafted]
        if probs_BKV is not None and not self.row.params.greedy:
            self._probs_KBV = probs_BKV[:, : self.row.budget.depth].transpose(0, 1)

    def drafts(self) -> dict[tuple[int, int], Draft]:
        """Return drafts by (accepted, token). Their probs are views of one tensor."""
        if self.lost:
            return {}
        found: dict[tuple[int, int], Draft] = {}
        for index, (branch, chain) in enumerate(zip(self.branches, self._chains, strict=True)):
            probs_KV = None if self._probs_KBV is None else self._probs_KBV[:, index]
            found[branch.accepted, branch.token] = Draft.chain(chain, probs_KV)
        return found

    def _drawn(self, logits_BV: Tensor) -> list[int]:
        node, depth = len(self._chains[0]), self.row.budget.depth
        if self._probs_KBV is None:
            empty = empty_probs(depth * len(self.branches), logits_BV)
            self._probs_KBV = empty.view(depth, len(self.branches), -1)
        out_BV = self._probs_KBV[node]
        probs_BV = self.sampler.probs(logits_BV, drawn_params(self.row), node, out_BV)
        draw = self.sampler.draw_for(self.row.params)
        try:
            return [
                draw(probs_V, rng, node, node)
                for probs_V, rng in zip(probs_BV, self._rngs, strict=True)
            ]
        except NumericsError:
            self.lost = True
            return [0] * len(self.branches)


class FusedBranches:
    """A maker of all branches in one call. Branches are chains that see the trunk up to their fork,
    and lie behind all staged nodes, in slots of their own. None of them stays staged."""

    def __init__(self, own: NativeModel, sampler: DraftSampler, *, num_branches: int) -> None:
        self._own, self._chains = own, own.chains(sampler, batch_size=num_branches)

    @classmethod
    def of(
        cls, model: CausalLM, sampler: DraftSampler, *, num_branches: int
    ) -> FusedBranches | None:
        """Return a maker for so many branches in all; None if `model` has no native pass."""
        own = NativeModel.of(model)
        return None if own is None else cls(own, sampler, num_branches=num_branches)

    def try_trees(self, trees: Sequence[Tree]) -> bool:
        """Grow `trees` to their ends, in reserved slots; return False, with nothing done, if that
        takes a pass a token."""
        rows = [row for tree in trees for row in self._rows(tree)]
        made = self._chains.draft(rows, self._own.is_same)
        if made is None:
            return False
        start = 0
        for tree in trees:
            end = start + len(tree.branches)
            probs_BKV = None if made.probs_BKV is None else made.probs_BKV[start:end]
            tree.take(made.drafted[start:end], probs_BKV)
            start = end
        return True

    def _rows(self, tree: Tree) -> list[ChainRow | None]:
        row, state = tree.row, self._own.model.state
        length, pages = state.length(row.seq_id), state.pages(row.seq_id)
        first = length + state.num_staged(row.seq_id)
        return [
            self._chains.row(
                row,
                row.rng_after(branch.accepted + 1),
                CacheSpan(length + tree.root + branch.accepted + 1, (branch.token,), pages),
                branch_slot=first + index * row.budget.depth,
            )
            for index, branch in enumerate(tree.branches)
        ]


def grow_all(model: CausalLM, trees: Sequence[Tree], fused: FusedBranches | None = None) -> int:
    """Grow every tree to its end; return the number of nodes that were fed."""
    num_nodes = 0
    live = [tree for tree in trees if not tree.complete]
    if live and fused is not None and fused.try_trees(live):
        return sum(len(tree.branches) * tree.row.budget.depth for tree in live)
    while live:
        feeds = [tree.feed(model.state.num_staged(tree.row.seq_id)) for tree in live]
        logits_MV = model.step(feeds, _NO_NEEDS).logits_MV
        best = live[0].sampler.argmax(logits_MV)
        start = 0
        for tree, feed in zip(live, feeds, strict=True):
            end = start + len(feed.tokens)
            tree.grow(logits_MV[start:end], best[start:end])
            start = end
        num_nodes += start
        live = [tree for tree in live if not tree.complete]
    return num_nodes


@dataclass(frozen=True, slots=True)
class DraftPrefix:
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


class DraftPrefixes:
    """A reader of trunks with the model of `jit`, which keeps its memory.

    One pass of the draft model reads the trunks of a whole batch. Their rows stay staged, so that
    branches can hang from them, and their logits say what may follow each token. Memory for all
    branches is reserved before anything is fed; a sequence whose branches do not fit is left out.
    """

    def __init__(self, jit: ModelDrafter, capacity: DraftCapacity) -> None:
        self._model, self._jit, self._capacity = jit.model, jit, capacity

    def read(
        self, rows: Sequence[AheadRow], texts: Mapping[int, Sequence[int]], fan_out: int
    ) -> list[DraftPrefix]:
        """Read trunks; `texts` end with the pending tokens. Each trunk gets memory for `fan_out`
        branches or fewer; trunks without memory are left out."""
        steps = [(row, step) for row in rows if (step := self._step(row, texts[row.seq_id]))]
        feeds = self._with_memory(self._with_rows(steps), fan_out)
        if not feeds:
            return []
        logits_MV = self._model.step([feed.step for feed in feeds], _NO_NEEDS).logits_MV
        trunks: list[DraftPrefix] = []
        start = 0
        for feed in feeds:
            step, end = feed.step, start + feed.step.num_logits
            self._jit.note(step.seq_id, step.tokens)
            logits_NV = logits_MV[start:end]
            trunks.append(DraftPrefix(feed.row, step.logits_from, feed.num_branches, logits_NV))
            start = end
        return trunks

    def _step(self, row: AheadRow, text: Sequence[int]) -> StepRow | None:
        """Return the unread text and draft; reads all but the end of the text."""
        try:
            rest = self._jit.begin(row.seq_id, text)
        except CapacityError:
            return None
        tokens = [*rest, *row.draft.tokens]
        return StepRow.chain(row.seq_id, tokens, logits_from=len(rest) - 1)

    def _with_rows(
        self, steps: Sequence[tuple[AheadRow, StepRow]]
    ) -> list[tuple[AheadRow, StepRow]]:
        """Return as many of them, from the first, as fit into one pass."""
        kept: list[tuple[AheadRow, StepRow]] = []
        num_rows, num_logits = 0, 0
        for row, step in steps:
            num_rows += len(step.tokens)
            num_logits += step.num_logits
            if num_rows > self._capacity.num_rows or num_logits > self._capacity.num_logits:
                break
            kept.append((row, step))
        return kept

    def _with_memory(self, steps: Sequence[tuple[AheadRow, StepRow]], fan_out: int) -> list[_Feed]:
        """Return each with as many branches as there are rows and free memory for."""
        if not steps:
            return []
        most = min(fan_out, min(self._capacity.num_rows, self._capacity.num_logits) // len(steps))
        held: dict[int, int] = {}
        feeds: list[_Feed] = []
        for row, step in steps:
            count = most
            while count and not self._try_hold(held, step, count * row.budget.depth):
                count //= 2
            if count:
                feeds.append(_Feed(row, step, count))
        return feeds

    def _try_hold(self, held: dict[int, int], step: StepRow, num_nodes: int) -> bool:
        wanted = len(step.tokens) + num_nodes
        try:
            self._model.state.reserve({**held, step.seq_id: wanted})
        except CapacityError:
            return False
        held[step.seq_id] = wanted
        return True
