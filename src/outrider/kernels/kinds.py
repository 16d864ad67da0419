"""Device, dtype and kernels that a model and the options of its load ask for.

Some layers attend in their own way (windows, soft caps, sinks: AttentionKind), kernels are known to
be `exact` after a trial of the model's shapes, and their binaries are compiled ahead of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.core.config import MORE_GPUS
from outrider.core.errors import CheckpointError, ConfigError, MachineError, did_you_mean, given
from outrider.core.protocols import CacheStore, StepRow
from outrider.core.spec import DecoderConfig
from outrider.core.tree import ROOT
from outrider.kernels.operators import OPS, Choice, Kernels
from outrider.kernels.reference.attention import TorchAttention
from outrider.kernels.reference.delta import StateShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """Raises MachineError if this machine lacks the device."""
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
            f"the device {name} was asked for, but PyTorch {torch.__version__} sees none.",
            hint=f"usable here: {usable}; or leave --device at auto",
        )
    return torch.device(name)


def pick_dtype(name: str, own: str, folder: Path) -> torch.dtype:
    """What `name` means for a checkpoint of type `own`."""
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


def changed(kernels: Kernels, change: Callable[[Kernels], Kernels]) -> Kernels:
    """`change` done to these and to their twins."""
    make = given(kernels.twin, "maker of such kernels")
    return replace(change(kernels), twin=lambda: changed(make(), change))


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
