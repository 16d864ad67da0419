"""The hybrid that ships computes here what transformers computes of its numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)

from doubles.hf_checkpoints import hushed
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.loading import load_model, resolve
from outrider.pairs.catalog import EMBEDDED_HYBRID
from parity.feeding import feed
from parity.oracle import Oracle

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.weights,
    pytest.mark.filterwarnings("ignore"),
]


def in_numbers(folder: Path, out: Path) -> Path:
    """`folder` without its codes of 8 bits, which transformers reads with another package only."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config.pop("quantization_config")["format"] == "int-quantized"
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if "weight_" not in name}
    coded = [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]
    assert len(coded) > 20
    for name in coded:
        zero_O1, scale_O1 = stored[f"{name}_zero_point"].float(), stored[f"{name}_scale"].float()
        tensors[name] = (tensors[name].float() - zero_O1) * scale_O1
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    folder = resolve(EMBEDDED_HYBRID)
    text = [(131 * i * i + 17 * i) % 8192 for i in range(100)]
    with hushed():
        theirs_NV, _ = Oracle(in_numbers(folder, tmp_path / "numbers")).run(text)
    capacity = ModelCapacity(num_slots=512, page_size=16, max_rows=128, max_logits=128)
    model = load_model(folder, LoadOptions(capacity=capacity, dtype="float32", device="cpu"))
    torch.testing.assert_close(feed(model, text, [100]), theirs_NV, atol=1e-4, rtol=0)
