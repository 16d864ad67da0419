"""The operators of an engine: `Kernels` has a function for each, and records where it runs.

Shapes:  N = packed tokens, M = logits rows, I = inputs, O = outputs, D = head or hidden size,
         F = feed-forward size, E = packed query, key and value heads, T = positions,
         H = head size / 2, G = key/value heads, S = slots, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.sampling import Sampling
from outrider.core.spec import DecoderConfig
from outrider.kernels.native.forward import (
    Forward,
    ForwardParts,
    MixtureSizes,
    MixtureWeights,
    NativeMixture,
)
from outrider.kernels.native.lookups import NativeLookups
from outrider.kernels.native.tuning import KernelTiming
from outrider.kernels.plan import (
    AttentionKind,
    BlockRows,
    Linear,
    PackedLinear,
    PackedPlan,
    PackedTable,
)
from outrider.kernels.reference.delta import Cells, DeltaWeights, StateShape, TokenRun
from outrider.kernels.reference.pointwise import verify_prefix

OPS = (
    "linear", "rms_norm", "layer_norm", "head_norm", "rope_append", "attention", "silu_mul",
    "sigmoid_mul", "gelu", "gelu_mul", "soft_cap", "delta", "argmax", "verify_prefix", "softmax",
    "pick", "leftover",
)  # fmt: skip


class Delta(Protocol):
    def __call__(
        self,
        first_NP: Tensor,
        weights: DeltaWeights,
        runs: Sequence[TokenRun],
        cells: Cells,
        layer: int,
        out_NO: Tensor,
        /,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation chosen for `op`, and why each one before it was refused.

    `kind` is vectors, dots or tiles (native/cpu.py), if the implementation has several kinds, `why`
    the reason for it, with `timings` if kinds were measured.
    """

    op: str
    name: str
    refusals: tuple[str, ...] = ()
    kind: str = ""
    why: str = ""
    timings: tuple[KernelTiming, ...] = ()


@dataclass(frozen=True, slots=True)
class Kernels:
    """The operators of a decoder. Activations are contiguous float32; callers allocate `out`.

    pack(weight_OI)                                   a weight in its dtype, packed for `linear`
    linear(x_NI, packed, out_NO, accumulate)          out (+)= x W^T
    rms_norm(x_ND, weight_D, eps, out_ND)
    layer_norm(x_ND, weight_D, bias_D, eps, out_ND)
    head_norm(qkv_NE, q_weight_D, k_weight_D, num_kv_heads, eps)
                                                      RMS norm of each q and k head, in place
    rope_append(qkv_NE, cos_TH, sin_TH, plan, k_GSD, v_GSD)
                                                      rotates q in place, writes k and v
    attention(qkv_NE, k_GSD, v_GSD, plan, how, out_NO)
                                                      `how` is an AttentionKind, or its scale alone
    silu_mul(gate_up_N2F, out_NF)                     silu(gate) * up
    sigmoid_mul(gate_NF, x_NF)                        x * sigmoid(gate), in place
    gelu(x_NF, out_NF)                                with tanh; `out` may be x
    gelu_mul(gate_up_N2F, out_NF)                     gelu(gate) * up
    soft_cap(x_NF, cap)                               cap * tanh(x / cap), in place
    delta(first_NP, weights, runs, cells, layer, out_NO)    a layer's gated delta rule
    argmax(logits_MV)                                 the first largest of each row, -1 for a NaN
    verify_prefix(logits_BKV, draft_ids_BK)           (accept_len_B, mask_BK) of greedy chains
    sampling                                          from logits to a token: core/sampling.py

    `argmax` and `verify_prefix` are host syncs. `pack_head`, if there is one, packs the output head
    in a format of its own; `pack_blocks` packs rows of a file, or returns None if it cannot.
    `table` makes a table of tokens from a matrix that either of them packed.

    `forward`, if there is one, runs a whole pass of a Llama-shaped decoder in one call, with the
    same bits; `mixture` makes one call of a router and its experts, which `mix` runs. `exact`: a
    row's bits depend on that row alone, in every operator; a `trial`, if any, must run to know it
    (kinds.py). `threads` is the number of threads of native operators, which never changes a bit.
    `lookups`, if any, serve drafters. `compile_ahead(work, size)` compiles the kernels that `work`
    launches (it has no effect), and those of sampling from `size` tokens.

    For lanes that run at once: `twin` makes operators over the same packed weights with their own
    scratch memory; `join_lane(number, threads)` gives the calling thread that lane's own team, and
    is None if there are no teams.
    """

    pack: Callable[[Tensor], PackedLinear]
    linear: Linear
    rms_norm: Callable[[Tensor, Tensor, float, Tensor], None]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float, Tensor], None]
    head_norm: Callable[[Tensor, Tensor, Tensor, int, float], None]
    rope_append: Callable[[Tensor, Tensor, Tensor, PackedPlan, Tensor, Tensor], None]
    attention: Callable[[Tensor, Tensor, Tensor, PackedPlan, AttentionKind | float, Tensor], None]
    silu_mul: Callable[[Tensor, Tensor], None]
    sigmoid_mul: Callable[[Tensor, Tensor], None]
    gelu: Callable[[Tensor, Tensor], None]
    gelu_mul: Callable[[Tensor, Tensor], None]
    soft_cap: Callable[[Tensor, float], None]
    delta: Delta
    argmax: Callable[[Tensor], list[int]]
    sampling: Sampling
    choices: tuple[Choice, ...]
    exact: bool
    pack_head: Callable[[Tensor], PackedLinear] | None = None
    pack_blocks: Callable[[Sequence[BlockRows]], PackedLinear | None] | None = None
    table: Callable[[PackedLinear, torch.dtype], PackedTable] | None = None
    forward: Callable[[ForwardParts], Forward] | None = None
    mixture: Callable[[MixtureSizes, MixtureWeights], NativeMixture] | None = None
    mix: Callable[[NativeMixture, Tensor, Tensor], None] = NativeMixture.__call__
    threads: Choice | None = None
    twin: Callable[[], Kernels] | None = None
    join_lane: Callable[[int, int], None] | None = None
    lookups: NativeLookups | None = None
    trial: Callable[[DecoderConfig, StateShape | None], bool] | None = None
    compile_ahead: Callable[[Callable[[], object], int], None] | None = None

    def verify_prefix(self, logits_BKV: Tensor, draft_ids_BK: Tensor) -> tuple[Tensor, Tensor]:
        return verify_prefix(logits_BKV, draft_ids_BK, self.argmax)
