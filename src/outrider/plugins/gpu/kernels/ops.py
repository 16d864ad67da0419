# Kernels have no types.
# pyright: reportUnknownMemberType=false
"""Operators of a decoder on CUDA: launches of Triton kernels, fit for a CUDA graph.

Lengths, tables and slots are read on the device. Nothing waits for it, and only `pack` and scratch
memory that is too small allocate. The same shapes launch the same kernels with the same grid. `out`
and `x` may be float32 or the dtype of the weights: a norm with an `out` of the latter rounds what
the next linear would round, to the same bits, and halves its reads. Row-invariance: tiles have 16
rows whatever the number of rows, sizes depend on the weight's shape and dtype alone, no dot product
is split, and nothing is tuned at run time.

Shapes:  N = packed tokens or rows, I = inputs, O = outputs, D = head or hidden size,
         F = feed-forward size, E = packed query, key and value heads, T = positions, H = D / 2,
         G = key/value heads, S = slots, V = vocabulary, A = query heads, P = parts of the context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import ContractError
from outrider.kernels.plan import AttentionKind, PackedLinear, PackedPlan, same_memory
from outrider.kernels.reference import pointwise as plain
from outrider.kernels.reference.linear import GROUP
from outrider.plugins.gpu.kernels import attention, linear, pointwise
from outrider.plugins.gpu.kernels.scratch import Workspace, attention_scratch
from outrider.plugins.gpu.kernels.tiles import (
    ROWS,
    AttentionShape,
    attention_shape,
    cdiv,
    launch,
    linear_shape,
    num_warps,
    pack,
    pack_head,
    padded_inputs,
    power_of_two,
)

# Groups of a row that one program quantises.
_GROUPS_AT_ONCE = 32


class TritonOps:
    """The operators of one stream. `scheme` is none, int8 or int4, and applies to linears only.
    `forms` has one packed weight for each binary that the weights packed here need."""

    __slots__ = ("_workspace", "forms", "scheme")

    def __init__(self, workspace: Workspace, scheme: str = "none") -> None:
        self._workspace, self.scheme = workspace, scheme
        self.forms: dict[object, PackedLinear] = {}

    def pack(self, weight_OI: Tensor) -> PackedLinear:
        """Pack a weight, at load. A contiguous weight that is not quantised is used itself."""
        return self._noted(pack(weight_OI, self.scheme))

    def pack_head(self, weight_OI: Tensor) -> PackedLinear:
        """Pack an output head, at load."""
        return self._noted(pack_head(weight_OI, self.scheme))

    def _noted(self, packed: PackedLinear) -> PackedLinear:
        dtype, sizes = packed.data.dtype, (packed.num_in, packed.num_out)
        shape = linear_shape(packed.num_out, dtype)
        # Triton makes another binary of sizes that are multiples of 16.
        steps = [size % step == 0 for size in sizes for step in (16, shape.inputs)]
        self.forms.setdefault((shape, dtype, *steps), packed)
        return packed

    def linear(
        self, x_NI: Tensor, packed: PackedLinear, out_NO: Tensor, accumulate: bool = False
    ) -> None:
        """out (+)= round(x) W^T, summed in float32; integers as kernels/reference defines."""
        num_rows, num_in = x_NI.shape
        assert num_in == packed.num_in
        assert x_NI.stride(1) == 1
        assert out_NO.stride(1) == 1
        if packed.scales is not None:
            multiply = self._int8 if packed.scales.ndim == 1 else self._groups
            multiply(x_NI, packed, packed.scales, (out_NO, accumulate))
            return
        shape = linear_shape(packed.num_out, packed.data.dtype)
        launch(
            linear.linear_kernel,
            (cdiv(num_rows, ROWS), cdiv(packed.num_out, shape.outputs)),
            x_NI, packed.data, out_NO, num_rows, num_in, packed.num_out,
            x_NI.stride(0), out_NO.stride(0),
            ACCUMULATE=accumulate,
            WHOLE=num_in % shape.inputs == 0,
            ROWS=ROWS,
            OUTPUTS=shape.outputs,
            INPUTS=shape.inputs,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )  # fmt: skip

    def _int8(
        self, x_NI: Tensor, packed: PackedLinear, scale_O: Tensor, result: tuple[Tensor, bool]
    ) -> None:
        num_rows, num_in = x_NI.shape
        padded_in = padded_inputs(num_in)
        values_NI, scale_N = self._workspace.carve(
            ((num_rows, padded_in), torch.int8), ((num_rows,), torch.float32)
        )
        launch(
            linear.quantise_kernel,
            (num_rows,),
            x_NI, values_NI, scale_N, num_in, padded_in, x_NI.stride(0),
            BLOCK=min(power_of_two(padded_in), 4096),
            num_warps=8,
        )  # fmt: skip
        self._multiply(linear.int8_kernel, (values_NI, scale_N), packed, scale_O, result)

    def _groups(
        self, x_NI: Tensor, packed: PackedLinear, factors_FGO: Tensor, result: tuple[Tensor, bool]
    ) -> None:
        num_rows, num_in = x_NI.shape
        padded_in = padded_inputs(num_in)
        num_groups = padded_in // GROUP
        values_NI, factors_2NG = self._workspace.carve(
            ((num_rows, padded_in), torch.int8), ((2, num_rows, num_groups), torch.float32)
        )
        launch(
            linear.quantise_groups_kernel,
            (num_rows, cdiv(num_groups, _GROUPS_AT_ONCE)),
            x_NI, values_NI, factors_2NG, num_rows, num_in, padded_in, x_NI.stride(0),
            GROUPS=_GROUPS_AT_ONCE,
            num_warps=4,
        )  # fmt: skip
        rows = (values_NI, factors_2NG)
        has_min = len(factors_FGO) == 2
        self._multiply(linear.groups_kernel, rows, packed, factors_FGO, result, HAS_MIN=has_min)

    def _multiply(
        self,
        kernel: Any,
        rows: tuple[Tensor, Tensor],
        packed: PackedLinear,
        scales: Tensor,
        result: tuple[Tensor, bool],
        **constants: Any,
    ) -> None:
        """Multiply quantised rows by a packed weight."""
        (values_NI, row_factors), (out_NO, accumulate) = rows, result
        num_rows, padded_in = values_NI.shape
        shape = linear_shape(packed.num_out, packed.data.dtype)
        launch(
            kernel,
            (cdiv(num_rows, ROWS), cdiv(packed.num_out, shape.outputs)),
            values_NI, row_factors, packed.data, scales, out_NO,
            num_rows, padded_in, packed.num_out, out_NO.stride(0),
            ACCUMULATE=accumulate,
            ROWS=ROWS,
            OUTPUTS=shape.outputs,
            INPUTS=shape.inputs,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            **constants,
        )  # fmt: skip

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, eps: float, out_ND: Tensor) -> None:
        """x / sqrt(mean(x^2) + eps) * weight; `out` may be x."""
        self._norm(x_ND, (weight_D, weight_D), eps, out_ND, centred=False)

    def layer_norm(
        self, x_ND: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, out_ND: Tensor
    ) -> None:
        """The RMS norm of the centred row, plus a bias; `out` may be x."""
        self._norm(x_ND, (weight_D, bias_D), eps, out_ND, centred=True)

    def _norm(
        self,
        x_ND: Tensor,
        tables: tuple[Tensor, Tensor],
        eps: float,
        out_ND: Tensor,
        *,
        centred: bool,
    ) -> None:
        num_rows, size = x_ND.shape
        launch(
            pointwise.norm_kernel,
            (num_rows,),
            x_ND, *tables, out_ND, size, x_ND.stride(0), out_ND.stride(0), eps,
            CENTRED=centred,
            BLOCK=power_of_two(size),
            num_warps=num_warps(size),
        )  # fmt: skip

    def head_norm(
        self, qkv_NE: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, num_kv_heads: int, eps: float
    ) -> None:
        """RMS norm of each query and key head, in place."""
        head_dim = q_weight_D.shape[0]
        num_heads = qkv_NE.shape[1] // head_dim - 2 * num_kv_heads
        launch(
            pointwise.head_norm_kernel,
            (qkv_NE.shape[0], num_heads + num_kv_heads),
            qkv_NE, q_weight_D, k_weight_D, head_dim // 2, num_heads, qkv_NE.stride(0), eps,
            BLOCK=power_of_two(head_dim // 2),
            num_warps=1,
        )  # fmt: skip

    def rope_append(
        self,
        qkv_NE: Tensor,
        cos_TH: Tensor,
        sin_TH: Tensor,
        plan: PackedPlan,
        k_GSD: Tensor,
        v_GSD: Tensor,
    ) -> None:
        """Rotate queries and keys in place; write keys and values. A token with a negative slot
        writes nothing: so a captured graph leaves a row out."""
        num_kv_heads, _, head_dim = k_GSD.shape
        assert k_GSD.stride() == v_GSD.stride()
        num_all = qkv_NE.shape[1] // head_dim
        launch(
            pointwise.rope_append_kernel,
            (plan.num_tokens, num_all - num_kv_heads * same_memory(k_GSD, v_GSD)),
            qkv_NE, cos_TH, sin_TH, plan.positions_N, plan.slots_N, k_GSD, v_GSD,
            num_all - 2 * num_kv_heads, num_kv_heads, qkv_NE.stride(0),
            k_GSD.stride(0), k_GSD.stride(1),
            HALF=head_dim // 2,
            BLOCK=power_of_two(head_dim // 2),
            num_warps=1,
        )  # fmt: skip

    def attention(
        self,
        qkv_NE: Tensor,
        k_GSD: Tensor,
        v_GSD: Tensor,
        plan: PackedPlan,
        how: AttentionKind | float,
        out_NO: Tensor,
    ) -> None:
        """Softmax over exactly the keys that the plan names; a token without keys gets zeros.

        Windows, caps and sinks are left to the reference (`for_kinds`). Many rows over long
        contexts take several launches, so that scratch memory stays small.
        """
        if isinstance(how, AttentionKind):
            raise ContractError("this attention has no windows, caps or sinks")
        num_kv_heads, _, head_dim = k_GSD.shape
        assert k_GSD.stride() == v_GSD.stride()
        assert k_GSD.stride(2) == 1
        shape = attention_shape(
            num_heads=out_NO.shape[1] // head_dim,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=k_GSD.dtype,
        )
        num_parts = cdiv(plan.pages_BP.shape[1] * plan.page_size, shape.part)
        scratch = attention_scratch(plan.num_tokens, shape.num_heads, head_dim, num_parts)
        views, (step, *_) = self._workspace.carve(*scratch), scratch[0][0]
        for first in range(0, plan.num_tokens, step):
            rows = (first, min(first + step, plan.num_tokens), num_parts)
            self._attend(qkv_NE, (k_GSD, v_GSD, *views), (plan, rows), (shape, how), out_NO)

    def _attend(
        self,
        qkv_NE: Tensor,
        memory: tuple[Tensor, ...],
        which: tuple[PackedPlan, tuple[int, int, int]],
        how: tuple[AttentionShape, float],
        out_NO: Tensor,
    ) -> None:
        k_GSD, v_GSD, best_NAP, total_NAP, mixed_NAPD = memory
        (plan, (first, end, num_parts)), (shape, scale) = which, how
        tokens = shape.tokens_of_a_tile(plan.num_tokens, plan.pages_BP.shape[0])
        parts = best_NAP.shape[2]
        listed = plan.extra_slots_E is not None
        offsets_N1 = plan.extra_offsets_N1 if listed else plan.visible_N
        extra_E = plan.extra_slots_E if listed else plan.visible_N
        launch(
            attention.attend_kernel,
            (cdiv(end - first, tokens), shape.num_kv_heads * shape.head_tiles, num_parts),
            qkv_NE, k_GSD, v_GSD, plan.seq_N, plan.visible_N, offsets_N1, extra_E, plan.pages_BP,
            best_NAP, total_NAP, mixed_NAPD, first, end, tokens, parts,
            plan.pages_BP.shape[1], plan.page_size, qkv_NE.stride(0),
            k_GSD.stride(0), k_GSD.stride(1), scale,
            LISTED=listed,
            HEAD_DIM=shape.head_dim,
            DIMS=shape.dims,
            SHARED=shape.shared,
            HEADS=shape.heads_of_a_tile,
            KEYS=shape.keys,
            PART=shape.part,
            ROWS=ROWS,
            **shape.options(),
        )  # fmt: skip
        launch(
            attention.merge_kernel,
            (end - first, shape.num_heads),
            plan.visible_N, offsets_N1, best_NAP, total_NAP, mixed_NAPD, out_NO, first, parts,
            out_NO.stride(0),
            LISTED=listed,
            HEAD_DIM=shape.head_dim,
            DIMS=shape.dims,
            PART=shape.part,
            PARTS=shape.merged,
            **shape.merge_options(),
        )  # fmt: skip

    def silu_mul(self, gate_up_N2F: Tensor, out_NF: Tensor) -> None:
        """silu(gate) * up."""
        _activate(pointwise.silu_mul_kernel, gate_up_N2F, out_NF)

    def gelu(self, x_NF: Tensor, out_NF: Tensor) -> None:
        """GELU with tanh; `out` may be x."""
        _activate(pointwise.gelu_kernel, x_NF, out_NF)

    # These compute each row by itself, whatever the number of rows.
    sigmoid_mul = staticmethod(plain.sigmoid_mul)
    gelu_mul = staticmethod(plain.gelu_mul)
    soft_cap = staticmethod(plain.soft_cap)


def _activate(kernel: Any, x: Tensor, out_NF: Tensor) -> None:
    num_rows, size = out_NF.shape
    launch(
        kernel,
        (num_rows, cdiv(size, pointwise.BLOCK)),
        x, out_NF, size, x.stride(0), out_NF.stride(0), BLOCK=pointwise.BLOCK, num_warps=4,
    )  # fmt: skip
