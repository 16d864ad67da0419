"""Where this ran: device, versions, kernels and what refused."""

from __future__ import annotations

from typing import Any

import torch
from gpu_check.setting import Setting

from outrider.bench.machine import provenance
from outrider.kernels.registry import choose


def run(setting: Setting, record: dict[str, Any]) -> None:
    record |= provenance()
    record["torch_cuda"] = torch.version.cuda
    record["triton"] = _triton_version()
    kernels = choose(
        device=setting.device, dtype=setting.dtype, force_reference=not setting.on_cuda
    )
    record["kernels"] = {choice.op: choice.name for choice in kernels.choices}
    record["exact"] = kernels.exact
    record["refusals"] = sorted({r for choice in kernels.choices for r in choice.refusals})
    if setting.on_cuda:
        found = torch.cuda.get_device_properties(setting.device)
        free, total = torch.cuda.mem_get_info(setting.device)
        record["device"] = {
            "name": found.name,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "l2_bytes": found.L2_cache_size,
            "memory_bytes": total,
            "free_bytes": free,
        }


def _triton_version() -> str | None:
    try:
        # Imported here: Triton comes with PyTorch for CUDA alone.
        import triton
    except ImportError:
        return None
    return triton.__version__
