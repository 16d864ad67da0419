"""Which weights and which machine: what must not change while results are collected.

Hashing gigabytes would take longer than many a sweep, so of each weights file only its size, both
ends and evenly spaced blocks between them are read. That tells checkpoints apart; it is no
protection against somebody who wants two files to look the same.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from outrider.bench.config import Plain
from outrider.bench.provenance import cpu_name
from outrider.core.errors import CheckpointError
from outrider.core.files import Kind, open_regular, read_bytes
from outrider.models.loading import pick_device

_BLOCK_BYTES = 64 * 1024
_NUM_BLOCKS = 16


def weights_digest(folder: Path) -> str:
    """12 hexadecimal digits over config.json and samples of every safetensors file.

    Raises CheckpointError for a folder without config.json.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise CheckpointError(
            f"{folder} has no config.json, so it is not a model.",
            hint="`outrider models list` shows those on this machine",
        )
    digest = hashlib.sha256(read_bytes(config, Kind.CONFIG))
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        last = max(size - _BLOCK_BYTES, 0)
        with open_regular(path) as file:
            for i in range(_NUM_BLOCKS):
                file.seek(last * i // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:12]


def machine(device: str) -> dict[str, Plain]:
    """What seconds depend on; `device` is the setting, of which the answer has what it means."""
    kind = pick_device(device).type
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "device": kind,
        "gpu": torch.cuda.get_device_name() if kind == "cuda" else None,
    }
