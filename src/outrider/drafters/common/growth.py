"""Draft chains and trees that grow from a model's distributions, a token or a level a pass.

`DraftSampler` says how a drafter chooses tokens, and its `builder` grows the drafts of a batch. A
greedy tree keeps the worthiest of all nodes that it has considered (core/tree.py): each level feeds
only nodes whose children may still be among them. At temperature > 0 the shape of a tree is fixed
before its first token is drawn, and siblings are drawn without replacement.

Shapes:  V = vocabulary, M = logits rows of a pass, N = nodes of a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.core.draft import Budget, Draft
from outrider.core.errors import NumericsError, blaming, given
from outrider.core.params import SamplingParams
from outrider.core.protocols import (
    AheadRow,
    CacheStore,
    CausalLM,
    DraftNeeds,
    DraftRow,
    StepOutput,
    StepRow,
)
from outrider.core.rng import DrawNode, Rng, draw_for, pick_node
from outrider.core.sampling import (
    PLAIN,
    KeptNodes,
    Leftover,
    Level,
    Sampling,
    TreeLimits,
    empty_probs,
    processed_probs,
)
from outrider.core.spec import ModelSpec
from outrider.core.tree import MAX_WIDTH, ROOT, Shape, best_shape, guessed_chances
from outrider.estimate.cost import LEAST_WORTH, num_worthwhile


class SampledNodes:
    """The nodes of a tree of the given shape, drawn one by one, siblings without replacement.

    A node whose distribution has no token left is not drawn, nor is anything below it. That depends
    on the distributions alone and on earlier siblings, so the accepted tokens follow the target's
    distribution.
    """

    def __init__(
        self,
        shape: Shape,
        rng: Rng,
        draw: DrawNode = pick_node,
        leftover: Leftover = PLAIN.leftover,
    ) -> None:
        self.shape, self._rng, self._draw, self._leftover = shape, rng, draw, leftover
        self._depths = shape.depths
        # The newest child of each node that has any.
        self._newest: dict[int, int] = {}
        # The draft node of each node of the shape, None if it could not be drawn.
        self.drawn: list[int | None] = []
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._probs: list[Tensor] = []

    def grow(self, probs_V: Tensor | None) -> None:
        """Draw the shape's next node from its parent's distribution; None: not drawn."""
        index = len(self.drawn)
        parent = self._parent(index)
        left_V = None
        if probs_V is not None and parent is not None:
            left_V = self._left(probs_V, parent)
        if left_V is None or parent is None:
            self.drawn.append(None)
            return
        node = len(self.tokens)
        self.tokens.append(self._draw(left_V, self._rng, node, self._depths[index]))
        self.parents.append(parent)
        self._probs.append(left_V)
        self.drawn.append(node)
        self._newest[parent] = node

    def draft(self) -> Draft:
        if not self.tokens:
            return Draft.empty()
        return Draft(tuple(self.tokens), tuple(self.parents), torch.stack(self._probs))

    def _parent(self, index: int) -> int | None:
        parent = self.shape.parents[index]
        return ROOT if parent == ROOT else self.drawn[parent]

    def _left(self, probs_V: Tensor, parent: int) -> Tensor | None:
        """Return the distribution of the next child of `parent`: all of `probs_V`, or the rest
        after the newest child."""
        newest = self._newest.get(parent)
        if newest is None:
            return probs_V
        return without(self._probs[newest], self.tokens[newest], self._leftover)


def without(probs_V: Tensor, token: int, leftover: Leftover = PLAIN.leftover) -> Tensor | None:
    """Return `probs_V` given that `token` was not drawn; None if that is all it has."""
    left_V, total = leftover(probs_V, token)
    return (left_V / total).to(probs_V.dtype) if total > 0 else None


def chosen_tree(shape: Shape, candidates: Sequence[Sequence[int]]) -> Draft:
    """Return a greedy tree of `candidates[depth][rank]`, whatever the path."""
    tokens = [candidates[d][rank] for d, rank in zip(shape.depths, shape.ranks, strict=True)]
    return Draft(tuple(tokens), shape.parents)


def tree_limits(row: DraftRow) -> TreeLimits:
    """Return the limits of a greedy tree for `row`. A node that is not worth a row of the target's
    pass is not worth one of the draft's either: its children are worth less still."""
    budget = row.budget
    least = max(budget.price or 0.0, LEAST_WORTH)
    return TreeLimits(budget.size, budget.depth, MAX_WIDTH, least)


