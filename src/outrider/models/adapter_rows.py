"""Makes a transformers model row-invariant: a packed row has the same bits whatever rows are near.

Two things in such a model depend on the number of rows. Matrix products: BLAS picks its loops by
the shape, so every linear is replaced by ours (docs/algorithms/row-invariance.md). And functions
such as tanh, whose vector and scalar forms differ in the last bit: which elements get which depends
on where a tensor ends and how threads share it, so these run row by row, one identical call each.
The rest (sums along a row, products, roots) is computed alike in every row.

Activations become float32; weights keep their type, as in our own decoders.

Shapes:  N = rows, I = inputs, O = outputs, F = row size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from outrider.kernels.registry import Kernels

# Elementwise functions that IEEE does not fix to the last bit, by the name PyTorch gives them.
_INEXACT = {
    "celu", "cos", "elu", "erf", "exp", "expm1", "gelu", "log", "log1p", "logsigmoid", "mish",
    "selu", "sigmoid", "silu", "sin", "softplus", "tanh",
}  # fmt: skip


class RowLinear(nn.Module):
    """A linear over our kernels; the bias is added in float32.

    `weight` answers questions of shape and type and has no values: code that reads it fails.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, kernels: Kernels) -> None:
        super().__init__()
        self.weight = torch.empty(weight_OI.shape, device="meta")
        self.bias = None if bias_O is None else bias_O.detach().float()
        self._packed = kernels.pack(weight_OI.detach())
        self.linear = kernels.linear

    def forward(self, x: Tensor) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1]).float().contiguous()
        out_NO = torch.empty(x_NI.shape[0], self._packed.num_out, device=x.device)
        if x_NI.shape[0]:
            self.linear(x_NI, self._packed, out_NO)
        if self.bias is not None:
            out_NO.add_(self.bias)
        return out_NO.view(*x.shape[:-1], self._packed.num_out)


class RowByRow(TorchFunctionMode):
    """While entered, inexact elementwise functions take one row (the last dimension) a call."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        if getattr(func, "__name__", "") not in _INEXACT or not _has_rows(x):
            return func(*args, **kwargs)
        rows = [func(row_F, *args[1:], **kwargs) for row_F in x.reshape(-1, x.shape[-1])]
        return torch.stack(rows).view(x.shape) if rows else torch.empty_like(x)


def _has_rows(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.dim() > 1


def prepare(model: nn.Module, kernels: Kernels, dtype: torch.dtype, odd: type) -> list[str]:
    """Replace every linear of `model`, in place, and make what it adds to them float32.

    `odd` is the class of linears whose weight is inputs x outputs. The names of weights that are
    still multiplied by other means come back; where there are some, rows may not be invariant.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, odd) and child.weight.dtype == dtype:
                weight = cast("Tensor", child.weight)
                weight_OI = weight if type(child) is nn.Linear else weight.t()
                bias = cast("Tensor | None", child.bias)
                setattr(parent, name, RowLinear(weight_OI, bias, kernels))
    for module in model.modules():
        _to_float32(module)
    return sorted(_matrices(model))


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Exchange the kernels of a model that `prepare` has been over."""
    for module in model.modules():
        if isinstance(module, RowLinear):
            module.linear = kernels.linear


def _to_float32(module: nn.Module) -> None:
    """An embedding keeps its table as it is, since only the rows that are looked up matter."""
    if isinstance(module, nn.Embedding):
        module.register_forward_hook(lambda _module, _args, out: out.float())
        return
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _matrices(model: nn.Module) -> Iterator[str]:
    tables = {id(table.weight) for table in model.modules() if isinstance(table, nn.Embedding)}
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and id(weight) not in tables:
            yield name
