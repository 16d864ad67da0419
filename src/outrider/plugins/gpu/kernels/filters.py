# pyright: basic, reportGeneralTypeIssues=false
"""Triton kernels of top-k, top-p and min-p: search for a threshold (the edge), then cut.

The edge is a number of the row: the k-th largest logit, or the probability at which the mass of all
tokens that are at least as likely reaches top-p. Numbers become integers of the same order, and
every pass over the row settles four more bits of the edge, by counts (or masses) above sixteen
candidates. Masses are integers of 2^-62, so their sums do not depend on any order: rows, batches
and pieces cannot change the result.

Shapes:  as flat pointers; rows are [rows, vocabulary], candidates [rows, pieces, 16].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.plugins.gpu.kernels.launchers import Pieces
from outrider.plugins.gpu.kernels.scratch import Workspace
from outrider.plugins.gpu.kernels.tiles import MOST_REGISTERS, launch

# A probability of one, as an integer.
_ONE = tl.constexpr(2.0**62)
_UNIT = tl.constexpr(2.0**-62)
_LOWEST = tl.constexpr(-(2**31))
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Passes over a row, and candidates of each.
TURNS, PLACES = 8, 16
_TURNS, _PLACES, _BITS = tl.constexpr(TURNS), tl.constexpr(PLACES), tl.constexpr(4)
# Numbers that a program looks at together: 16 sums of each stay in registers.
BLOCK = 256


@triton.jit
def _key(value):
    """An int64 that rises as the float32 does; both zeros are one."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _MAGNITUDE, bits).to(tl.int64)