def chosen_draft(kept: KeptNodes, budget: Budget) -> Draft:
    """Return the nodes of a greedy tree that are worth a row."""
    count = num_worthwhile(kept.worths, budget.price)
    return Draft(tuple(kept.tokens[:count]), tuple(kept.parents[:count]))


def settled_shape(budget: Budget) -> Shape:
    """Return the shape of a drawn tree, level by level; by guessed probabilities, since the
    accuracy of candidates was never counted."""
    best = _best(budget.depth, budget.size)
    return _settled(budget.depth, budget.size, num_worthwhile(best.worths, budget.price))


@lru_cache(maxsize=128)
def _best(depth: int, size: int) -> Shape:
    return best_shape(guessed_chances(depth), size)


@lru_cache(maxsize=512)
def _settled(depth: int, size: int, count: int) -> Shape:
    """Return the best tree's first `count` nodes: prices change all the time, counts are few."""
    return _best(depth, size).first(count).narrowed(MAX_WIDTH).by_depth()


# The logit of an id that heads do not know: no mass next to any known id. It is a number, since a
# mask may leave only such ids, and their distribution must be valid.
NOT_DRAFTED = -1e10
# The highest temperature of a request.
MAX_TEMPERATURE = 100.0
# (probs_NV, node): change the distributions of a chain's node `node` in place; the result is drawn
# from and reported.
ChangeProbs: TypeAlias = Callable[[Tensor, int], None]


@dataclass(frozen=True, slots=True)
class DraftSampler:
    """A drafter's choice of tokens: `argmax` for greedy decoding, else `draw` from a distribution
    that `sampling` makes and `change`, if given, changes. `model_name` names the model in errors
    about logits that are not numbers. With `branches` drafts are trees."""

    argmax: Callable[[Tensor], list[int]]
    model_name: str
    draw: DrawNode = pick_node
    sampling: Sampling = PLAIN
    change: ChangeProbs | None = None
    branches: bool = False

    def draw_for(self, params: SamplingParams) -> DrawNode:
        """Return the draw of a request's drafts: that of its own rule, if it chose one."""
        return self.draw if params.sampler is None else draw_for(params.sampler)

    def best(self, logits_MV: Tensor) -> list[int]:
        """Return the first maximum of each row. Raises NumericsError if logits are no numbers."""
        best = self.argmax(logits_MV)
        if -1 in best:
            raise NumericsError(self.model_name)
        return best

    def probs(
        self, logits_NV: Tensor, params: SamplingParams, node: int, out_NV: Tensor | None = None
    ) -> Tensor:
        """Return the distributions of node `node` of each of N chains; in `out_NV`, if given."""
        probs_NV = processed_probs(logits_NV, params, self.sampling, out_NV)
        if self.change is not None:
            self.change(probs_NV, node)
        return probs_NV

    def builder(self, rows: Sequence[DraftRow], roots: Sequence[int]) -> DraftBuilder:
        """Return a builder of drafts of `rows`, each of at least one token. `roots` are the nodes
        of the model's memory that hold the pending tokens."""
        made = TreeBuilder if self.branches else ChainBuilder
        return made(self, rows, roots)


@dataclass(frozen=True, slots=True)
class TextPart:
    """Tokens of a text from `start` on, read in one pass after the committed ones."""

    row: DraftRow
    start: int
    tokens: Sequence[int]

    @classmethod
    def end(cls, row: DraftRow, tokens: Sequence[int]) -> TextPart:
        """Return the last tokens of the row's text."""
        return cls(row, len(row.tokens) - len(tokens), tokens)

    @property
    def step(self) -> StepRow:
        """The tokens as a row of a pass, with logits after the pending token."""
        tokens = self.tokens
        is_last = self.start + len(tokens) == len(self.row.tokens)
        return StepRow.chain(self.row.seq_id, tokens, logits_from=len(tokens) - is_last)


