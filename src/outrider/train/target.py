"""The target while a drafter learns from it: frozen, read window by window, never trained.

It is the module of llama_module.py and not the engine's decoder: what a recipe wants are the states
and laws of every token of whole windows, which is one causal pass without memory.

Shapes:  B = windows, T = tokens, D = hidden size, V = vocabulary, K = layers, W = some ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from outrider.models.families import LlamaConfig
from outrider.train.llama_module import Llama, read_llama


@dataclass(frozen=True, slots=True)
class Reading:
    """What the target makes of a batch: the residual after its last layer, before the norm, and
    those after the layers asked for (0 is the embedding), as drafters get them from its arena."""

    last_BTD: Tensor
    hidden_BTKD: Tensor


class FrozenTarget:
    """A target on `device`; `bfloat16` says that products of such numbers pay there.

    `max_tokens` is the longest window that it will read. Raises CheckpointError for a family that
    cannot teach.
    """

    def __init__(
        self, folder: Path, *, device: torch.device, max_tokens: int, bfloat16: bool = False
    ) -> None:
        net = read_llama(folder, max_tokens).to(device).eval().requires_grad_(requires_grad=False)
        self.folder, self.device = folder, device
        self._net, self._bfloat16 = net, bfloat16
        # The ids that were asked for last, and their rows: gathering them is a copy of both.
        self._ids_W: Tensor | None = None
        self._head_WD = net.head

    @property
    def config(self) -> LlamaConfig:
        return self._net.config

    @property
    def embedding(self) -> Tensor:
        """Of shape [V, D]."""
        return self._net.model.embed_tokens.weight

    @property
    def norm(self) -> Tensor:
        """Weight of the last norm, of shape [D]; its epsilon is `config.rms_norm_eps`."""
        return self._net.model.norm.weight

    @property
    def head(self) -> Tensor:
        """Of shape [V, D]."""
        return self._net.head

    def head_of(self, ids_W: Tensor | None) -> Tensor:
        """The head's rows of some ids, of shape [W, D]; None is all ids."""
        if ids_W is not self._ids_W:
            self._ids_W = ids_W
            self._head_WD = self.head if ids_W is None else self.head[ids_W.to(self.device)]
        return self._head_WD

    @property
    def net(self) -> Llama:
        return self._net

    def read(self, ids_BT: Tensor, hidden_layers: Sequence[int] = ()) -> Reading:
        """States of a batch, without gradients."""
        with torch.no_grad(), self._products():
            last_BTD, hidden_BTKD = self._net.model(ids_BT.to(self.device), hidden_layers)
        return Reading(last_BTD, hidden_BTKD)

    def logits(self, last_BTD: Tensor, ids_W: Tensor | None = None) -> Tensor:
        """Logits of last residuals, of any leading shape, without gradients: of some ids, or of
        all."""
        with torch.no_grad(), self._products():
            return functional.linear(self._net.model.norm(last_BTD), self.head_of(ids_W))

    def _products(self) -> torch.autocast:
        """Weights and residuals stay float32, and so do positions, which bfloat16 cannot count."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16)
