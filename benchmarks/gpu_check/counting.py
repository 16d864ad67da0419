"""How many kernels a piece of work launches: those of Triton, and those of PyTorch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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
        name, made = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        results = made if isinstance(made, tuple | list) else (made,)
        away = any(isinstance(one, Tensor) and one.device.type != "cpu" for one in results)
        if away and not (is_view(func) or name in _SILENT):
            self.counts[name] += 1
        return made


_SILENT = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
)


def is_view(operator: Any) -> bool:
    """Whether its results are memory of its arguments that it does not write."""
    returned = [one.alias_info for one in operator._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def launches_of(work: Callable[[], object]) -> dict[str, int]:
    """Runs `work` once, operator by operator, and counts its launches: `triton` and `torch`."""
    count = 0
    names = [name for name in sys.modules if name.startswith("outrider.kernels.triton.")]
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
