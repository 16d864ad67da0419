"""Stores the matrices of a checkpoint in 8 bits: `scripts/eight_bits.py FOLDER`, in place.

compressed-tensors' `int-quantized`, with a scale and a zero point for each output. Embedded models
that are no part of the demo's pair are stored so. Matrices of under 64 rows or columns stay as they
are: they are small, and gates of recurrences.

Shapes:  O = outputs, I = inputs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LEAST = 64
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "Embedding"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "strategy": "channel",
                "symmetric": False,
                "dynamic": False,
            },
        }
    },
}


def eight_bits(x_OI: Tensor) -> dict[str, Tensor]:
    """The stored tensors of a matrix by the end of their names: x is scale * (weight - zero)."""
    x_OI = x_OI.float()
    low_O1, high_O1 = x_OI.amin(1, keepdim=True).clamp_max(0), x_OI.amax(1, keepdim=True)
    # Rounded first, so that the codes fit the scale that is stored.
    scale_O1 = ((high_O1.clamp_min(0) - low_O1) / 255).clamp_min(1e-8).bfloat16()
    zero_O1 = (-128 - (low_O1 / scale_O1.float()).round()).clamp(-128, 127)
    codes_OI = ((x_OI / scale_O1.float()).round() + zero_O1).clamp(-128, 127)
    return {
        ".weight": codes_OI.to(torch.int8),
        ".weight_scale": scale_O1,
        ".weight_zero_point": zero_O1.to(torch.int8),
    }


def main() -> int:
    folder = Path(sys.argv[1])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config:
        print(f"{folder}: stored in 8 bits already", file=sys.stderr)
        return 1
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(".weight") and tensor.ndim == 2 and min(tensor.shape) >= LEAST:
            parts = eight_bits(tensor)
            tensors |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = CONFIG
    text = json.dumps(config, indent=1)
    (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
