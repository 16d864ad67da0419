# pyright: basic, reportGeneralTypeIssues=false
"""Triton kernels of verdicts on trees, one program a tree: rounds/verdicts.py.

Nodes are visited in the order of their numbers. Parents come before children, so a walk that has
reached a node meets its children later, and skips nodes with other parents.

Shapes:  as flat pointers; B = trees, K = nodes, W = K + 1, V = vocabulary; distributions of p are
         [B, W, V], of q [B, K, V].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core.rng import Role, RoundKeys
from outrider.plugins.gpu.kernels import accept
from outrider.plugins.gpu.kernels.launchers import Pieces
from outrider.plugins.gpu.kernels.sampling import uniform
from outrider.plugins.gpu.kernels.scratch import Workspace
from outrider.plugins.gpu.kernels.tiles import launch

_ACCEPT = tl.constexpr(int(Role.ACCEPT))
# A point mass of this size covers all of a distribution's mass on its token.
_COVER = tl.constexpr(2.0)


@triton.jit(do_not_specialize=["num_nodes"])
def follow_kernel(own_ptr, tokens_ptr, parents_ptr, path_ptr, kept_ptr, next_ptr, num_nodes):
    """Down the tree as long as a child is the target's own token after its parent."""
    tree = tl.program_id(0).to(tl.int64)
    row, kept = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for node in range(num_nodes):
        word = tl.full((), 1, tl.int32) + node
        at = tree * num_nodes + node
        own = tl.load(own_ptr + tree * (num_nodes + 1) + row)
        heads = (tl.load(parents_ptr + at) + 1 == row) & (tl.load(tokens_ptr + at) == own)
        tl.store(path_ptr + tree * num_nodes + kept, word - 1, mask=heads)
        row = tl.where(heads, word, row)
        kept += heads.to(tl.int32)
    tl.store(kept_ptr + tree, kept)
    tl.store(next_ptr + tree, tl.load(own_ptr + tree * (num_nodes + 1) + row))


@triton.jit
def _rest(row_ptr, q_ptr, piece, token, size, is_drawn, DRAWN: tl.constexpr, PIECE: tl.constexpr):
    """(max(p - q, 0) of a piece, float64, its places, which of them there are)."""
    index = piece * PIECE + tl.arange(0, PIECE)
    mask = index < size
    q = tl.where(index == token, _COVER, 0.0).to(tl.float64)
    if DRAWN:
        own = tl.load(q_ptr + index, mask=mask & is_drawn, other=0.0).to(tl.float64)
        q = tl.where(is_drawn, own, q)
    left = tl.load(row_ptr + index, mask=mask, other=0.0).to(tl.float64) - q
    return tl.where(left < 0, 0.0, left), index, mask


