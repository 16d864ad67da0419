"""Kernel registry: chooses every operator once, when an engine is built, and records the reason.

The order is fixed: native (compiled C++, on CPUs), Triton (on CUDA), then the reference (PyTorch,
anywhere). All operators come from one of these, so a model's arithmetic rounds in one way.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from outrider.core import env
from outrider.core.errors import given
from outrider.core.sampling import PLAIN
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.cpu import RULE, TILES, VECTORS
from outrider.kernels.native.forward import NativeForward
from outrider.kernels.native.layers import NativeDelta, NativeLatent, NativeMixture
from outrider.kernels.native.ops import (
    SUFFIXES,
    NativeGrouped,
    NativeInt4,
    NativeInt8,
    NativeOps,
    function,
    join_lane,
)
from outrider.kernels.native.rounds import NativeLookups
from outrider.kernels.native.sampling import native_sampling
from outrider.kernels.native.tuning import (
    attention_kind,
    kind_answer,
    refused_kinds,
    thread_answer,
)
from outrider.kernels.operators import OPS, Choice, Kernels, changed, decoder_ops
from outrider.kernels.reference import pointwise
from outrider.kernels.reference.attention import TorchAttention
from outrider.kernels.reference.delta import torch_delta
from outrider.kernels.reference.linear import (
    TorchGrouped,
    TorchInt8,
    TorchLinear,
    definition,
    pack_plain,
    pack_tiled,
)

# A value of `quantise` in `choose`, besides none and the schemes of kernels/reference/linear.py.
AS_STORED = "stored"

_Quantised = NativeInt8 | NativeInt4 | TorchInt8 | TorchGrouped

_log = logging.getLogger(__name__)


def choose(
    *,
    device: torch.device,
    dtype: torch.dtype,
    force_reference: bool = False,
    threads: int = 0,
    quantise: str = "none",
) -> Kernels:
    """Native or Triton kernels if they support this, else the reference. May compile for seconds.

    `dtype` is that of weights and arena. 0 threads mean the physical cores, or all hardware threads
    if they are measured to be faster. If `quantise` is int8 or int4, `pack` quantises and `linear`
    multiplies integers. With AS_STORED, native kernels keep the format of quantised files
    (`pack_blocks`); other kernels decode matrices to floats.
    """
    refusal = _why_not(device, dtype, force_reference)
    wanted = refusal is None
    if refusal is None:
        built = built_kernels(env.compiler(), env.cache_folder())
        if built.library is not None:
            own = quantise if quantise in ("none", "int8") else "none"
            kernels = _measured(built.library, built.folder, dtype, threads, own)
            return kernels if own == quantise else _grouped(kernels, built.library, quantise)
        refusal = built.refusal
    quantise = "none" if quantise == AS_STORED else quantise
    refusals = (f"native: {refusal}",)
    if device.type == "cuda" and not force_reference:
        # Imported here: the plugin of a device that most machines lack.
        from outrider.plugins.gpu.kernels.build import triton_kernels, why_not_triton

        no_triton = why_not_triton(device)
        if no_triton is None:
            return triton_kernels(device, dtype, quantise, refusals)
        refusals = (*refusals, f"triton: {no_triton}")
    why = "; ".join(refusals)
    if wanted:
        _warn(why)
    else:
        _log.info("Using the reference kernels: %s.", why)
    kernels = _reference(device, dtype, refusals)
    return kernels if quantise == "none" else _quantised(kernels, definition(quantise))


def is_native(device: torch.device, dtype: torch.dtype, force_reference: bool = False) -> bool:
    """True if `choose` takes native kernels for these. May compile (seconds, once)."""
    refused = _why_not(device, dtype, force_reference) is not None
    return not refused and built_kernels(env.compiler(), env.cache_folder()).library is not None


@cache
def _warn(why: str) -> None:
    """Log a warning once a process, though every model chooses kernels."""
    _log.warning("Using the reference kernels, which are slower: %s.", why)


def _measured(
    library: ctypes.CDLL, folder: Path | None, dtype: torch.dtype, threads: int, quantise: str
) -> Kernels:
    """Native kernels of the kind by rule, or the faster of equal bits, and the faster threads."""
    answer = kind_answer(library, dtype, quantise, folder)
    kind = answer.chosen
    team = _team(library, threads, folder)
    number, attends = int(team.name), attention_kind(library, dtype)
    make = partial(NativeOps, library, dtype, number, attention=attends)
    if quantise == "none":
        native = partial(make, kind=kind)
        kernels = _native(native, library)
    else:
        quantised = NativeInt8(library, number, kind=kind)
        kernels = _quantised(_native(make, library), quantised)
    refused = refused_kinds(library, dtype, quantise)
    wished, by_rule = env.linears(), quantise == "none" and dtype == torch.bfloat16
    wish = "as OUTRIDER_LINEARS says" if wished == kind else ""
    ruled = RULE if by_rule and wished is None else ""
    decided = wish or answer.why or ruled
    reasons = [decided, *(f"{name}: {why}" for name, why in refused.items())]
    why = "; ".join(filter(None, reasons))

    def described(kernels: Kernels) -> Kernels:
        own: dict[str, dict[str, Any]] = {}
        own["linear"] = {"kind": kind, "why": why, "timings": answer.timings}
        if attends == TILES:
            own["attention"] = {"kind": TILES, "why": "over bfloat16, by the rule of linears"}
        choices = tuple(replace(one, **own.get(one.op, {})) for one in kernels.choices)
        return replace(kernels, choices=choices, threads=team)

    return changed(kernels, described)


def _team(library: ctypes.CDLL, threads: int, folder: Path | None) -> Choice:
    if threads := threads or env.threads():
        return Choice("threads", str(threads), why="as the settings say")
    answer = thread_answer(library, folder)
    why = answer.why or "the physical cores; there are no other hardware threads"
    return Choice("threads", answer.chosen, why=why, timings=answer.timings)


def _quantised(kernels: Kernels, side: _Quantised) -> Kernels:
    linear, *others = kernels.choices
    own: dict[str, Any] = {"pack": side.pack, "linear": side.linear}
    own["choices"] = (replace(linear, name=f"{linear.name} {side.scheme}"), *others)
    if isinstance(side, NativeInt4 | TorchGrouped):
        own |= {"pack_head": side.pack_head, "table": side.table}
    return changed(kernels, lambda kernels: replace(kernels, **own))


def _grouped(kernels: Kernels, library: ctypes.CDLL, quantise: str) -> Kernels:
    """Native kernels with linears over blocks, for AS_STORED or int4."""
    threads = int(given(kernels.threads, "number of threads").name)
    linear, *others = kernels.choices
    # One layout and the same bits, so that the kind is no part of the model's identity.
    on_tiles = env.linears() in (None, TILES) and TILES not in refused_kinds(
        library, torch.bfloat16, "int4"
    )
    kind = TILES if on_tiles else VECTORS
    if quantise == "int4":
        why = "many rows on tiles" if on_tiles else ""
        kernels = replace(kernels, choices=(replace(linear, kind=VECTORS, why=why), *others))
        return _quantised(kernels, NativeInt4(library, threads, kind=kind))
    grouped = NativeGrouped(library, threads, kind=kind)
    own: dict[str, Any] = {"pack_blocks": grouped.pack, "table": grouped.table}
    own["choices"] = (replace(linear, name=f"{linear.name} blocks"), *others)
    return changed(kernels, lambda one: replace(one, linear=grouped.with_plain(one.linear), **own))


def _why_not(device: torch.device, dtype: torch.dtype, force_reference: bool) -> str | None:
    """The reason why native kernels cannot be used, found before any compiler runs."""
    if force_reference:
        return "the reference was requested"
    if device.type != "cpu":
        return f"it runs on cpu, not on {device.type}"
    if dtype not in SUFFIXES:
        *others, last, own = *SUFFIXES.values(), str(dtype).removeprefix("torch.")
        return f"it computes in {', '.join(others)} and {last}, not in {own}"
    return None


def _native(make: Callable[[], NativeOps], library: ctypes.CDLL) -> Kernels:
    ops = make()
    return Kernels(
        **decoder_ops(ops),
        delta=NativeDelta(function(library, "delta"), ops.team),
        argmax=ops.argmax,
        sampling=native_sampling(library, ops.team),
        choices=tuple(Choice(op, "native") for op in OPS),
        exact=True,
        forward=partial(NativeForward, ops, library),
        mixture=partial(NativeMixture, library, ops.team),
        latent=partial(NativeLatent, library, ops.team),
        twin=lambda: _native(make, library),
        join_lane=partial(join_lane, library),
        lookups=NativeLookups(library, ops.team),
    )


def _reference(device: torch.device, dtype: torch.dtype, refusals: tuple[str, ...]) -> Kernels:
    exact = device.type == "cpu"
    return Kernels(
        pack=pack_tiled if exact else pack_plain,
        linear=TorchLinear(dtype),
        rms_norm=pointwise.rms_norm,
        layer_norm=pointwise.layer_norm,
        head_norm=pointwise.head_norm,
        rope_append=pointwise.rope_append,
        attention=TorchAttention(alone=exact),
        silu_mul=pointwise.silu_mul_by_row if exact else pointwise.silu_mul,
        sigmoid_mul=pointwise.sigmoid_mul_by_row if exact else pointwise.sigmoid_mul,
        gelu=pointwise.gelu_by_row if exact else pointwise.gelu,
        gelu_mul=pointwise.gelu_mul_by_row if exact else pointwise.gelu_mul,
        soft_cap=pointwise.soft_cap_by_row if exact else pointwise.soft_cap,
        delta=torch_delta,
        argmax=pointwise.argmax,
        sampling=PLAIN,
        choices=tuple(Choice(op, "reference", refusals) for op in OPS),
        exact=exact,
        twin=lambda: _reference(device, dtype, refusals),
    )
