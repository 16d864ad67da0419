"""Modules of PyTorch over our kernels, in which a row's bits are its own: linears, norms, experts.

They replace a model's modules (`prepare`). Experts have the form of
transformers': tensors `gate_up_proj` (or `up_proj`) and `down_proj` of all experts, an activation,
and a forward that takes the router's choices. The rows of an expert run together, only experts that
were chosen are read, and a token's summands are added in the order of its experts' numbers.

Shapes:  N = tokens or rows, Q = experts of a token, P = N times Q choices by expert, D = hidden
         size, F = an expert's size, I = inputs, O = outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from outrider.core.clock import host_rows
from outrider.core.errors import given
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedLinear
from outrider.models.ffn import by_expert


def unseen() -> Any:
    """A context in which functions of PyTorch are called at once, past any mode: our own code
    needs none, and a mode makes each call several times as dear."""
    return torch._C.DisableTorchFunction()  # pyright: ignore[reportPrivateUsage]


class RowLinear(nn.Module):
    """A linear over our kernels; the bias is added in float32.

    `weight` is a meta tensor: it has a shape and a type but no values, so code that reads it fails.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, kernels: Kernels) -> None:
        super().__init__()
        self.weight = torch.empty(weight_OI.shape, device="meta")
        self.bias = None if bias_O is None else bias_O.detach().float()
        self._packed = kernels.pack(weight_OI.detach())
        self.linear = kernels.linear

    def forward(self, x: Tensor) -> Tensor:
        with unseen():
            x_NI = x.reshape(-1, x.shape[-1]).float().contiguous()
            out_NO = torch.empty(x_NI.shape[0], self._packed.num_out, device=x.device)
            if x_NI.shape[0]:
                self.linear(x_NI, self._packed, out_NO)
            if self.bias is not None:
                out_NO.add_(self.bias)
            return out_NO.view(*x.shape[:-1], self._packed.num_out)


# The names of epsilons in the library's norms.
_EPSILONS = ("variance_epsilon", "eps")