@triton.jit
def _wanted(limit_ptr, row, rows_per_limit, size, MASS: tl.constexpr):
    """How much must lie at or above the edge, int64; 0 keeps the whole row."""
    limit = tl.load(limit_ptr + row // rows_per_limit)
    if MASS:
        some = tl.maximum(tl.ceil(limit * _ONE), 1.0)
        return tl.where(limit < 1.0, some, 0.0).to(tl.int64)
    else:
        return tl.where(limit < size, limit, 0).to(tl.int64)


@triton.jit
def _weight(value, mask, MASS: tl.constexpr):
    """How much a number counts, int64: what is no number is nothing."""
    if MASS:
        return (tl.where(mask & (value == value), value, 0.0).to(tl.float64) * _ONE).to(tl.int64)
    else:
        return mask.to(tl.int64)


@triton.jit
def _edge(edges_ptr, sums_ptr, wanted, row, turn, num_rows, num_pieces, PIECES: tl.constexpr):
    """The largest key so far at and above which `wanted` lies, after `turn` passes."""
    edge = tl.full((), _LOWEST, tl.int64)
    if turn > 0:
        piece, place = tl.arange(0, PIECES)[:, None], tl.arange(0, _PLACES)[None, :]
        at = ((((turn - 1) % 2) * num_rows + row) * num_pieces + piece) * _PLACES + place
        sums = tl.load(sums_ptr + at, mask=piece < num_pieces, other=0)
        passed = tl.sum((tl.sum(sums, 0) >= wanted).to(tl.int64), 0)
        edge = tl.load(edges_ptr + (turn - 1) * num_rows + row)
        edge += passed << ((_TURNS - turn) * _BITS)
    return edge


@triton.jit(do_not_specialize=["turn", "num_rows", "rows_per_limit"])
def edge_kernel(
    rows_ptr, limit_ptr, edges_ptr, sums_ptr, turn, num_rows, rows_per_limit, size, num_pieces,
    MASS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Pass `turn` over a piece: what lies at or above each of the next candidates."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wanted = _wanted(limit_ptr, row, rows_per_limit, size, MASS)
    if wanted > 0:
        edge = _edge(edges_ptr, sums_ptr, wanted, row, turn, num_rows, num_pieces, PIECES)
        # All pieces of a row find the same.
        tl.store(edges_ptr + turn * num_rows + row, edge)
        place = tl.arange(0, _PLACES)
        candidate = edge + ((place + 1).to(tl.int64) << ((_TURNS - 1 - turn) * _BITS))
        sums = tl.zeros((BLOCK, _PLACES), tl.int64)
        # No loop of the compiler: unrolled, sums of many blocks would not stay in registers.
        for block in range(PIECE // BLOCK):
            index = piece * PIECE + block * BLOCK + tl.arange(0, BLOCK)
            mask = index < size
            value = tl.load(rows_ptr + row * size + index, mask=mask, other=0.0)
            weight = _weight(value, mask, MASS)
            above = _key(value)[:, None] >= candidate[None, :]
            sums += tl.where(above, weight[:, None], 0)
        at = (((turn % 2) * num_rows + row) * num_pieces + piece) * _PLACES + place
        tl.store(sums_ptr + at, tl.sum(sums, 0))


@triton.jit(do_not_specialize=["num_rows", "rows_per_limit"])
def top_k_kernel(
    rows_ptr, limit_ptr, edges_ptr, sums_ptr, num_rows, rows_per_limit, size, num_pieces,
    PIECE: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """-inf below the edge; what is no number stays."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wanted = _wanted(limit_ptr, row, rows_per_limit, size, False)
    if wanted > 0:
        edge = _edge(edges_ptr, sums_ptr, wanted, row, _TURNS, num_rows, num_pieces, PIECES)
        index = piece * PIECE + tl.arange(0, PIECE)
        mask = index < size
        value = tl.load(rows_ptr + row * size + index, mask=mask, other=0.0)
        gone = (_key(value) < edge) & (value == value)
        tl.store(rows_ptr + row * size + index, float("-inf"), mask=mask & gone)


@triton.jit(do_not_specialize=["num_rows", "rows_per_limit"])
def equals_kernel(
    rows_ptr, limit_ptr, edges_ptr, sums_ptr, best_ptr, above_ptr, equals_ptr,
    num_rows, rows_per_limit, size, num_pieces, PIECE: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """Of each piece: its largest number, the mass above the edge, and how many lie on it."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wanted = _wanted(limit_ptr, row, rows_per_limit, size, True)
    index = piece * PIECE + tl.arange(0, PIECE)
    mask = index < size
    value = tl.load(rows_ptr + row * size + index, mask=mask, other=0.0)
    at = row * num_pieces + piece
    tl.store(best_ptr + at, tl.max(value, 0))
    if wanted > 0:
        edge = _edge(edges_ptr, sums_ptr, wanted, row, _TURNS, num_rows, num_pieces, PIECES)
        key = _key(value)
        tl.store(above_ptr + at, tl.sum(_weight(value, mask & (key > edge), True), 0))
        tl.store(equals_ptr + at, tl.sum((mask & (key == edge)).to(tl.int64), 0))


@triton.jit(do_not_specialize=["num_rows", "rows_per_limit"])
def keep_kernel(
    rows_ptr, limit_ptr, edges_ptr, sums_ptr, best_ptr, above_ptr, equals_ptr, kept_ptr, min_p_ptr,
    num_rows, rows_per_limit, size, num_pieces, PIECE: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """Zero for what top-p and then min-p leave out, the rest over its sum after top-p; of each
    piece the sum after min-p."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wanted = _wanted(limit_ptr, row, rows_per_limit, size, True)
    min_p = tl.load(min_p_ptr + row // rows_per_limit)
    if (wanted > 0) | (min_p > 0):
        index = piece * PIECE + tl.arange(0, PIECE)
        mask = index < size
        value = tl.load(rows_ptr + row * size + index, mask=mask, other=0.0)
        out = value
        pieces = tl.arange(0, PIECES)
        at = row * num_pieces + pieces
        best = tl.max(tl.load(best_ptr + at, mask=pieces < num_pieces, other=0.0), 0)
        if wanted > 0:
            edge = _edge(edges_ptr, sums_ptr, wanted, row, _TURNS, num_rows, num_pieces, PIECES)
            above = tl.sum(tl.load(above_ptr + at, mask=pieces < num_pieces, other=0), 0)
            equals = tl.load(equals_ptr + at, mask=pieces < num_pieces, other=0)
            # Of those on the edge the first are kept, as many as reach the mass.
            on_edge = tl.maximum(edge, 0).to(tl.int32).to(tl.float32, bitcast=True)
            mass = (on_edge.to(tl.float64) * _ONE).to(tl.int64)
            count = tl.where(mass > 0, (wanted - above + mass - 1) // tl.maximum(mass, 1), size)
            count = tl.minimum(count, tl.sum(equals, 0))
            key = _key(value)
            tie = (mask & (key == edge)).to(tl.int64)
            earlier = tl.sum(tl.where(pieces < piece, equals, 0), 0) + tl.cumsum(tie, 0) - tie
            keeps = (key > edge) | ((tie > 0) & (earlier < count)) | (value != value)
            total = ((above + count * mass).to(tl.float64) * _UNIT).to(tl.float32)
            out = tl.where(keeps, tl.div_rn(value, total), 0.0)
            best = tl.div_rn(best, total)
        out = tl.where(out < min_p * best, 0.0, out)
        tl.store(rows_ptr + row * size + index, out, mask=mask)
        tl.store(kept_ptr + row * num_pieces + piece, tl.sum(_weight(out, mask, True), 0))


@triton.jit(do_not_specialize=["rows_per_limit"])
def rescale_kernel(
    rows_ptr, min_p_ptr, kept_ptr, rows_per_limit, size, num_pieces,
    PIECE: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """What min-p left of a row, over its sum."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(min_p_ptr + row // rows_per_limit) > 0:
        pieces = tl.arange(0, PIECES)
        at = row * num_pieces + pieces
        kept = tl.sum(tl.load(kept_ptr + at, mask=pieces < num_pieces, other=0), 0)
        total = (kept.to(tl.float64) * _UNIT).to(tl.float32)
        index = piece * PIECE + tl.arange(0, PIECE)
        mask = index < size
        value = tl.load(rows_ptr + row * size + index, mask=mask, other=0.0)
        tl.store(rows_ptr + row * size + index, tl.div_rn(value, total), mask=mask)


class _Search(NamedTuple):
    """The arguments of a search for edges, for the cut that follows. If edges are by mass,
    `tensors` end with buffers for four numbers of each piece: the largest number, the mass above
    the edge, the count of numbers on it, and the mass that is left."""

    grid: tuple[int, int]
    tensors: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    constants: dict[str, int]


class TritonFilters:
    """The filters of one stream, on contiguous float32 rows and in place. Limits are one for each
    row, or one for each group of as many consecutive rows. No launch waits for the device."""

    __slots__ = ("_workspace",)

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def top_k(self, logits_RV: Tensor, k_B: Tensor) -> None:
        """Write -inf below the k-th largest of each row; int64 `k` of 0, or V and up, has none."""
        grid, tensors, sizes, constants = self._search(logits_RV, k_B, mass=False)
        launch(top_k_kernel, grid, *tensors, *sizes, **constants)

    def keep_likely(self, probs_RV: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> None:
        """The operator `keep_likely` of core/sampling.py. `top_p` is float64, and 1 changes
        nothing; `min_p` is float32, and 0 changes nothing."""
        grid, tensors, sizes, constants = self._search(probs_RV, top_p_B, mass=True)
        kept_RC = tensors[-1]
        launch(equals_kernel, grid, *tensors[:-1], *sizes, **constants, maxnreg=MOST_REGISTERS)
        launch(keep_kernel, grid, *tensors, min_p_B, *sizes, **constants)
        launch(rescale_kernel, grid, probs_RV, min_p_B, kept_RC, *sizes[1:], **constants)

    def _search(self, rows_RV: Tensor, limit_B: Tensor, *, mass: bool) -> _Search:
        """Find the edge of each row, by counts or by mass."""
        size = rows_RV.shape[-1]
        cut, num_rows = Pieces(size), rows_RV.numel() // size
        grid = (num_rows, cut.count)
        left = ((grid, torch.float32), *[(grid, torch.int64)] * 3) if mass else ()
        edges_TR, sums_2RCP, *views = self._workspace.carve(
            ((TURNS, num_rows), torch.int64), ((2, *grid, PLACES), torch.int64), *left
        )
        tensors = (rows_RV, limit_B, edges_TR, sums_2RCP)
        sizes = (num_rows, num_rows // limit_B.shape[0], size, cut.count)
        constants, block = cut.constants(), min(BLOCK, cut.piece)
        for turn in range(TURNS):
            launch(edge_kernel, grid, *tensors, turn, *sizes, MASS=mass, BLOCK=block, **constants)
        return _Search(grid, (*tensors, *views), sizes, constants)
