"""A pass of a block drafter as one native call: context, layers, output head, chains and trees.

See `outrider_write_blocks` in csrc/forward.cpp and csrc/block_drafts.cpp; plugins/heads/blocks.py
and block_heads.py define both, operator by operator.

Shapes:  B = texts, S = size of a block, K = drafted positions, N = packed rows, P = rows of
         context, X = inputs of the product that fuses states, D = hidden size, W = drafted ids,
         R = rank, V = vocabulary, C = taps of a convolution, T = candidates of a position.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int32, c_void_p
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import ContractError
from outrider.kernels.native.forward import NativeForward
from outrider.kernels.native.ops import (
    SUFFIXES,
    LinearStruct,
    PassStruct,
    function,
    pointer,
    struct_fields,
)
from outrider.kernels.plan import PackedLinear
from outrider.plugins.heads.native_choice import ChoiceStruct, Made, describe

# A convolution of blocks: the product that computes weights, and base_2CD.
Conv: TypeAlias = tuple[PackedLinear, Tensor]


@dataclass(frozen=True, slots=True)
class Written:
    """A block of each text: hidden states after the last norm, and logits of the first K drafted
    positions over the ids that are drafted. `drafts` are those of a native pass, if it made any."""

    hidden_BSD: Tensor
    logits_BKW: Tensor
    drafts: Sequence[Draft] = ()


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Rows of a block, the last `most` of which draft; the id of masks; tokens of a page and of the
    vocabulary."""

    block: int
    most: int
    mask_token: int
    page: int
    vocab: int


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Weights around the layers: `join` and `context_norm_D` make rows of context, `convs` has two
    for each layer, of its attention and of its FFN, None where there is none. `ids_W` are the
    tokens that logits are of, None for all of the vocabulary."""

    join: PackedLinear
    context_norm_D: Tensor
    convs: Sequence[Conv | None]
    ids_W: Tensor | None


@dataclass(frozen=True, slots=True)
class BlockText:
    """A text of a pass: its context has `length` rows on `pages` and gets `num_new` more; then
    comes the block, which begins with the `pending` token, after the `previous` one."""

    length: int
    num_new: int
    pages: Sequence[int]
    pending: int
    previous: int


@dataclass(frozen=True, slots=True)
class TokenBefore:
    """Weights of logits that depend on the token before, which has a row of `table_VR`.

    `out` makes a summand of the row, after a `gate` scaled it or `joint`, whose state runs along
    the path, replaced it; `bias` is theirs. With `after_VR`, `out` makes a row of the state
    instead, and both score the `num_candidates` likeliest ids, each by a row of its own.
    """

    table_VR: Tensor
    out: PackedLinear
    gate: PackedLinear | None = None
    joint: PackedLinear | None = None
    bias: Tensor | None = None
    after_VR: Tensor | None = None
    num_candidates: int = 0


@dataclass(frozen=True, slots=True)
class RefinerWeights:
    """Weights of a net that refines a block's logits in rounds (`Refiner` of block_heads.py)."""

    table_VR: Tensor
    own: PackedLinear
    mean: PackedLinear
    join: PackedLinear
    mix_RSS: Tensor
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear
    out: PackedLinear
    num_rounds: int


class _Sight(Structure):
    _fields_ = struct_fields((c_int32, "window causal from_block"))