@dataclass(frozen=True, slots=True)
class FusedDraft:
    """A draft, and the retained tokens that the model has read for it, text first."""

    draft: Draft
    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()


class FusedDrafts(Protocol):
    """A maker of a batch's drafts in one call, with nothing between their tokens."""

    def try_rows(self, parts: Sequence[TextPart]) -> Sequence[FusedDraft] | None:
        """Stage `parts`, the end of each text, and draft below them. None, with nothing retained,
        if that takes a pass for each token or level."""
        ...


class DraftBuilder(Protocol):
    """A builder of the drafts of a batch while they grow."""

    @property
    def above(self) -> Sequence[int]:
        """The logits row of the parent of each token to read next."""
        ...

    def grow(self, logits_MV: Tensor) -> list[StepRow]:
        """Grow the drafts by the logits after the pending tokens, and later by those after the
        tokens that were read. Return the next tokens to read, none when all drafts are done. The
        logits may be overwritten. Raises NumericsError for logits that are not numbers."""
        ...

    def drafts(self) -> list[Draft]: ...


@dataclass(slots=True)
class _Chain:
    """A chain that grows; its probs are made where they are reported."""

    row: DraftRow
    root: int
    params: SamplingParams
    tokens: list[int] = field(default_factory=list[int])
    probs_NV: Tensor | None = None


class ChainBuilder:
    """A DraftBuilder of chains: one argmax for the whole batch. The last token of a chain is never
    read, since nothing is drafted after it."""

    def __init__(
        self, sampler: DraftSampler, rows: Sequence[DraftRow], roots: Sequence[int]
    ) -> None:
        self._sampler = sampler
        self._chains = [
            _Chain(row, root, drawn_params(row)) for row, root in zip(rows, roots, strict=True)
        ]
        self._growing: Sequence[_Chain] = self._chains
        self.above: list[int] = []

    def grow(self, logits_MV: Tensor) -> list[StepRow]:
        for index, chain in enumerate(self._growing):
            if chain.row.shaper is not None:
                _process(chain.row, logits_MV[index : index + 1], [chain.tokens])
        best = self._sampler.best(logits_MV)
        growing: list[_Chain] = []
        steps: list[StepRow] = []
        self.above = []
        for index, chain in enumerate(self._growing):
            row, tokens = chain.row, chain.tokens
            parent = chain.root + len(tokens)
            token = best[index] if row.params.greedy else self._drawn(chain, logits_MV[index])
            tokens.append(token)
            if len(tokens) < row.budget.depth:
                growing.append(chain)
                steps.append(StepRow(row.seq_id, (token,), (parent,)))
                self.above.append(index)
        self._growing = growing
        return steps

    def drafts(self) -> list[Draft]:
        return [Draft.chain(chain.tokens, chain.probs_NV) for chain in self._chains]

    def _drawn(self, chain: _Chain, logits_V: Tensor) -> int:
        if chain.probs_NV is None:
            chain.probs_NV = empty_probs(chain.row.budget.depth, logits_V)
        node = len(chain.tokens)
        out_1V = chain.probs_NV[node : node + 1]
        probs_V = self._sampler.probs(logits_V[None], chain.params, node, out_1V)[0]
        return self._sampler.draw_for(chain.params)(probs_V, chain.row.rng, node, node)


def drawn_params(row: DraftRow | AheadRow) -> SamplingParams:
    """Return the parameters with the drafts' temperature. Greedy drafts are not drawn."""
    if row.budget.temperature == 1 or row.params.greedy:
        return row.params
    temperature = row.params.temperature * row.budget.temperature
    return replace(row.params, temperature=min(temperature, MAX_TEMPERATURE))


def limited(row: DraftRow, depth: int) -> DraftRow:
    """Return the row with a budget of this depth."""
    if depth == row.budget.depth:
        return row
    return replace(row, budget=replace(row.budget, depth=depth))


