"""A pass of a block drafter as one native call: context, layers, output head, likeliest tokens.

See `outrider_write_blocks` in csrc/forward.cpp; plugins/heads/blocks.py defines the pass operator
by operator.

Shapes:  B = texts, S = size of a block, K = drafted positions, N = packed rows, P = rows of
         context, X = inputs of the product that fuses states, D = hidden size, W = drafted ids.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.errors import ContractError
from outrider.kernels.native.forward import NativeForward
from outrider.kernels.native.ops import (
    LinearStruct,
    PassStruct,
    function,
    pointer,
    struct_fields,
)
from outrider.kernels.plan import PackedLinear


@dataclass(frozen=True, slots=True)
class Written:
    """A block of each text: hidden states after the last norm, and logits of the first K drafted
    positions over the ids that are drafted. If a native pass chose greedy drafts, `best_BK` has
    their tokens among these ids, -1 where logits are no numbers."""

    hidden_BSD: Tensor
    logits_BKW: Tensor
    best_BK: list[list[int]] | None = None


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Rows of a block, the last `most` of which draft; the id of masks; tokens of a page."""

    block: int
    most: int
    mask_token: int
    page: int


@dataclass(frozen=True, slots=True)
class BlockText:
    """A text of a pass: its context has `length` rows on `pages` and gets `num_new` more; then
    comes the block, which begins with the `pending` token."""

    length: int
    num_new: int
    pages: Sequence[int]
    pending: int


@dataclass(frozen=True, slots=True)
class TokenBefore:
    """Logits that depend on the token before: `after` multiplies that token's row of a table."""

    table_VR: Tensor
    after: PackedLinear


class _Sight(Structure):
    _fields_ = struct_fields((c_int32, "window causal from_block"))


class _Text(Structure):
    _fields_ = struct_fields((c_int32, "length num_new pending"))


class _Block(Structure):
    _fields_ = struct_fields(
        (c_void_p, "decoder"),
        (PassStruct, "blank"),
        (LinearStruct, "join"),
        (c_void_p, "context_norm sights texts states reads hidden logits best table before"),
        (LinearStruct, "after"),
        (c_void_p, "ids"),
        (c_int32, "num_texts block_size mask_token first depth rank"),
    )


class NativeBlocks:
    """Runs passes of block drafters. Holds every tensor that native code points to. `sights` has
    for each layer the fields of a `Sight`; `reads_ND` has memory for what layers read."""

    def __init__(
        self,
        forward: NativeForward,
        *,
        join: PackedLinear,
        context_norm_D: Tensor,
        reads_ND: Tensor,
        sights: Sequence[tuple[int, bool, bool]],
        sizes: BlockSizes,
    ) -> None:
        self._forward, self._held = forward, (join, context_norm_D, reads_ND)
        self._reads_ND, self._sizes = reads_ND, sizes
        self._before: TokenBefore | None = None
        self._ids_W: Tensor | None = None
        self._logits_RW = torch.empty(0, forward.num_logits)
        self._sights = (_Sight * len(sights))(*(_Sight(*one) for one in sights))
        self._block = _Block(
            forward.address,
            forward.blank_pass(sizes.page),
            LinearStruct.of(join, None),
            context_norm_D.data_ptr(),
            ctypes.addressof(self._sights),
            reads=reads_ND.data_ptr(),
            block_size=sizes.block,
            mask_token=sizes.mask_token,
            first=sizes.block - sizes.most,
        )
        self._run = function(forward.library, "write_blocks")

    def follow(self, before: TokenBefore, ids_W: Tensor | None) -> None:
        """Choose greedy drafts by logits with the part of the token `before`. `ids_W` are the
        tokens that logits are of, None for all."""
        self._before, self._ids_W = before, ids_W
        self._block.after = LinearStruct.of(before.after, None)
        self._block.rank, self._block.ids = before.table_VR.shape[1], pointer(ids_W)

    def __call__(
        self, texts: Sequence[BlockText], states_PX: Tensor, depth: int, *, chooses: bool
    ) -> Written:
        """Run a pass for texts whose new context has the target's states `states_PX`, contiguous
        float32; the logits are of `depth` positions. If it `chooses` greedy drafts, the logits are
        those by which they were chosen, and hold until the next pass."""
        sizes, block, count = self._sizes, self._block, len(texts)
        num_rows = len(states_PX) + count * sizes.block
        if num_rows > min(len(self._reads_ND), self._forward.max_tokens):
            raise ContractError("more rows than the buffers of a block drafter hold")
        most = max(len(text.pages) for text in texts)
        pages, described = (c_int32 * (most * count))(), (_Text * count)()
        for index, text in enumerate(texts):
            pages[index * most : index * most + len(text.pages)] = text.pages
            described[index] = _Text(text.length, text.num_new, text.pending)
        hidden_BSD = torch.empty(count, sizes.block, self._reads_ND.shape[1])
        logits_KBW = self._logits(depth * count, keeps=not chooses).view(depth, count, -1)
        best = (c_int64 * (count * depth))()
        block.blank.pages, block.blank.num_page_columns = ctypes.addressof(pages), most
        block.texts, block.states = ctypes.addressof(described), states_PX.data_ptr()
        block.hidden, block.logits = hidden_BSD.data_ptr(), logits_KBW.data_ptr()
        block.table = None
        if chooses and self._before is not None:
            before_BR = torch.empty(count, block.rank)
            block.table, block.before = self._before.table_VR.data_ptr(), before_BR.data_ptr()
        block.best, block.num_texts, block.depth = ctypes.addressof(best), count, depth
        if not self._run(ctypes.addressof(block)):
            raise IndexError("a pending token or the mask is not in the vocabulary")
        best_BK = [best[index::count] for index in range(count)] if chooses else None
        return Written(hidden_BSD, logits_KBW.transpose(0, 1), best_BK)

    def _logits(self, num_rows: int, *, keeps: bool) -> Tensor:
        """Memory for rows of logits, which the next pass writes over unless a caller `keeps` it:
        new memory costs a moment for each of its pages."""
        if keeps:
            return torch.empty(num_rows, self._forward.num_logits)
        if len(self._logits_RW) < num_rows:
            self._logits_RW = torch.empty(num_rows, self._forward.num_logits)
        return self._logits_RW[:num_rows]
