"""What transformers says about a checkpoint folder: the reference of parity tests and goldens.

Shapes:  N = tokens, V = vocabulary, K = layers, D = hidden size.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Oracle:
    """The model of `folder` in float32 with the plainest attention that transformers has."""

    def __init__(self, folder: Path) -> None:
        # Imported here: only slow tests and the goldens script have transformers at hand.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers  # pyright: ignore[reportMissingTypeStubs]

            transformers.utils.logging.disable_progress_bar()
            loader: Any = transformers.AutoModelForCausalLM
            self._model: Any = loader.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
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