@triton.jit(do_not_specialize=["num_nodes"])
def walk_kernel(
    tokens_ptr, parents_ptr, drawn_ptr, p_ptr, q_ptr, seed_ptr, sample_ptr, start_ptr,
    path_ptr, kept_ptr, row_ptr, share_ptr, num_nodes, size,
    DRAWN: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """The token rule. What refused tokens leave of a distribution is written over it, so the row
    that the walk ends at is what the next token is drawn from."""
    tree = tl.program_id(0).to(tl.int64)
    seed = tl.load(seed_ptr + tree)
    sample, start = tl.load(sample_ptr + tree), tl.load(start_ptr + tree)
    is_drawn = tl.load(drawn_ptr + tree) != 0
    row, kept = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for node in range(num_nodes):
        # A loop's variable has no type in the interpreter.
        word = tl.full((), 1, tl.int32) + node
        at = tree * num_nodes + node
        if tl.load(parents_ptr + at) + 1 == row:
            token = tl.load(tokens_ptr + at).to(tl.int64)
            left_ptr = p_ptr + (tree * (num_nodes + 1) + row) * size
            own_ptr = q_ptr + at * size
            share = tl.full((), 1.0, tl.float64)
            if DRAWN:
                drawn = tl.load(own_ptr + token, mask=is_drawn, other=1.0).to(tl.float64)
                share = tl.where(is_drawn, drawn, share)
            mass = tl.load(left_ptr + token).to(tl.float64)
            ratio = tl.where(share > 0, mass / tl.where(share > 0, share, 1.0), 0.0)
            coin = uniform(seed, word, start, sample, _ACCEPT)
            if (ratio >= 1.0) | (coin < ratio):
                tl.store(path_ptr + tree * num_nodes + kept, word - 1)
                row = word
                kept += 1
            else:
                total = tl.full((), 0.0, tl.float64)
                for piece in range(tl.cdiv(size, PIECE)):
                    left, _, _ = _rest(
                        left_ptr, own_ptr, piece, token, size, is_drawn, DRAWN, PIECE
                    )
                    total += tl.sum(left, 0)
                if total > 0:
                    for piece in range(tl.cdiv(size, PIECE)):
                        left, index, mask = _rest(
                            left_ptr, own_ptr, piece, token, size, is_drawn, DRAWN, PIECE
                        )
                        left = tl.div_rn(left.to(tl.float32), total.to(tl.float32))
                        tl.store(left_ptr + index, left, mask=mask)
                # The next look at a token is another thread's.
                tl.debug_barrier()
    tl.store(kept_ptr + tree, kept)
    tl.store(row_ptr + tree, row)
    tl.store(share_ptr + tree, 1.0)


class TritonTrees:
    """The verdicts of one stream. `tree` are tokens_BK and parents_BK, int64, of B trees of at most
    K nodes; a parent below ROOT marks padding. `out` are path_BK, num_accepted_B and next_B, int64.
    No launch waits for the device."""

    __slots__ = ("_workspace",)

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def follow(
        self, tree: tuple[Tensor, Tensor], own_BW: Tensor, out: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Follow trees down by `own_BW`, int64: the target's token after the root and nodes."""
        num, num_nodes = tree[0].shape
        launch(follow_kernel, (num,), own_BW, *tree, *out, num_nodes, num_warps=1)

    def walk(
        self,
        tree: tuple[Tensor, Tensor],
        drawn: tuple[Tensor, Tensor | None],
        p_BWV: Tensor,
        keys: RoundKeys,
        out: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Apply the token rule. `drawn` are flags of the trees that were sampled, and q_BKV (None:
        no tree was). All distributions are probabilities, float32; `p_BWV` is overwritten."""
        (num, num_nodes), size = tree[0].shape, p_BWV.shape[-1]
        cut, (drawn_B, q_BKV) = Pieces(size), drawn
        row_B, share_B, sums_BC2 = self._workspace.carve(
            ((num,), torch.int32), ((num,), torch.float64), ((num, cut.count, 2), torch.float64)
        )
        numbers, (path_BK, num_accepted_B, next_B) = (keys.seed_B, keys.sample_B, keys.start_B), out
        q = p_BWV if q_BKV is None else q_BKV
        launch(
            walk_kernel,
            (num,),
            *tree, drawn_B, p_BWV, q, *numbers, path_BK, num_accepted_B, row_B, share_B,
            num_nodes, size, DRAWN=q_BKV is not None, PIECE=cut.piece, num_warps=cut.num_warps,
        )  # fmt: skip
        # A draw from a whole row: the end of a chain of which all tokens are accepted.
        flags = {"P_READY": True, "Q_READY": True, "POINT": True, "CHAINS": True}
        before = (row_B, share_B, row_B, tree[0], *[p_BWV] * 10, sums_BC2)
        sizes = (num_nodes, size, cut.count)
        launch(accept.left_kernel, (num, cut.count), *before, *sizes, **flags, **cut.constants())
        launch(
            accept.pick_kernel,
            (num,),
            *before, *numbers, row_B, next_B, 0, *sizes, **flags, **cut.constants(),
            GIVEN=False, ROLE=int(Role.NEXT),
        )  # fmt: skip
