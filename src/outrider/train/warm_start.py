"""A block that begins as its target's last layer, so that it drafts before it has learned anything.

What a target's last layer reads at a token is largely a linear function of what a block reads
there: the token's embedding, and the target's last residual of the token before. Least squares over
a little text find that function. Behind it the target's last layer and norm do what they do in the
target, and the block's states are close to the target's residuals, which is what it reads where it
drafts on by itself.

Shapes:  B = windows, T = tokens, D = hidden size, P = places.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.train.target import FrozenTarget

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
