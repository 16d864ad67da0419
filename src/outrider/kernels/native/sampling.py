"""Native sampling (csrc/sampling.cpp, csrc/filters.cpp) and draft trees (csrc/trees.cpp).

Operators of sampling take contiguous float32 on the CPU, which native kernels produce. Other
tensors, such as the float64 distributions of some drafters, go to the definitions in
core/sampling.py. `NativeTrees` chooses the nodes of a greedy level; other logits are copied, and
trees beyond the limits of its memory go to the definitions too. `NativeTreeDrafts` grows the whole
trees of a batch, greedy or sampled (csrc/tree_drafts.cpp); the caller has written the states that
heads read first to the entrance's `states_ND`.

Shapes:  N = nodes of a tree, M = nodes of a level, V = vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_double, c_float, c_int32, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.errors import ContractError, NumericsError
from outrider.core.sampling import (
    PLAIN,
    SHARPNESS,
    ChosenNodes,
    KeptNodes,
    Level,
    NodeChoice,
    Ranked,
    Sampling,
    TreeLimits,
    rank,
)
from outrider.core.tree import ROOT, Shape
from outrider.kernels.native.ops import function, struct_fields
from outrider.kernels.native.rounds import (
    MOST_NODES,
    CacheSpan,
    Draws,
    Lane,
    RoundModel,
    Row,
    describe_draws,
)
from outrider.kernels.native.shaping import DraftShaping, Shapings

# As in csrc/trees.h.
MOST_WIDTH = 16


class TreeStruct(Structure):
    """The struct of a tree in csrc/trees.h."""

    _fields_ = struct_fields(
        (c_int32, "num_nodes most_depth width"),
        (c_float, "sharpness"),
        (c_int32, "num_kept depth num_level unused"),
        (c_double, "least_read"),
        (c_double * MOST_NODES, "worths"),
        (c_int32 * MOST_NODES, "tokens parents"),
        (c_int32 * MOST_WIDTH, "level above"),
    )


def new_tree(limits: TreeLimits) -> TreeStruct:
    """A tree with only the root, which is read next."""
    tree = TreeStruct(limits.num_nodes, limits.depth, limits.width, SHARPNESS)
    tree.num_level, tree.level[0], tree.least_read = 1, ROOT, limits.least_read
    return tree


def kept_nodes(tree: TreeStruct) -> KeptNodes:
    count: int = tree.num_kept
    return KeptNodes(tree.tokens[:count], tree.parents[:count], tree.worths[:count])


def fits(limits: TreeLimits) -> bool:
    return limits.num_nodes <= MOST_NODES and limits.width <= MOST_WIDTH


class NativeTrees:
    """The operators of `library` on the team at this address (`kernels/native/ops.py`)."""

    def __init__(self, library: ctypes.CDLL, team: int) -> None:
        self._team = team
        self._grow, self._rank = function(library, "grow_tree"), function(library, "rank")

    def nodes(self, limits: TreeLimits) -> NodeChoice:
        """A NodeChoice for `limits`, as `MakeNodes` defines it."""
        return _NativeNodes(self, limits) if fits(limits) else ChosenNodes(limits, self.rank)

    def grow(self, tree: TreeStruct, logits_MV: Tensor) -> bool:
        if len(logits_MV) != tree.num_level:
            raise ContractError("there is a row of logits for each node of the level")
        address, size = logits_MV.data_ptr(), logits_MV.shape[1]
        return bool(self._grow(self._team, ctypes.addressof(tree), address, size))

    def rank(self, logits_MV: Tensor, num_ranks: int, sharpness: float) -> Ranked | None:
        """Rank tokens as `rank` of core does; token 0 stands for ranks without any probability."""
        num_rows, size = logits_MV.shape
        if not is_plain(logits_MV) or max(num_rows, num_ranks) > MOST_WIDTH:
            return rank(logits_MV, num_ranks, sharpness)
        tokens = ((c_int32 * num_ranks) * num_rows)()
        shares = ((c_float * num_ranks) * num_rows)()
        outputs = ctypes.addressof(tokens), ctypes.addressof(shares)
        address = logits_MV.data_ptr()
        if not self._rank(self._team, address, num_rows, size, num_ranks, sharpness, *outputs):
            return None
        return Ranked([row[:] for row in tokens], [row[:] for row in shares])


class _NativeNodes:
    """A NodeChoice whose tree grows by native calls."""

    def __init__(self, ops: NativeTrees, limits: TreeLimits) -> None:
        self._ops, self._tree = ops, new_tree(limits)
        self.level = Level()

    def grow(self, logits_MV: Tensor) -> bool:
        if not is_plain(logits_MV):
            logits_MV = logits_MV.to("cpu", torch.float32).contiguous()
        if not self._ops.grow(self._tree, logits_MV):
            return False
        count: int = self._tree.num_level
        self.level = Level(self._read_next(count), self._tree.above[:count])
        return True

    def kept(self) -> KeptNodes:
        return kept_nodes(self._tree)

    def _read_next(self, count: int) -> list[int]:
        tokens = self._tree.tokens
        return [tokens[node] for node in self._tree.level[:count]]


def is_plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


class Drawing(Structure):
    """The struct of the same name in csrc/tree_drafts.cpp."""

    _fields_ = struct_fields(
        (c_void_p, "row shape"), (c_int32, "num_places num_done"), (c_int32 * MOST_NODES, "nodes")
    )


class TreeRow(Structure):
    """The struct of the same name in csrc/tree_drafts.cpp."""

    _fields_ = struct_fields(
        (c_void_p, "tree drawing shaping tokens parents"),
        (c_int32, "length num_unread num_staged unused"),
    )


class TreeDrafts(Structure):
    """The struct of the same name in csrc/tree_drafts.cpp."""

    _fields_ = struct_fields(
        (c_void_p, "team memory rows unread"), (c_int32, "num_rows vocab_size")
    )


@dataclass(frozen=True, slots=True)
class PlannedTree:
    """One sequence: the span that the model reads, and the limits of its tree. A sampled tree has a
    `shape`, level by level and within the limits; a greedy tree has none."""

    feed: CacheSpan
    limits: TreeLimits
    draws: Draws
    shape: Shape | None = None
    shaping: DraftShaping | None = None

    @property
    def widest_level(self) -> int:
        """The largest number of nodes of one level that the model may read."""
        return min(self.limits.width, self.limits.num_nodes)

    @property
    def most_fed(self) -> int:
        """The largest number of nodes that the model may read: none of the last level."""
        if self.shape is not None:
            return len({*self.shape.parents} - {ROOT})
        return (self.limits.depth - 1) * self.widest_level


@dataclass(frozen=True, slots=True)
class Grown:
    """A tree, and the tokens that the model has read for it since the last commit: first the text,
    then the levels. `parents` are indices among these tokens, or ROOT. `probs_NV` are the
    distributions of sampled nodes, in the order of nodes; sampled nodes have no worths."""

    kept: KeptNodes
    tokens: Sequence[int]
    parents: Sequence[int]
    probs_NV: Tensor | None = None


class NativeTreeDrafts:
    """Drafts trees of up to `batch_size` rows. Not thread-safe: every call reuses the buffers."""

    def __init__(self, model: RoundModel, *, batch_size: int, vocab_size: int) -> None:
        self._lane, self._vocab_size = Lane(model, batch_size), vocab_size
        self._rows, self._drawn = (TreeRow * batch_size)(), (Row * batch_size)()
        self._shapings = Shapings(vocab_size)
        self._most_rows = min(model.logits_MV.shape[0], model.forward.max_tokens)
        self._drafts = TreeDrafts(
            model.forward.team,
            self._lane.address,
            ctypes.addressof(self._rows),
            ctypes.addressof(self._lane.unread),
            vocab_size=vocab_size,
        )
        self._address = ctypes.addressof(self._drafts)
        self._run = function(model.forward.library, "tree_drafts")

    def fits(self, trees: Sequence[PlannedTree]) -> bool:
        """True if the buffers are large enough for the unread texts and for the widest levels."""
        return (
            len(trees) <= len(self._rows)
            and sum(tree.widest_level for tree in trees) <= self._most_rows
            and sum(len(tree.feed.unread) for tree in trees) <= len(self._lane.unread)
            and all(fits(tree.limits) for tree in trees)
        )

    def __call__(self, trees: Sequence[PlannedTree]) -> list[Grown] | None:
        """Draft all trees. None for NaN or an unknown token; then nothing in the cache is valid.
        Raises SequenceError for a mask that fails."""
        buffers = [self._buffers(index, tree) for index, tree in enumerate(trees)]
        at = 0
        for index, tree in enumerate(trees):
            at = self._lane.read(index, tree.feed, at)
        self._drafts.num_rows = len(trees)
        if not self._run(self._address):
            self._shapings.check()
            return None
        return [
            buffer.grown(row.num_staged) for buffer, row in zip(buffers, self._rows, strict=False)
        ]

    def _buffers(self, index: int, tree: PlannedTree) -> TreeBuffers:
        """Buffers for `tree`, to which the row `index` then points."""
        buffer, row = TreeBuffers(tree, self._vocab_size), self._rows[index]
        buffer.describe(row, self._drawn[index])
        row.shaping = self._shapings.of(index, tree.shaping)
        row.length, row.num_unread = tree.feed.length, len(tree.feed.unread)
        return buffer


class TreeBuffers:
    """Buffers of one tree that a call grows."""

    def __init__(self, planned: PlannedTree, vocab_size: int) -> None:
        count = len(planned.feed.unread) + planned.most_fed
        self.tree, self._draws = new_tree(planned.limits), planned.draws
        self.staged = (c_int32 * count)(), (c_int32 * count)()
        self.probs_NV, self.drawing = None, Drawing()
        if planned.shape is not None:
            parents = planned.shape.parents
            self._shape = (c_int32 * len(parents))(*parents)
            self.drawing.shape = ctypes.addressof(self._shape)
            self.drawing.num_places = len(parents)
            self.probs_NV = torch.empty(len(parents), vocab_size)

    def describe(self, row: TreeRow, drawn: Row) -> None:
        """Let `row` point here, and to `drawn` if nodes are drawn."""
        row.tree, row.drawing = ctypes.addressof(self.tree), None
        row.tokens, row.parents = map(ctypes.addressof, self.staged)
        if self.probs_NV is not None:
            describe_draws(drawn, self._draws, len(self.probs_NV))
            drawn.drawn_from = self.probs_NV.data_ptr()
            self.drawing.row = ctypes.addressof(drawn)
            row.drawing = ctypes.addressof(self.drawing)

    def grown(self, num_staged: int) -> Grown:
        tokens, parents = self.staged
        kept, probs_NV = kept_nodes(self.tree), self.probs_NV
        if probs_NV is not None:
            probs_NV = probs_NV[: len(kept.tokens)]
        return Grown(kept, tokens[:num_staged], parents[:num_staged], probs_NV)


def native_sampling(library: ctypes.CDLL, team: int) -> Sampling:
    """The operators of `library` on the team at this address (`kernels/native/ops.py`)."""
    ops = _NativeSampling(library, team)
    return Sampling(
        ops.softmax,
        ops.pick,
        ops.leftover,
        masses,
        ops.top_k,
        ops.keep_likely,
        NativeTrees(library, team).nodes,
    )


class _NativeSampling:
    """Native operators. Not thread-safe: every call of `leftover` reuses one buffer."""

    def __init__(self, library: ctypes.CDLL, team: int) -> None:
        self._team = team
        self._softmax, self._pick = function(library, "softmax"), function(library, "pick")
        self._leftover, self._top_k = function(library, "leftover"), function(library, "top_k")
        self._keep_likely = function(library, "keep_likely")
        self._leftover_V = torch.empty(0)

    def softmax(self, logits_NV: Tensor, temperature: float, out_NV: Tensor) -> None:
        if not (is_plain(logits_NV) and is_plain(out_NV)):
            return PLAIN.softmax(logits_NV, temperature, out_NV)
        num_rows, size = logits_NV.shape
        logits, out = logits_NV.data_ptr(), out_NV.data_ptr()
        return self._softmax(self._team, logits, temperature, out, num_rows, size)

    def top_k(self, logits_NV: Tensor, k: int, out_NV: Tensor) -> None:
        if not (is_plain(logits_NV) and is_plain(out_NV)):
            return PLAIN.top_k(logits_NV, k, out_NV)
        num_rows, size = logits_NV.shape
        logits, out = logits_NV.data_ptr(), out_NV.data_ptr()
        return self._top_k(self._team, logits, k, out, num_rows, size)

    def keep_likely(self, probs_NV: Tensor, top_p: float, min_p: float) -> None:
        if not is_plain(probs_NV):
            return PLAIN.keep_likely(probs_NV, top_p, min_p)
        num_rows, size = probs_NV.shape
        return self._keep_likely(self._team, probs_NV.data_ptr(), top_p, min_p, num_rows, size)

    def pick(self, weights_V: Tensor, uniform: float) -> int:
        if not is_plain(weights_V):
            return PLAIN.pick(weights_V, uniform)
        index = self._pick(self._team, weights_V.data_ptr(), uniform, weights_V.shape[0])
        if index < 0:
            raise NumericsError("the model")
        return index

    def leftover(
        self, p_V: Tensor, proposal: int | Tensor, share: float = 1.0
    ) -> tuple[Tensor, float]:
        certain = isinstance(proposal, int)
        if not (is_plain(p_V) and (certain or is_plain(proposal))):
            return PLAIN.leftover(p_V, proposal, share)
        size = p_V.shape[0]
        if self._leftover_V.shape[0] != size:
            self._leftover_V = torch.empty(size)
        q, token = (None, proposal) if certain else (proposal.data_ptr(), -1)
        out = self._leftover_V.data_ptr()
        left = self._leftover(self._team, p_V.data_ptr(), q, token, share, out, size)
        return self._leftover_V, left


def masses(probs_NV: Tensor, tokens: Sequence[int]) -> list[float]:
    """The probability of each token in its row, read by address, without PyTorch's overhead."""
    if not is_plain(probs_NV):
        return PLAIN.masses(probs_NV, tokens)
    start, row = probs_NV.data_ptr(), probs_NV.shape[-1]
    if len(tokens) > probs_NV.shape[0]:
        raise ContractError("more tokens than rows")
    if tokens and not 0 <= min(tokens) <= max(tokens) < row:
        raise ContractError("a token lies outside its row")
    addresses = [start + 4 * (node * row + token) for node, token in enumerate(tokens)]
    return [c_float.from_address(address).value for address in addresses]
