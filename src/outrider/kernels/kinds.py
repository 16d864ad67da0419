"""Kernels that follow from the model: for layers that attend in their own way (windows, soft caps,
sinks: AttentionKind), `exact` after a trial of the model's shapes, and binaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outrider.core.protocols import CacheStore, StepRow
from outrider.core.spec import DecoderConfig
from outrider.core.tree import ROOT
from outrider.kernels.reference.attention import TorchAttention
from outrider.kernels.reference.delta import StateShape
from outrider.kernels.registry import OPS, Choice, Kernels, changed


def for_kinds(kernels: Kernels) -> Kernels:
    """The same kernels where they know such layers. Triton's attention knows scales alone, so the
    reference's takes its place, in which rows are not alike."""
    place = OPS.index("attention")
    if kernels.choices[place].name != "triton":
        return kernels
    reason = "triton: it has no windows, caps or sinks"
    chosen = list(kernels.choices)
    chosen[place] = Choice("attention", "reference", (*chosen[place].refusals, reason))
    own: dict[str, Any] = {"choices": tuple(chosen), "exact": False, "trial": None}
    return changed(kernels, lambda one: replace(one, attention=TorchAttention(alone=False), **own))


def tried(kernels: Kernels, config: DecoderConfig, delta: StateShape | None = None) -> Kernels:
    """`kernels` with the answer of their trial, if they have one, by the weights that they have
    packed by now, the attention of `config` and recurrent layers of shape `delta`."""
    if kernels.trial is None:
        return kernels
    exact = kernels.trial(config, delta)
    return changed(kernels, lambda one: replace(one, exact=exact, trial=None))


# A sequence that no request has, nor a hybrid's memory.
_NO_ID = -2


def compile_ahead(
    kernels: Kernels, vocab_size: int, state: CacheStore, step: Callable[[StepRow], object]
) -> None:
    """Compile, where kernels are compiled at all, those of a `step` over a chain, of one over a
    tree, and those that choose tokens."""

    def passes() -> None:
        for parents in ((ROOT, 0), (ROOT, ROOT)):
            state.open(_NO_ID, ())
            step(StepRow(_NO_ID, (0, 0), parents, logits_from=1))
            state.close(_NO_ID)

    if kernels.compile_ahead is not None:
        kernels.compile_ahead(passes, vocab_size)
