"""The target while a drafter learns from it: frozen, read window by window, never trained.

It is the module of llama_module.py and not the engine's decoder: what a recipe wants are the states
and laws of every token of whole windows, which is one causal pass without memory.

Shapes:  B = windows, T = tokens, D = hidden size, V = vocabulary, K = layers, W = some ids.

A block that begins as its target's last layer, so that it drafts before it has learned anything.

What a target's last layer reads at a token is largely a linear function of what a block reads
there: the token's embedding, and the target's last residual of the token before. Least squares over
a little text find that function. Behind it the target's last layer and norm do what they do in the
target, and the block's states are close to the target's residuals, which is what it reads where it
drafts on by itself.

Shapes:  B = windows, T = tokens, D = hidden size, P = places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.families import LlamaConfig
from outrider.train.llama_module import Llama, read_llama


@dataclass(frozen=True, slots=True)
class TargetOutput:
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

    def read(self, ids_BT: Tensor, hidden_layers: Sequence[int] = ()) -> TargetOutput:
        """States of a batch, without gradients."""
        with torch.no_grad(), self._products():
            last_BTD, hidden_BTKD = self._net.model(ids_BT.to(self.device), hidden_layers)
        return TargetOutput(last_BTD, hidden_BTKD)

    def logits(self, last_BTD: Tensor, ids_W: Tensor | None = None) -> Tensor:
        """Logits of last residuals, of any leading shape, without gradients: of some ids, or of
        all."""
        with torch.no_grad(), self._products():
            return functional.linear(self._net.model.norm(last_BTD), self.head_of(ids_W))

    def _products(self) -> torch.autocast:
        """Weights and residuals stay float32, and so do positions, which bfloat16 cannot count."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16)


# Of the mean square of what is read: keeps the fit steady where inputs say the same.
_RIDGE = 1e-3


class JoiningLayer(Protocol):
    """A decoder layer behind the matrix that joins token and state."""

    eh_proj: nn.Linear

    def pair(self, embedded_BTD: Tensor, states_BTD: Tensor) -> Tensor:
        """What `eh_proj` reads, of shape [B, T, 2 x D]."""
        ...

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


def fits_last_layer(layer: JoiningLayer, target: FrozenTarget) -> bool:
    """Whether the layer has all weights of the target's last one, in its shapes."""
    own = {name: parameter.shape for name, parameter in layer.named_parameters()}
    return all(own.get(name) == one.shape for name, one in _last_layer(target).named_parameters())


def begin_as_last_layer(
    layer: JoiningLayer, target: FrozenTarget, batches: Iterable[Tensor]
) -> None:
    """Sets all but the layer's own norms; each of `batches` is ids_BT that the fit reads."""
    with torch.no_grad():
        layer.eh_proj.weight.copy_(_joined(layer, target, batches))
        own = dict(layer.named_parameters())
        for name, parameter in _last_layer(target).named_parameters():
            own[name].copy_(parameter)


def _joined(layer: JoiningLayer, target: FrozenTarget, batches: Iterable[Tensor]) -> Tensor:
    """The matrix whose products are closest to the residuals that the last layer reads."""
    num_out, num_in = layer.eh_proj.weight.shape
    square = torch.zeros(num_in, num_in, dtype=torch.float64)
    cross = torch.zeros(num_in, num_out, dtype=torch.float64)
    for ids_BT in batches:
        reading = target.read(ids_BT, (target.config.num_layers - 1,))
        embedded_BTD = functional.embedding(ids_BT.to(target.device), target.embedding)
        pair_BTE = layer.pair(embedded_BTD[:, 1:].float(), reading.last_BTD[:, :-1].float())
        read_PE = pair_BTE.flatten(0, 1).double().cpu()
        square += read_PE.T @ read_PE
        cross += read_PE.T @ reading.hidden_BTKD[:, 1:, 0].flatten(0, 1).double().cpu()
    ridge = torch.eye(num_in, dtype=torch.float64) * square.diagonal().mean() * _RIDGE
    linalg = cast("Any", torch.linalg)
    found: Tensor = linalg.solve(square + ridge, cross)
    return found.T.to(layer.eh_proj.weight)


def _last_layer(target: FrozenTarget) -> nn.Module:
    return target.net.model.layers[-1]
