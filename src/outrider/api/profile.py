"""Where the time of a pass goes: every kernel of both models between two timers.

Timing a kernel costs about as much as calling it, so the rounds of such a run say little. Profile
the rounds in one run and the kernels in another; with one seed both do the same work.

with kernel_times(llm) as timers:
    llm.generate(prompt)
print(timers.summary())
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from outrider.engine.timing import DeviceTimers
from outrider.kernels.registry import OPS, Kernels

if TYPE_CHECKING:
    from outrider.api.llm import LLM

# What the engine takes when it is built is not looked up again in a run.
_TAKEN = ("argmax", "softmax", "pick", "leftover")
TIMED_OPS = tuple(op for op in OPS if op not in _TAKEN)


class HasKernels(Protocol):
    """A model that looks its kernels up at every call."""

    @property
    def kernels(self) -> Kernels: ...
    @kernels.setter
    def kernels(self, kernels: Kernels, /) -> None: ...


@contextmanager
def kernel_times(llm: LLM) -> Generator[DeviceTimers]:
    """Timers named "target linear", "draft attention" and so on, that run inside the block."""
    models = llm.models
    untimed = {role: model.kernels for role, model in models.items()}
    timers = DeviceTimers(llm.device)
    try:
        for role, model in models.items():
            model.kernels = timed(model.kernels, role, timers)
        yield timers
    finally:
        for role, model in models.items():
            model.kernels = untimed[role]


def timed(kernels: Kernels, role: str, timers: DeviceTimers) -> Kernels:
    """The same kernels, each under the name "`role` operator"."""
    return replace(
        kernels,
        **{op: _timed(getattr(kernels, op), f"{role} {op}", timers) for op in TIMED_OPS},
    )


def _timed(kernel: Callable[..., Any], name: str, timers: DeviceTimers) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        with timers.time(name):
            return kernel(*arguments, **named)

    return run