def draft_some(
    rows: Sequence[DraftRow],
    depths: Sequence[int],
    draft: Callable[[Sequence[DraftRow]], Sequence[Draft]],
) -> list[Draft]:
    """Return the drafts of `draft` for the rows with a depth above 0, each to its depth; the others
    get empty drafts."""
    asked = [limited(row, depth) for row, depth in zip(rows, depths, strict=True) if depth]
    drafts = iter(draft(asked) if asked else ())
    return [next(drafts) if depth else Draft.empty() for depth in depths]


def _process(row: DraftRow, logits_MV: Tensor, paths: Sequence[Sequence[int]]) -> None:
    """Process logits in place as the target's will be, each after these drafted tokens."""
    if row.shaper is not None:
        with blaming(row.seq_id), torch.inference_mode():
            row.shaper.shape_in_place(logits_MV, row.tokens, paths)


class TreeBuilder:
    """A DraftBuilder of trees: one pass a level for the whole batch."""

    def __init__(
        self, sampler: DraftSampler, rows: Sequence[DraftRow], roots: Sequence[int]
    ) -> None:
        self._trees = [_tree(sampler, row) for row in rows]
        # Each with the node of the model's memory at which the tree's newest level begins.
        self._growing = list(zip(self._trees, roots, strict=True))
        self.above: list[int] = []

    def grow(self, logits_MV: Tensor) -> list[StepRow]:
        growing: list[tuple[GreedyTree | SampledTree, int]] = []
        steps: list[StepRow] = []
        self.above = []
        start = 0
        for tree, first in self._growing:
            end = start + max(len(tree.level.tokens), 1)
            tree.grow(logits_MV[start:end])
            level = tree.level
            if level.tokens:
                growing.append((tree, first + end - start))
                parents = tuple(first + position for position in level.above)
                steps.append(StepRow(tree.row.seq_id, tuple(level.tokens), parents))
                self.above += [start + position for position in level.above]
            start = end
        self._growing = growing
        return steps

    def drafts(self) -> list[Draft]:
        return [tree.draft() for tree in self._trees]


def _tree(sampler: DraftSampler, row: DraftRow) -> GreedyTree | SampledTree:
    return GreedyTree(sampler, row) if row.params.greedy else SampledTree(sampler, row)


class GreedyTree:
    """The model's likeliest paths. It gets the logits after the root, and then, as long as there is
    a next level, those after the nodes of `level`."""

    def __init__(self, sampler: DraftSampler, row: DraftRow) -> None:
        self.row, self._model_name = row, sampler.model_name
        self._nodes = sampler.sampling.nodes(tree_limits(row))
        self._paths = _Paths(row)

    @property
    def level(self) -> Level:
        """The nodes to read next; none when the tree is done."""
        return self._nodes.level

    def grow(self, logits_MV: Tensor) -> None:
        """Grow by the logits after the nodes that were read."""
        self._paths.process(self.level, logits_MV)
        if not self._nodes.grow(logits_MV):
            raise NumericsError(self._model_name)

    def draft(self) -> Draft:
        return chosen_draft(self._nodes.kept(), self.row.budget)


class SampledTree:
    """A tree drawn from the model's distributions in a shape that was fixed before."""

    def __init__(self, sampler: DraftSampler, row: DraftRow) -> None:
        self.row, self.level = row, Level()
        self._params, self._sampler = drawn_params(row), sampler
        self._shape = settled_shape(row.budget)
        draw, leftover = sampler.draw_for(row.params), sampler.sampling.leftover
        self._nodes = SampledNodes(self._shape, row.rng, draw, leftover)
        self._has_children = set(self._shape.parents)
        self._reading: Sequence[int] = (ROOT,)
        self._paths = _Paths(row)

    def grow(self, logits_MV: Tensor) -> None:
        self._paths.process(self.level, logits_MV)
        probs_MV = processed_probs(logits_MV, self._params, self._sampler.sampling)
        probs = dict(zip(self._reading, probs_MV, strict=True))
        nodes, parents = self._nodes, self._shape.parents
        level: list[int] = []
        while (index := len(nodes.drawn)) < len(parents):
            above = parents[index]
            parent = ROOT if above == ROOT else nodes.drawn[above]
            if parent is not None and parent not in probs:
                break
            nodes.grow(None if parent is None else probs[parent])
            node = nodes.drawn[index]
            if node is not None and index in self._has_children:
                level.append(node)
        positions = {node: position for position, node in enumerate(self._reading)}
        self._reading = level
        self.level = Level(
            [nodes.tokens[node] for node in level],
            [positions[nodes.parents[node]] for node in level],
        )

    def draft(self) -> Draft:
        return self._nodes.draft()


