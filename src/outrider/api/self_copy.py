"""Decision whether drafter auto copies the target in fewer bits, to let it draft for itself.

A copy needs no file, only memory and a moment at loading. It is made if a pass of the target is
bound by reading floats from memory: on CPUs with native kernels, of a dense decoder that no cache
holds, in one process. Sizes decide, and the goodput controller stops drafting that does not pay.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from outrider.core.config import EngineConfig
from outrider.core.plugins import AUTO
from outrider.core.spec import DecoderConfig, ModelSpec
from outrider.kernels.kinds import DTYPES, pick_device
from outrider.kernels.native.cpu import last_cache_bytes, num_physical_cores
from outrider.kernels.registry import is_native
from outrider.models.checkpoint import open_checkpoint
from outrider.models.families import LlamaConfig
from outrider.models.published.scheme import scheme_in

# If caches hold much of the weights, or reading them takes no time, a copy gains little.
_LEAST_BYTES = 128 << 20
_TIMES_CACHE = 2
# Weights that a core quantises in some seconds; a copy of more must be requested by name.
_WEIGHTS_A_CORE = 300_000_000
# The most of the target's bytes with which a copy pays: a share of 0.6 gains 14 %, 0.5 gains 27 %.
_MOST_OF_TARGET = 0.6


def why_no_copy(folder: Path, target: DecoderConfig, config: EngineConfig) -> str:
    """Reason for which drafter auto makes no copy of the target in `folder` in fewer bits, in words
    that follow "a copy in 4 bits"; "" if it makes one."""
    if not (_is_left_to_us(config) and isinstance(target, LlamaConfig)):
        return "is made for targets of the Llama family alone, with settings left at auto"
    if target.sparse_layers:
        return "is not made of mixtures of experts"
    checkpoint = open_checkpoint(folder)
    if checkpoint.is_gguf or scheme_in(checkpoint) is not None:
        return "would gain little, since the weights are quantised already"
    dtype = DTYPES.get(target.dtype if config.dtype == AUTO else config.dtype, torch.float32)
    spec = target.spec("target", bytes_per_weight=dtype.itemsize, bytes_per_kv=dtype.itemsize)
    device = pick_device(config.device)
    if device.type != "cpu" or not is_native(device, dtype, config.force_reference):
        return "needs the native kernels of CPUs"
    return _why_no_gain(spec, config.self_quantise)


def _why_no_gain(spec: ModelSpec, bits: str) -> str:
    """Reason by sizes."""
    if spec.weight_bytes < max(_LEAST_BYTES, _TIMES_CACHE * last_cache_bytes()):
        return "would gain little, since caches hold the weights"
    if spec.num_parameters > _WEIGHTS_A_CORE * num_physical_cores():
        return "would take long to make; --drafter quantised-self makes it"
    if not copy_pays(spec, bits):
        return f"would read more than {_MOST_OF_TARGET:.0%} of the target's bytes in a pass"
    return ""


def _is_left_to_us(config: EngineConfig) -> bool:
    """True if no drafter, no ever-drafting controller and no other precision is named."""
    return (
        config.drafter == AUTO
        and config.controller in (AUTO, "goodput")
        and config.most_k > 0
        and config.tensor_parallel == 1
        and config.drafter_home == "thread"
        and config.quantise == "none"
    )


def copy_pays(target: ModelSpec, bits: str) -> bool:
    """True if a pass of a copy in so many `bits` reads few bytes compared with the target's."""
    copied = replace(target, quantise=bits)
    return copied.weight_bytes <= _MOST_OF_TARGET * target.weight_bytes
