"""The functions between the products of an FFN.

xIELU (Huang and Schlag, "Deriving Activation Functions Using Integration", 2024) is

    alpha_p x^2 + beta x                                   for x > 0
    alpha_n (exp(min(x, eps)) - 1 - x) + beta x            otherwise

where files hold the alphas before a softplus, and alpha_n without beta.

Shapes:  N = tokens, F = FFN size, O = outputs of its first product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.operators import Kernels
from outrider.kernels.reference.delta import by_row
from outrider.models.layer_kinds import Gate, LayerTraits
from outrider.models.weights import WeightReader

# beta and eps of files that do not have them.
_USUAL = {"beta": 0.5, "eps": -1e-6}


def gated(
    kernels: Kernels, gate: Gate, up_NO: Tensor, out_NF: Tensor, curve: Sequence[float] = ()
) -> None:
    """Compute the input of a dense FFN's second product from the output of its first. `curve` has
    the numbers of xIELU."""
    if gate is Gate.SQUARED:
        out_NF.copy_(torch.relu(up_NO)).square_()
    elif gate is Gate.ERF:
        out_NF.copy_(by_row(functional.gelu, up_NO))
    elif gate is Gate.XIELU:
        out_NF.copy_(by_row(lambda row_F: _xielu(row_F, curve), up_NO))
    else:
        ops = {Gate.GELU: kernels.gelu_mul, Gate.NONE: kernels.gelu}
        ops.get(gate, kernels.silu_mul)(up_NO, out_NF)


def _xielu(row_F: Tensor, curve: Sequence[float]) -> Tensor:
    rise, fall, beta, eps = curve
    below_F = (torch.expm1(row_F.clamp(max=eps)) - row_F) * fall
    return torch.where(row_F > 0, rise * row_F * row_F, below_F) + beta * row_F


def read_curve(
    reader: WeightReader, traits: LayerTraits, prefix: str, index: int
) -> tuple[float, ...]:
    """The numbers of xIELU in layer `index`, whose names begin with `prefix`."""
    if traits.curves:
        alpha_p, alpha_n, beta, eps = traits.curves[index]
    else:
        name = f"{prefix}mlp.act_fn."
        alpha_p, alpha_n = (float(reader.vector(f"{name}alpha_{side}", 1)) for side in "pn")
        beta, eps = (
            float(reader.vector(f"{name}{one}")) if f"{name}{one}" in reader else usual
            for one, usual in _USUAL.items()
        )
    alphas = functional.softplus(torch.tensor([alpha_p, alpha_n]))
    rise, fall = (float(alpha) for alpha in alphas)
    return rise, beta + fall, beta, eps
