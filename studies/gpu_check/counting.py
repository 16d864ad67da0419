"""How many kernels a piece of work launches: those of Triton, and those of PyTorch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Counts operators of PyTorch that launch a kernel on a GPU: all but views, allocations and
    what stays on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if launches_kernel(func, args, made) and any(
            one.device.type != "cpu" for one in _tensors(made)
        ):
            self.counts[func.overloadpacket.__name__] += 1
        return made


_SILENT = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
)


def launches_kernel(operator: Any, given: Any, made: Any) -> bool:
    """Whether a device launches a kernel for `operator`, which was given such arguments and made
    such results: not for allocations, what the host reads, and views. Some are views only where
    they need not copy, as `to` and `reshape` are."""
    results = _tensors(made)
    if not results or operator.overloadpacket.__name__ in _SILENT:
        return False
    memory = {one.untyped_storage()._cdata for one in _tensors(given)}
    return not is_view(operator) or any(
        one.untyped_storage()._cdata not in memory for one in results
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def is_view(operator: Any) -> bool:
    """Whether its results are memory of its arguments that it does not write."""
    returned = [one.alias_info for one in operator._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def launches_of(work: Callable[[], object]) -> dict[str, int]:
    """Runs `work` once, operator by operator, and counts its launches: `triton` and `torch`."""
    count = 0
    names = [name for name in sys.modules if name.startswith("outrider.plugins.gpu.kernels.")]
    places = [vars(sys.modules[name]) for name in names if "launch" in vars(sys.modules[name])]
    originals = [own["launch"] for own in places]

    def counting(launch: Callable[..., None]) -> Callable[..., None]:
        def counted(kernel: object, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
            nonlocal count
            count += 0 not in grid
            launch(kernel, grid, *given, **constants)

        return counted

    try:
        for own, original in zip(places, originals, strict=True):
            own["launch"] = counting(original)
        with Operators() as operators:
            work()
    finally:
        for own, original in zip(places, originals, strict=True):
            own["launch"] = original
    return {"triton": count, "torch": operators.counts.total()}