class _Paths:
    """A processor of logits as the target's will be, after the path of each node of a level."""

    def __init__(self, row: DraftRow) -> None:
        self._row = row
        self._paths: list[list[int]] = [[]]

    def process(self, level: Level, logits_MV: Tensor) -> None:
        """Process `logits_MV` in place: those after `level`, or after the root at first."""
        if self._row.shaper is None:
            return
        if level.tokens:
            above = (self._paths[position] for position in level.above)
            self._paths = [[*path, t] for path, t in zip(above, level.tokens, strict=True)]
        _process(self._row, logits_MV, self._paths)


class CommonIds:
    """A CausalLM: `model` over the `vocab_size` ids of the target, of which the first `num_common`
    may be drafted.

    Embedding tables of one family are padded to different sizes (Qwen2.5: 152,064 rows of 7B,
    151,936 of 0.5B), though they share one tokenizer, which has fewer ids. Ids below `num_common`
    have a token and a row in both; others have probability 0 in every distribution. For an id that
    the target samples from its own padding, the draft model reads its own last row.
    """

    def __init__(self, model: CausalLM, *, vocab_size: int, num_common: int) -> None:
        self.model = model
        self.ids_V = torch.arange(num_common)
        self._spec = replace(model.spec, vocab_size=vocab_size)

    @classmethod
    def over(cls, model: CausalLM, *, vocab_size: int, num_common: int) -> CausalLM:
        """Return the draft model over the target's ids: `model` itself if it has as many. With
        `num_common` 0 all ids that both have may be drafted."""
        size = model.spec.vocab_size
        if size == vocab_size:
            return model
        return cls(model, vocab_size=vocab_size, num_common=num_common or min(size, vocab_size))

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def state(self) -> CacheStore:
        return self.model.state

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        out = self.model.step([self._readable(row) for row in rows], needs)
        num_rows, num_common = len(out.logits_MV), len(self.ids_V)
        logits_MV = out.logits_MV.new_full((num_rows, self._spec.vocab_size), NOT_DRAFTED)
        logits_MV[:, :num_common] = out.logits_MV[:, :num_common]
        return replace(out, logits_MV=logits_MV)

    def _readable(self, row: StepRow) -> StepRow:
        last = self.model.spec.vocab_size - 1
        if max(row.tokens, default=0) <= last:
            return row
        return replace(row, tokens=tuple(min(token, last) for token in row.tokens))


def last_state(row: DraftRow) -> Tensor:
    end = len(row.tokens) - 1
    return given(row.hidden, "hidden state").read(end - 1, end)[0, 0]


class DraftPath(Protocol):
    """Logits after the tokens of drafts that grow, for a batch of texts."""

    def first(self) -> Tensor:
        """Logits after the pending tokens, a row for each text; the caller may overwrite them."""
        ...

    def next(self, above: Sequence[int], tokens: Sequence[int], depth: int) -> Tensor:
        """Logits after `tokens`, of depth `depth` from 1 on; `above` has for each the row of the
        last call's logits that it was drafted from."""
        ...


def grown(sampler: DraftSampler, rows: Sequence[DraftRow], path: DraftPath) -> list[Draft]:
    """Return chains or trees of `rows`, each of at least one token, along `path`."""
    builder = sampler.builder(rows, [0] * len(rows))
    logits_MV = path.first()
    for depth in count(1):
        steps = builder.grow(logits_MV)
        if not steps:
            break
        tokens = [token for step in steps for token in step.tokens]
        logits_MV = path.next(builder.above, tokens, depth)
    return builder.drafts()
