"""What a CUDA graph would refuse, found on a CPU: every operator of a run is looked at.

Refused are operators that tell the host a number, that choose a shape by data, or that bring a new
tensor from the host. Noted are all operators with their shapes, and the memory that was there
before the run: a captured run replays both, so they must be the same from run to run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# On a CPU these read memory without an operator.
METHODS = ("tolist", "numpy", "cpu")
# By the name before the overload.
REFUSED = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
    "masked_select",
    "lift_fresh",
    "lift_fresh_copy",
    "_pin_memory",
    "record_stream",
}


class NotCapturableError(AssertionError):
    """A run did what no graph can hold."""


class CaptureGuard(TorchDispatchMode):
    """`calls` are operators with the shapes and dtypes of their tensors; `outside` are addresses of
    memory that they found, in the order in which it was met."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.calls: list[tuple[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]]] = []
        self.outside: dict[int, None] = {}
        self._made: dict[int, Tensor] = {}
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> CaptureGuard:
        def refuse(*_: object) -> NoReturn:
            raise NotCapturableError("a tensor is read on the host")

        for method in METHODS:
            self._patch.setattr(torch.Tensor, method, refuse)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.undo()
        super().__exit__(*error)  # pyright: ignore[reportUnknownMemberType]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = str(func).split(".")[1]
        given = _tensors([args, kwargs])
        if name in REFUSED:
            raise NotCapturableError(f"{func} waits for the host or depends on data")
        if name.startswith("index") and any(t.dtype == torch.bool for t in _indices(name, args)):
            raise NotCapturableError(f"{func} has a shape that depends on a mask")
        for tensor in given:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._made:
                self.outside.setdefault(address)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            address = tensor.untyped_storage().data_ptr()
            if address not in self.outside:
                self._made[address] = tensor  # kept, so that its address is not given out again
        self.calls.append((str(func), tuple((tuple(t.shape), t.dtype) for t in given)))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _indices(name: str, args: Any) -> Iterable[Tensor]:
    return _tensors(args[1]) if name in ("index", "index_put", "index_put_") else ()
