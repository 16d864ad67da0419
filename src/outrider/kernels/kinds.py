"""Kernels that follow from the model: for layers that attend in their own way (windows, soft caps,
sinks: AttentionKind), and `exact` after a trial of the model's shapes."""

from __future__ import annotations

from dataclasses import replace

from outrider.core.errors import given
from outrider.core.spec import DecoderConfig
from outrider.kernels.reference.attention import TorchAttention
from outrider.kernels.reference.delta import StateShape
from outrider.kernels.registry import OPS, Choice, Kernels


def for_kinds(kernels: Kernels) -> Kernels:
    """The same kernels where they know such layers. Triton's attention knows scales alone, so the
    reference's takes its place, in which rows are not alike."""
    place = OPS.index("attention")
    if kernels.choices[place].name != "triton":
        return kernels
    choices = list(kernels.choices)
    reason = "triton: it has no windows, caps or sinks"
    choices[place] = Choice("attention", "reference", (*choices[place].refusals, reason))
    make = given(kernels.twin, "maker of such kernels")
    return replace(
        kernels,
        attention=TorchAttention(alone=False),
        choices=tuple(choices),
        exact=False,
        twin=lambda: for_kinds(make()),
        trial=None,
    )


def tried(kernels: Kernels, config: DecoderConfig, delta: StateShape | None = None) -> Kernels:
    """`kernels` with the answer of their trial, if they have one, by the weights that they have
    packed by now, the attention of `config` and recurrent layers of shape `delta`."""
    return kernels if kernels.trial is None else _known(kernels, kernels.trial(config, delta))


def _known(kernels: Kernels, exact: bool) -> Kernels:
    make = given(kernels.twin, "maker of such kernels")
    return replace(kernels, exact=exact, trial=None, twin=lambda: _known(make(), exact))
