"""The operators of an engine: `Kernels` has a function for each, and records where it runs.

Functions below pick the device and the dtype of a load. Some layers attend differently (windows,
soft caps, sinks: AttentionKind). A trial on the model's shapes shows whether kernels are `exact`,
and their binaries are compiled ahead of requests.

Shapes:  N = packed tokens, M = logits rows, I = inputs, O = outputs, D = head or hidden size,
         F = feed-forward size, E = packed query, key and value heads, T = positions,
         H = head size / 2, G = key/value heads, S = slots, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core.config import MORE_GPUS
from outrider.core.errors import CheckpointError, ConfigError, MachineError, did_you_mean, given
from outrider.core.protocols import CacheStore, StepRow
from outrider.core.sampling import Sampling
from outrider.core.spec import DecoderConfig, StateShape
from outrider.core.tree import ROOT
from outrider.kernels.native.forward import Forward, ForwardParts
from outrider.kernels.native.layers import (
    LatentWeights,
    MixtureSizes,
    MixtureWeights,
    NativeLatent,
    NativeMixture,
)
from outrider.kernels.native.rounds import NativeLookups
from outrider.kernels.native.tuning import KernelTiming
from outrider.kernels.plan import (
    AttentionKind,
    BlockRows,
    Linear,
    PackedLinear,
    PackedPlan,
    PackedTable,
)
from outrider.kernels.reference.attention import TorchAttention
from outrider.kernels.reference.delta import Cells, DeltaWeights, TokenRun, torch_delta
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
                                                      rotates q in place, writes k and v; only k
                                                      if both are the same memory
    attention(qkv_NE, k_GSD, v_GSD, plan, how, out_NO)
                                                      `how` is an AttentionKind, or its scale alone
    silu_mul(gate_up_N2F, out_NF)                     silu(gate) * up
    sigmoid_mul(gate_NF, x_NF)                        x * sigmoid(gate), in place
    gelu(x_NF, out_NF)                                with tanh; `out` may be x
    gelu_mul(gate_up_N2F, out_NF)                     gelu(gate) * up
    soft_cap(x_NF, cap)                               cap * tanh(x / cap), in place
    delta(first_NP, weights, runs, cells, layer, out_NO)    a layer's recurrence
    argmax(logits_MV)                                 the first largest of each row, -1 for a NaN
    verify_prefix(logits_BKV, draft_ids_BK)           (accept_len_B, mask_BK) of greedy chains
    sampling                                          from logits to a token: core/sampling.py

    `argmax` and `verify_prefix` are host syncs. `pack_head`, if there is one, packs the output head
    in a format of its own; `pack_blocks` packs rows of a file, or returns None if it cannot.
    `table` makes a table of tokens from a matrix that either of them packed.

    `forward`, if there is one, runs a whole pass of a Llama-shaped decoder in one call, with the
    same bits; `mixture` makes one call of a router and its experts, which `mix` runs, and `latent`
    two of the products around latent attention, `latent_queries` and `latent_values`. `exact`: a
    row's bits depend on that row alone, in every operator; a `trial`, if any, must run to know it
    (`tried`). `threads` is the number of threads of native operators, which never changes a bit.
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
    latent: Callable[[LatentWeights], NativeLatent] | None = None
    latent_queries: Callable[..., None] = NativeLatent.queries
    latent_values: Callable[..., None] = NativeLatent.values
    threads: Choice | None = None
    twin: Callable[[], Kernels] | None = None
    join_lane: Callable[[int, int], None] | None = None
    lookups: NativeLookups | None = None
    trial: Callable[[DecoderConfig, StateShape | None], bool] | None = None
    compile_ahead: Callable[[Callable[[], object], int], None] | None = None

    def verify_prefix(self, logits_BKV: Tensor, draft_ids_BK: Tensor) -> tuple[Tensor, Tensor]:
        return verify_prefix(logits_BKV, draft_ids_BK, self.argmax)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device that `name` means. Raises MachineError if this machine lacks it."""
    present = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    num_gpus = torch.cuda.device_count() if present["cuda"] else 0
    present |= {gpu: number < num_gpus for number, gpu in enumerate(MORE_GPUS, 1)}
    if name == "auto":
        return torch.device(next(device for device, there in present.items() if there))
    if name not in present:
        raise ConfigError(f"device: unknown value {name!r}.", hint=did_you_mean(name, present))
    if not present[name]:
        usable = ", ".join(device for device, there in present.items() if there)
        raise MachineError(
            f"the device {name} was requested, but PyTorch {torch.__version__} sees none.",
            hint=f"usable here: {usable}; or leave --device at auto",
        )
    return torch.device(name)


