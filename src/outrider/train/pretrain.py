"""A language model from nothing but text: the recipe of `outrider train pretrain`.

The loss is the cross entropy with the token that comes next, and so is the figure on held-out text.
The embedded target was made this way, from Python source and worked problems in words.

Shapes:  B = windows of a batch, T = tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.models.families import LlamaConfig
from outrider.train.llama_module import Llama, as_dtype, config_json, fresh_llama
from outrider.train.loop import Batch, Export
from outrider.train.losses import next_token

# Held-out windows that are read at once.
_TOGETHER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainRecipe:
    """A `Recipe` of a Llama. `held_out_BT` are windows that nobody learns from; may be none."""

    config: LlamaConfig
    held_out_BT: Tensor
    window: int
    dtype: torch.dtype = torch.bfloat16
    copied: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        return "pretrain"

    @property
    def facts(self) -> Mapping[str, object]:
        config = self.config
        sizes = [config.vocab_size, config.hidden_size, config.ffn_size, config.num_layers]
        return {"sizes": sizes}

    def build(self, generator: torch.Generator) -> Llama:
        return fresh_llama(self.config, self.window, generator)

    def loss(self, module: Llama, batch: Batch) -> Tensor:
        return next_token(module(batch.ids_BT), batch.ids_BT)

    def measure(self, module: Llama) -> Mapping[str, float]:
        if not len(self.held_out_BT):
            return {}
        losses = [
            float(next_token(module(ids_BT), ids_BT)) for ids_BT in torch.split(self.held_out_BT, 4)
        ]
        return {"held_out_loss": sum(losses) / len(losses)}

    def export(self, module: Llama) -> Export:
        config = config_json(self.config, self.dtype)
        return Export(as_dtype(module.state_dict(), self.dtype), config, self.copied)
