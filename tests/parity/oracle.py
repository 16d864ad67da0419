"""What transformers says about a checkpoint folder: the reference of parity tests and goldens.

Shapes:  N = tokens, V = vocabulary, K = layers, D = hidden size.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)
from torch import Tensor


def _decoded(folder: Path, out: Path) -> Path:
    """`folder` without its codes of 8 bits, which transformers reads with another package only; a
    folder without any as it is."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = config.pop("quantization_config", {"format": ""})
    if found.get("format") != "int-quantized":
        return folder
    shutil.copytree(folder, out)
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if "weight_" not in name}
    coded = [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]
    assert len(coded) > 10
    for name in coded:
        zero_O1, scale_O1 = stored[f"{name}_zero_point"].float(), stored[f"{name}_scale"].float()
        tensors[name] = (tensors[name].float() - zero_O1) * scale_O1
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


class Oracle:
    """The model of `folder` in float32 with the plainest attention that transformers has."""

    def __init__(self, folder: Path) -> None:
        # Imported here: only slow tests and the goldens script have transformers at hand.
        with warnings.catch_warnings(), TemporaryDirectory() as numbers:
            warnings.simplefilter("ignore")
            import transformers  # pyright: ignore[reportMissingTypeStubs]

            transformers.utils.logging.disable_progress_bar()
            loader: Any = transformers.AutoModelForCausalLM
            self._model: Any = loader.from_pretrained(
                _decoded(folder, Path(numbers) / "decoded"),
                dtype=torch.float32,
                attn_implementation="eager",
            ).eval()
        self.version: str = transformers.__version__

    def run(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(logits_NV, hidden_NKD); hidden layer i is the residual after i layers, 0 to L - 1."""
        with torch.no_grad():
            out = self._model(torch.tensor([list(tokens)]), output_hidden_states=True)
        # The last one has been through the final norm, which is no residual.
        return out.logits[0], torch.stack(out.hidden_states[:-1], dim=2)[0]

    def greedy(self, tokens: Sequence[int], num_tokens: int) -> tuple[list[int], float]:
        """The greedy continuation, and the smallest lead that its tokens had over others."""
        text, lead = list(tokens), float("inf")
        for _ in range(num_tokens):
            best_2 = self.run(text)[0][-1].topk(2)
            lead = min(lead, float(best_2.values[0] - best_2.values[1]))
            text.append(int(best_2.indices[0]))
        return text[len(tokens) :], lead

    def save(self, folder: Path) -> None:
        """As transformers writes checkpoints today."""
        self._model.save_pretrained(folder)

    def frequencies(self) -> tuple[Tensor, float]:
        """Rotary frequencies, and what multiplies cos and sin."""
        rope = self._model.model.rotary_emb
        return rope.inv_freq, rope.attention_scaling

    @property
    def stop_ids(self) -> tuple[int, ...]:
        found: int | list[int] = self._model.generation_config.eos_token_id
        return (found,) if isinstance(found, int) else tuple(found)
