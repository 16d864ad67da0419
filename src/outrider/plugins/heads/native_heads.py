"""Drafts of heads in one native call: Medusa heads, Hydra heads and MLP speculators.

See csrc/head_drafts.cpp; medusa.py and paths.py define the heads, operator by operator.

Shapes:  B = texts, D = hidden size, V = vocabulary, W = ids that are drafted, Z = inner size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import NumericsError
from outrider.core.protocols import DraftRow
from outrider.drafters.common.growth import DraftSampler
from outrider.kernels.native.ops import SUFFIXES, LinearStruct, function, pointer, struct_fields
from outrider.kernels.native.rounds import NativeLookups
from outrider.kernels.operators import Kernels, rows_of
from outrider.kernels.plan import PackedLinear
from outrider.plugins.heads.native_choice import ChoiceStruct, Chooser, TreeShapes, describe


@dataclass(frozen=True, slots=True)
class Step:
    """A change of x to `across` x, or x itself, plus silu of `linear` x."""

    linear: PackedLinear
    bias_D: Tensor | None
    across: PackedLinear | None = None
    across_bias_D: Tensor | None = None

    def run(self, kernels: Kernels, x_MX: Tensor) -> Tensor:
        """Return x after the change. Its operators define those of native calls."""
        added_MD = rows_of(kernels, x_MX, self.linear, self.bias_D)
        kernels.sigmoid_mul(added_MD.clone(), added_MD)
        if self.across is None:
            return added_MD.add_(x_MX)
        return added_MD.add_(rows_of(kernels, x_MX, self.across, self.across_bias_D))


@dataclass(frozen=True, slots=True)
class Mix:
    """The next state of an MLP speculator, of the last one and of a token's row of `table_VZ`."""

    table_VZ: Tensor
    inner: PackedLinear
    norm_Z: Tensor
    shift_Z: Tensor


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """One head: `steps`, or a `mix`, and then the matrix `last`."""

    last: PackedLinear
    bias_V: Tensor | None = None
    steps: Sequence[Step] = ()
    mix: Mix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsShape:
    """Heads of a state of `size` numbers, that draft all positions at once, with `trees`, or along
    paths, whose `embeddings_VD` grounded heads read. A `Mix` multiplies its last state by `keep`
    and the token's row by `share`; `eps` is that of its norm."""

    size: int
    trees: TreeShapes | None = None
    embeddings_VD: Tensor | None = None
    keep: float = 0.0
    share: float = 0.0
    eps: float = 0.0


class _Step(Structure):
    _fields_ = struct_fields((LinearStruct, "linear across"))


class _Head(Structure):
    _fields_ = struct_fields(
        (c_void_p, "steps"),
        (LinearStruct, "inner last"),
        (c_void_p, "table norm shift"),
        (c_int32, "num_steps unused"),
    )


class _Drafts(ChoiceStruct):
    _fields_ = struct_fields(
        (c_void_p, "heads states pending embeddings"),
        (c_float, "keep share eps"),
        (c_int32, "dtype size inner_size"),
    )


class NativeHeads:
    """Drafts of `heads` in one call, with the choices of `sampler`. Holds every tensor that native
    code points to. Not thread-safe: every call reuses the buffers."""

    def __init__(
        self,
        native: NativeLookups,
        heads: Sequence[HeadWeights],
        shape: HeadsShape,
        sampler: DraftSampler,
    ) -> None:
        self._heads, self._shape = heads, shape
        self._steps = [_steps(head.steps) for head in heads]
        self._described = (_Head * len(heads))(*map(_described, heads, self._steps))
        vocab_size = heads[0].last.num_out
        self._chooser = Chooser(sampler, vocab_size, trees=shape.trees)
        self._logits_RV = torch.empty(0, vocab_size)
        mix = heads[0].mix
        table = mix.table_VZ if mix else shape.embeddings_VD
        self._drafts = _Drafts(
            team=native.team,
            num_logits=vocab_size,
            vocab_size=vocab_size,
            at_once=shape.trees is not None,
            heads=ctypes.addressof(self._described),
            embeddings=pointer(shape.embeddings_VD),
            keep=shape.keep,
            share=shape.share,
            eps=shape.eps,
            dtype=0 if table is None else list(SUFFIXES).index(table.dtype),
            size=shape.size,
            inner_size=mix.inner.num_out if mix else 0,
        )
        self._run = function(native.library, "head_drafts")

    @classmethod
    def of(
        cls,
        kernels: Kernels,
        heads: Sequence[HeadWeights],
        shape: HeadsShape,
        sampler: DraftSampler,
    ) -> NativeHeads | None:
        """Return the call; None without native kernels."""
        if kernels.forward is None or kernels.lookups is None:
            return None
        return cls(kernels.lookups, heads, shape, sampler)

    def __call__(self, rows: Sequence[DraftRow], states_BD: Tensor) -> list[Draft] | None:
        """Draft below the states, float32, each to its budget; None if the call cannot. Raises
        NumericsError for logits that are no numbers."""
        made = self._chooser.made(rows)
        if made is None:
            return None
        call, count = self._drafts, len(rows)
        call.num_texts, call.depth = count, max(row.budget.depth for row in rows)
        pending = (c_int64 * count)(*(row.tokens[-1] for row in rows))
        states_BD = states_BD.contiguous()
        call.states, call.pending = states_BD.data_ptr(), ctypes.addressof(pending)
        num_rows = count * call.depth if call.at_once else made.most_rows
        if len(self._logits_RV) < num_rows:
            self._logits_RV = torch.empty(num_rows, self._logits_RV.shape[1])
        call.logits = self._logits_RV.data_ptr()
        describe(made, call)
        done = self._run(ctypes.addressof(call))
        if not done:
            raise IndexError("a pending token is not in the vocabulary")
        if done < 0:
            self._chooser.shapings.check()
            raise NumericsError(self._chooser.model_name)
        return made.drafts()


def _steps(steps: Sequence[Step]) -> ctypes.Array[_Step]:
    described = (_Step * len(steps))()
    for own, step in zip(described, steps, strict=True):
        own.linear = LinearStruct.of(step.linear, step.bias_D)
        if step.across is not None:
            own.across = LinearStruct.of(step.across, step.across_bias_D)
    return described


def _described(head: HeadWeights, steps: ctypes.Array[_Step]) -> _Head:
    found = _Head(ctypes.addressof(steps), last=LinearStruct.of(head.last, head.bias_V))
    found.num_steps = len(steps)
    if head.mix is not None:
        found.inner = LinearStruct.of(head.mix.inner, None)
        found.table = head.mix.table_VZ.data_ptr()
        found.norm, found.shift = head.mix.norm_Z.data_ptr(), head.mix.shift_Z.data_ptr()
    return found
