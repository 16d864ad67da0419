"""Device, dtype and kernels for a model and the options of its load.

Some layers attend differently (windows, soft caps, sinks: AttentionKind). A trial on the model's
shapes shows whether kernels are `exact`, and their binaries are compiled ahead of requests.
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
    index = OPS.index("attention")
    if kernels.choices[index].name != "triton":
        return kernels
    reason = "triton: it has no windows, caps or sinks"
    chosen = list(kernels.choices)
    chosen[index] = Choice("attention", "reference", (*chosen[index].refusals, reason))
    own: dict[str, Any] = {"choices": tuple(chosen), "exact": False, "trial": None}
    return changed(kernels, lambda one: replace(one, attention=TorchAttention(alone=False), **own))


def decoder_ops(side: object) -> dict[str, Any]:
    """Return the operators of a decoder's layers, which `side` has under the names of `Kernels`."""
    return {name: getattr(side, name) for name in ("pack", *OPS[: OPS.index("delta")])}


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