def pick_dtype(name: str, own: str, folder: Path) -> torch.dtype:
    """The dtype that `name` means for a checkpoint of dtype `own`."""
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError(f"dtype: unknown value {name!r}.", hint=did_you_mean(name, DTYPES))
        return DTYPES[name]
    if own not in DTYPES:
        raise CheckpointError(
            f"{folder} has weights of type {own}, which no kernel takes.",
            hint=f"choose one with --dtype: {', '.join(DTYPES)}",
        )
    return DTYPES[own]


def for_kinds(kernels: Kernels) -> Kernels:
    """Kernels for layers that attend differently. Triton's attention supports only a scale, so the
    reference's attention replaces it, in which rows are not invariant."""
    own: dict[str, Any] = {"exact": False, "trial": None}
    return _by_reference(
        kernels, "attention", TorchAttention(alone=False), "no windows, caps or sinks", **own
    )


def for_scans(kernels: Kernels) -> Kernels:
    """Kernels for Mamba-2 and convolutions alone. Triton has only gated delta rules, so the
    reference's operator replaces it, which computes each token by itself."""
    return _by_reference(kernels, "delta", torch_delta, "gated delta rules only")


def _by_reference(kernels: Kernels, op: str, own: object, has: str, **more: Any) -> Kernels:
    """`kernels` with the reference's `own` operator in place of Triton's `op`, which `has` less."""
    index = OPS.index(op)
    if kernels.choices[index].name != "triton":
        return kernels
    chosen = list(kernels.choices)
    chosen[index] = Choice(op, "reference", (*chosen[index].refusals, f"triton: it has {has}"))
    parts: dict[str, Any] = {op: own, "choices": tuple(chosen), **more}
    return changed(kernels, lambda one: replace(one, **parts))


def decoder_ops(side: object) -> dict[str, Any]:
    """Return the operators of a decoder's layers, which `side` has under the names of `Kernels`."""
    return {name: getattr(side, name) for name in ("pack", *OPS[: OPS.index("delta")])}


class HasKernels(Protocol):
    """A model that reads its kernels at every call."""

    @property
    def kernels(self) -> Kernels: ...
    @kernels.setter
    def kernels(self, kernels: Kernels, /) -> None: ...


def changed(kernels: Kernels, change: Callable[[Kernels], Kernels]) -> Kernels:
    """`kernels` after `change`, which also applies to their twins."""
    make = given(kernels.twin, "maker of such kernels")
    return replace(change(kernels), twin=lambda: changed(make(), change))


def tried(kernels: Kernels, config: DecoderConfig, delta: StateShape | None = None) -> Kernels:
    """`kernels` with the result of their trial, if they have one: on the weights that they have
    packed so far, the attention of `config` and recurrent layers of shape `delta`."""
    if kernels.trial is None:
        return kernels
    exact = kernels.trial(config, delta)
    return changed(kernels, lambda one: replace(one, exact=exact, trial=None))


# The id of a sequence that neither a request nor a hybrid's memory has.
_NO_ID = -2


def compile_ahead(
    kernels: Kernels, vocab_size: int, state: CacheStore, step: Callable[[StepRow], object]
) -> None:
    """Compile kernels of a `step` over a chain and a tree and of sampling, if need be."""

    def passes() -> None:
        for parents in ((ROOT, 0), (ROOT, ROOT)):
            state.open(_NO_ID, ())
            step(StepRow(_NO_ID, (0, 0), parents, logits_from=1))
            state.close(_NO_ID)

    if kernels.compile_ahead is not None:
        kernels.compile_ahead(passes, vocab_size)


def rows_of(
    kernels: Kernels, x: Tensor, packed: PackedLinear, bias: Tensor | None = None
) -> Tensor:
    """Multiply rows of any leading shape."""
    rows = x.flatten(0, -2).contiguous()
    out = rows.new_empty(len(rows), packed.num_out)
    kernels.linear(rows, packed, out)
    if bias is not None:
        out.add_(bias)
    return out.view(*x.shape[:-1], packed.num_out)


def normed(kernels: Kernels, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the normed rows in new memory."""
    out_ND = torch.empty_like(x_ND)
    kernels.rms_norm(x_ND, weight_D, eps, out_ND)
    return out_ND


def own_kernels(kernels: Kernels) -> Kernels:
    """Return a target's operators with other scratch: heads draft while a lane verifies."""
    return kernels if kernels.twin is None else kernels.twin()