class RowNorm(nn.Module):
    """A root mean square norm of the last dimension, times `weight_D`."""

    def __init__(self, weight_D: Tensor, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self._eps, self._norm = weight_D, eps, kernels.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        with unseen():
            x_ND = x.reshape(-1, x.shape[-1]).float().contiguous()
            out_ND = torch.empty_like(x_ND)
            self._norm(x_ND, self.weight, self._eps, out_ND)
            return out_ND.view(x.shape)


def row_norm(module: nn.Module, kernels: Kernels) -> RowNorm | None:
    """A norm that computes what `module` does, for it is a root mean square norm by its name and on
    two rows; None for other modules. The weight may be stored minus 1."""
    weights = dict(module.named_parameters(recurse=False))
    eps = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    if "RMSNorm" not in type(module).__name__ or [*weights] != ["weight"]:
        return None
    if not isinstance(eps, float) or len(inspect.signature(module.forward).parameters) != 1:
        return None
    weight_D = weights["weight"].detach().float()
    x_ND = torch.linspace(-2, 3, 2 * weight_D.numel(), device=weight_D.device).view(2, -1)
    with torch.no_grad():
        expected = module(x_ND)
        for factor_D in (weight_D, 1 + weight_D):
            norm = RowNorm(factor_D, eps, kernels)
            if torch.allclose(norm(x_ND), expected, rtol=1e-5, atol=1e-6):
                return norm
    return None


_TRAITS = ("has_gate", "has_bias", "is_transposed", "_apply_gate")


def has_common_form(module: nn.Module) -> bool:
    """True for experts whose tensors are those of the library's form, and no others."""
    if not all(hasattr(module, name) for name in _TRAITS):
        return False
    up, down = _names(module)
    biases = {f"{name}_bias" for name in (up, down)} if cast("Any", module).has_bias else set[str]()
    return {name for name, _ in module.named_parameters(recurse=False)} == {up, down, *biases}


def _names(experts: Any) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


class RowExperts(nn.Module):
    """The experts of one layer. `inner` is the library's module, which gives up its tensors."""

    def __init__(self, inner: nn.Module, kernels: Kernels) -> None:
        super().__init__()
        self.inner = inner
        experts: Any = inner
        up, down = _names(experts)
        self._up, self._down = (list(_packed(experts, name, kernels)) for name in (up, down))
        self._biases = [
            cast("Tensor", getattr(experts, f"{name}_bias")).detach().float()
            for name in ((up, down) if experts.has_bias else ())
        ]
        # The library's own gate is one of our kernels; a family's own runs as it is.
        gate: object = getattr(type(inner), "_apply_gate", None)
        is_usual = str(getattr(gate, "__module__", "")).endswith("integrations.moe")
        self._is_silu = experts.has_gate and is_usual and _is_silu(experts.act_fn)
        for name in [name for name, _ in inner.named_parameters(recurse=False)]:
            setattr(inner, name, None)
        self.use(kernels)

    def use(self, kernels: Kernels) -> None:
        """Run on `kernels` from now on."""
        self.kernels = kernels

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum of the chosen experts' outputs, weighted, of the shape of `hidden_states`."""
        with unseen():
            x_ND = hidden_states.reshape(-1, hidden_states.shape[-1]).float()
            chosen_NQ = top_k_index.reshape(len(x_ND), -1)
            parts_NQ = top_k_weights.reshape(chosen_NQ.shape).float()
            out_ND = torch.zeros_like(x_ND)
            experts, order = by_expert(host_rows(chosen_NQ))
            choices_P = torch.tensor(order, device=x_ND.device)
            rows_P = choices_P // chosen_NQ.shape[1]
            up_PO = self._multiply(self._up, experts, x_ND.index_select(0, rows_P), 0)
        activated_PF, inner = self._activated(up_PO), cast("Any", self.inner)
        with unseen():
            given_PD = self._multiply(self._down, experts, activated_PF, 1)
        if getattr(inner, "has_post_expert_norm", False):
            given_PD = inner.post_expert_norm(given_PD)
        given_PD = given_PD * parts_NQ.flatten().index_select(0, choices_P)[:, None]
        # The sums are in order: a token's summands come in the order of its experts' numbers.
        return out_ND.index_add_(0, rows_P, given_PD).view(hidden_states.shape)

    def _activated(self, up_PO: Tensor) -> Tensor:
        inner: Any = self.inner
        if not self._is_silu:
            return inner._apply_gate(up_PO) if inner.has_gate else inner.act_fn(up_PO)
        out_PF = up_PO.new_empty(up_PO.shape[0], up_PO.shape[1] // 2)
        self.kernels.silu_mul(up_PO, out_PF)
        return out_PF

    def _multiply(
        self, packed: list[PackedLinear], experts: list[tuple[int, slice]], x_PI: Tensor, which: int
    ) -> Tensor:
        """The products of all rows with the matrices of their experts, in new memory."""
        x_PI, out_PO = x_PI.contiguous(), x_PI.new_empty(x_PI.shape[0], packed[0].num_out)
        for expert, rows in experts:
            self.kernels.linear(x_PI[rows], packed[expert], out_PO[rows])
            if self._biases:
                out_PO[rows].add_(self._biases[which][expert])
        return out_PO


def _is_silu(act: Callable[[Tensor], Tensor]) -> bool:
    x_F = torch.linspace(-8, 8, 33)
    return torch.equal(act(x_F), functional.silu(x_F))


def _packed(experts: Any, name: str, kernels: Kernels) -> Iterator[PackedLinear]:
    stack: Tensor = getattr(experts, name).detach()
    for weight in stack:
        yield kernels.pack((weight.t() if experts.is_transposed else weight).contiguous())


# Functions of rows that IEEE does not fix to the last bit, by the name PyTorch gives them.
_INEXACT = {
    "celu", "cos", "elu", "erf", "exp", "expm1", "gelu", "log", "log1p", "logsigmoid", "mish",
    "selu", "sigmoid", "silu", "sin", "softplus", "tanh",
}  # fmt: skip


class RowByRow(TorchFunctionMode):
    """Within this mode, inexact elementwise functions take one row (the last dimension) a call, or
    our kernels take all rows, and products with `matrices` are ours. These have the linears of the
    model's other matrices, such as routers', by address; `used` are those that were read so."""

    def __init__(
        self, kernels: Kernels | None = None, matrices: Mapping[int, RowLinear] | None = None
    ) -> None:
        super().__init__()
        self._kernels, self._matrices = kernels, matrices or {}
        self.used: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        name = getattr(func, "__name__", "")
        if name == "linear" and not kwargs and (linear := self._linear(*args)) is not None:
            return linear(x)
        if name not in _INEXACT or not _has_rows(x):
            return func(*args, **kwargs)
        is_ours = self._kernels is not None and x.dtype == torch.float32
        if name == "silu" and is_ours and not kwargs.get("inplace"):
            return _silu(given(self._kernels, "kernels"), x.contiguous())
        rows = [func(row_F, *args[1:], **kwargs) for row_F in x.reshape(-1, x.shape[-1])]
        return torch.stack(rows).view(x.shape) if rows else torch.empty_like(x)

    def _linear(self, _: object, weight: object, bias: object = None) -> RowLinear | None:
        """The linear of a matrix that a model reads without a module of its own."""
        if bias is not None or not isinstance(weight, Tensor) or not self._matrices:
            return None
        found = self._matrices.get(weight.data_ptr())
        if found is None or found.weight.shape != weight.shape:
            return None
        self.used.add(weight.data_ptr())
        return found


def _silu(kernels: Kernels, x: Tensor) -> Tensor:
    out = x.clone()
    kernels.sigmoid_mul(x.view(-1, x.shape[-1]), out.view(-1, x.shape[-1]))
    return out


def _has_rows(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.dim() > 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """Linears of the `matrices` that `prepare` has left without a module, by address, and the names
    of these."""

    matrices: Mapping[int, RowLinear]
    names: Mapping[int, str]

    def foreign(self, used: Container[int]) -> list[str]:
        """Names of the matrices that a pass did not multiply by as `used` ones."""
        return sorted(name for address, name in self.names.items() if address not in used)


def prepare(
    model: nn.Module, kernels: Kernels, wide: Kernels, dtype: torch.dtype, odd: type
) -> Prepared:
    """Replace every linear and all experts of `model`, in place, and convert its other weights to
    float32.

    `odd` is the class of linears whose weight is inputs x outputs. `kernels` are those of `dtype`,
    which most matrices have, and `wide` those of float32.

    Three things in such a model depend on the number of rows. BLAS picks its loops by the shape, so
    every linear is replaced by ours (docs/algorithms/row-invariance.md), and so is a product with a
    matrix that has no module. Experts are run for all their rows at once, and norms in one call
    . Functions such as tanh have vector and scalar forms that differ in the last
    bit, so they run row by row, with one identical call for each row. Activations become float32;
    the weights of linears keep their type, as in our own decoders.
    """
    by_dtype = {torch.float32: wide, dtype: kernels}
    _exchange(model, partial(_over_ours, by_dtype=by_dtype, odd=odd))
    for module in model.modules():
        _to_float32(module)
    _exchange(model, partial(row_norm, kernels=wide))
    found = {weight.data_ptr(): (name, weight) for name, weight in _matrices(model)}
    linears = {
        address: RowLinear(weight, None, wide)
        for address, (_, weight) in found.items()
        if weight.dim() == 2
    }
    return Prepared(linears, {address: name for address, (name, _) in found.items()})


def _exchange(model: nn.Module, ours: Callable[[nn.Module], nn.Module | None]) -> None:
    """Exchange every module for which there is one of `ours`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (other := ours(child)) is not None:
                setattr(parent, name, other)


def _over_ours(
    module: nn.Module, by_dtype: Mapping[torch.dtype, Kernels], odd: type
) -> nn.Module | None:
    """The module over the kernels of its weights' dtype; None for one that stays."""
    if has_common_form(module):
        fitting = by_dtype.get(next(module.parameters(recurse=False)).dtype)
        return None if fitting is None else RowExperts(module, fitting)
    if type(module) not in (nn.Linear, odd):
        return None
    weight, bias = cast("Tensor", module.weight), cast("Tensor | None", module.bias)
    weight_OI = weight if type(module) is nn.Linear else weight.t()
    fitting = by_dtype.get(weight.dtype)
    return None if fitting is None else RowLinear(weight_OI, bias, fitting)


def use_kernels(model: nn.Module, before: Kernels, kernels: Kernels) -> None:
    """Exchange the kernels of a model that `prepare` has changed, where it has those `before`."""
    for module in model.modules():
        if isinstance(module, RowLinear) and module.linear == before.linear:
            module.linear = kernels.linear
        elif isinstance(module, RowExperts) and module.kernels.linear == before.linear:
            module.use(kernels)


def _to_float32(module: nn.Module) -> None:
    """Convert tensors. An embedding converts its output, as few rows are read."""
    if isinstance(module, nn.Embedding):
        module.register_forward_hook(lambda _module, _args, out: out.float())
        return
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _matrices(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    tables = {id(table.weight) for table in model.modules() if isinstance(table, nn.Embedding)}
    for name, weight in model.named_parameters():
        is_vector = weight.numel() == max(weight.shape, default=1)
        if not is_vector and id(weight) not in tables:
            yield name, weight
