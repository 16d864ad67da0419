"""The ceiling: how fast memory is copied and read when nothing else is done.

A pass reads its weights and writes next to nothing, so its ceiling is the read rate; the copy rate,
which counts bytes read and written, is what others publish.
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_check.clock import seconds_of
from gpu_check.setting import Setting


def run(setting: Setting, record: dict[str, Any]) -> None:
    record |= measured(setting)


def measured(setting: Setting) -> dict[str, float]:
    """Bytes a second, by kind; on buffers far beyond any cache."""
    size = 1 << 22 if setting.quick else 1 << 31
    source = torch.ones(size // 4, dtype=torch.int32, device=setting.device)
    target = torch.empty_like(source)
    halves = source.view(torch.bfloat16).view(-1, 4096)
    row = torch.ones(4096, dtype=torch.bfloat16, device=setting.device)
    copy = seconds_of(lambda: target.copy_(source), setting)
    read = seconds_of(source.sum, setting)
    product = seconds_of(lambda: torch.mv(halves, row), setting)
    return {
        "copy_bytes_per_second": 2 * size / copy,
        "read_bytes_per_second": size / read,
        "matrix_vector_bytes_per_second": size / product,
    }