class _Conv(Structure):
    _fields_ = struct_fields(
        (LinearStruct, "kernels"), (c_void_p, "base"), (c_int32, "taps num_groups")
    )

    @classmethod
    def of(cls, conv: Conv | None) -> _Conv:
        if conv is None:
            return cls()
        kernels, base_2CD = conv
        taps = base_2CD.shape[1]
        linear = LinearStruct.of(kernels, None)
        return cls(linear, base_2CD.data_ptr(), taps, kernels.num_out // (2 * taps))


class _Text(Structure):
    _fields_ = struct_fields((c_int32, "length num_new pending previous"))


class _Refiner(Structure):
    _fields_ = struct_fields(
        (c_void_p, "table"),
        (LinearStruct, "own mean join gate up down out"),
        (c_void_p, "mix"),
        (c_int32, "dtype rank inner num_rounds"),
    )

    @classmethod
    def of(cls, net: RefinerWeights) -> _Refiner:
        linears = (net.own, net.mean, net.join, net.gate, net.up, net.down, net.out)
        return cls(
            net.table_VR.data_ptr(),
            *(LinearStruct.of(one, None) for one in linears),
            net.mix_RSS.data_ptr(),
            _dtype(net.table_VR),
            net.table_VR.shape[1],
            net.gate.num_out,
            net.num_rounds,
        )


class _Block(ChoiceStruct):
    _fields_ = struct_fields(
        (c_void_p, "decoder"),
        (PassStruct, "blank"),
        (LinearStruct, "join"),
        (c_void_p, "context_norm sights convs texts states reads hidden table successors"),
        (LinearStruct, "out gate joint"),
        (c_void_p, "refiner"),
        (c_int32, "block_size mask_token first hidden_size"),
        (c_int32, "dtype rank num_candidates unused_count"),
    )


def _dtype(table_VR: Tensor) -> int:
    return list(SUFFIXES).index(table_VR.dtype)


class NativeBlocks:
    """Runs passes of block drafters. Holds every tensor that native code points to. `sights` has
    for each layer the fields of a `Sight`; `reads_ND` has memory for what layers read."""

    def __init__(
        self,
        forward: NativeForward,
        weights: BlockWeights,
        *,
        reads_ND: Tensor,
        sights: Sequence[tuple[int, bool, bool]],
        sizes: BlockSizes,
    ) -> None:
        self._forward, self._weights = forward, weights
        self._reads_ND, self._sizes = reads_ND, sizes
        # What native code reads behind the layers.
        self._behind: TokenBefore | RefinerWeights | None = None
        self._refiner = _Refiner()
        self._logits_RW = torch.empty(0, forward.num_logits)
        self._sights = (_Sight * len(sights))(*(_Sight(*one) for one in sights))
        self._convs = (_Conv * len(weights.convs))(*map(_Conv.of, weights.convs))
        self._block = _Block(
            team=forward.team,
            at_once=True,
            decoder=forward.address,
            blank=forward.blank_pass(sizes.page),
            join=LinearStruct.of(weights.join, None),
            context_norm=weights.context_norm_D.data_ptr(),
            sights=ctypes.addressof(self._sights),
            convs=ctypes.addressof(self._convs),
            reads=reads_ND.data_ptr(),
            ids=pointer(weights.ids_W),
            block_size=sizes.block,
            mask_token=sizes.mask_token,
            first=sizes.block - sizes.most,
            num_logits=forward.num_logits,
            vocab_size=sizes.vocab,
            hidden_size=reads_ND.shape[1],
        )
        self._run = function(forward.library, "write_blocks")

    def follow(self, before: TokenBefore) -> None:
        """Choose drafts by logits that depend on the token `before`."""
        block, self._behind = self._block, before
        block.at_once = False
        block.table, block.rank = before.table_VR.data_ptr(), before.table_VR.shape[1]
        block.dtype = _dtype(before.table_VR)
        block.successors, block.num_candidates = pointer(before.after_VR), before.num_candidates
        block.out = LinearStruct.of(before.out, None)
        if before.gate is not None:
            block.gate = LinearStruct.of(before.gate, before.bias)
        if before.joint is not None:
            block.joint = LinearStruct.of(before.joint, before.bias)

    def refine(self, net: RefinerWeights) -> None:
        """Choose drafts by logits that the net refines; passes then make logits of all rows."""
        self._refiner, self._behind = _Refiner.of(net), net
        self._block.refiner = ctypes.addressof(self._refiner)

    def __call__(
        self,
        texts: Sequence[BlockText],
        states_PX: Tensor,
        depth: int,
        makes: Made | None = None,
    ) -> Written | None:
        """Run a pass for texts whose new context has the target's states `states_PX`, contiguous
        float32; the logits are of `depth` positions. If it also `makes` drafts, the logits hold
        until the next pass, and are those of which tokens were chosen; None if they are no
        numbers."""
        sizes, block, count = self._sizes, self._block, len(texts)
        num_rows = len(states_PX) + count * sizes.block
        if num_rows > min(len(self._reads_ND), self._forward.max_tokens):
            raise ContractError("more rows than the buffers of a block drafter hold")
        most = max(len(text.pages) for text in texts)
        pages, described = (c_int32 * (most * count))(), (_Text * count)()
        for index, text in enumerate(texts):
            pages[index * most : index * most + len(text.pages)] = text.pages
            described[index] = _Text(text.length, text.num_new, text.pending, text.previous)
        hidden_BSD = torch.empty(count, sizes.block, self._reads_ND.shape[1])
        logits_KBW = self._logits(depth * count, keeps=makes is None).view(depth, count, -1)
        block.blank.pages, block.blank.num_page_columns = ctypes.addressof(pages), most
        block.texts, block.states = ctypes.addressof(described), states_PX.data_ptr()
        block.hidden, block.logits = hidden_BSD.data_ptr(), logits_KBW.data_ptr()
        block.num_texts, block.depth = count, depth
        describe(makes, block)
        done = self._run(ctypes.addressof(block))
        if not done:
            raise IndexError("a pending token or the mask is not in the vocabulary")
        if done < 0:
            return None
        drafts = () if makes is None else makes.drafts()
        return Written(hidden_BSD, logits_KBW.transpose(0, 1), drafts)

    def _logits(self, num_rows: int, *, keeps: bool) -> Tensor:
        """Memory for rows of logits, which the next pass writes over unless a caller `keeps` it:
        new memory costs a moment for each of its pages."""
        if keeps:
            return torch.empty(num_rows, self._forward.num_logits)
        if len(self._logits_RW) < num_rows:
            self._logits_RW = torch.empty(num_rows, self._forward.num_logits)
        return self._logits_RW[:num_rows]
