"""Profiling: seconds of each kernel of a pass, measured by CUDA events or by the host's clock.

    with kernel_times(llm) as timers:
        llm.generate(prompt)
    print(timers.summary())

Timing a kernel costs about as much as calling it. So profile rounds in one run and kernels in
another run of the same seed, which does the same work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.errors import ContractError, OutriderError
from outrider.kernels.operators import OPS, HasKernels, Kernels

Device = torch.device | str | None


class TimerError(OutriderError):
    """A timer was read before it ended, or started or stopped out of turn."""


class Span(Protocol):
    """A stretch of work that began when the span was created."""

    @property
    def is_known(self) -> bool:
        """True if reading would not wait."""
        ...

    def stop(self) -> None: ...
    def elapsed_ms(self) -> float: ...


class _HostSpan:
    """A span by the host's `clock`, which may wait until earlier work is done."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started = self._ended = clock()

    @property
    def is_known(self) -> bool:
        return True

    def stop(self) -> None:
        self._ended = self._clock()

    def elapsed_ms(self) -> float:
        return 1e3 * (self._ended - self._started)


class _EventSpan:
    """A span between two events on the stream that is current on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record(torch.cuda.current_stream(device))

    @property
    def is_known(self) -> bool:
        return self._end.query()

    def stop(self) -> None:
        self._end.record(torch.cuda.current_stream(self._device))

    def elapsed_ms(self) -> float:
        self._end.synchronize()
        return self._start.elapsed_time(self._end)


def synced_seconds(device: Device = None) -> float:
    """The host clock, once `device` has done all of its work. None is CUDA, if present.

    Waiting for the device is right at the ends of a run; in between use `DeviceTimer`.
    """
    resolved = _resolved(device)
    if resolved.type == "cuda":
        torch.cuda.synchronize(resolved)
    elif resolved.type == "mps":
        torch.mps.synchronize()
    return HOST_CLOCK()


class DeviceTimer:
    """Times a block: `with DeviceTimer() as timer: work()`, then `timer.elapsed_ms`. Reusable.

    `device` None is CUDA if there is any; `clock` replaces the host clock without CUDA.

    A GPU works asynchronously: a host clock around a call measures only its launch. This timer
    records an event before and an event after the work, on the device's own stream; only reading
    the timer waits, and only for the second event. Without CUDA the host clock is used.
    """

    def __init__(self, device: Device = None, *, clock: Clock | None = None) -> None:
        self._device = _resolved(device)
        self._begin = _beginner(self._device, clock)
        self._span: Span | None = None
        self._running = False

    def __enter__(self) -> DeviceTimer:
        if self._running:
            raise TimerError("this timer runs already.", hint="use one timer for each stretch")
        self._span, self._running = self._begin(), True
        return self

    def __exit__(self, *_: object) -> None:
        if self._span is None:
            raise ContractError("there is no span")
        self._span.stop()
        self._running = False

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds between entry and exit. Waits for the work to end.

        Raises TimerError before the exit.
        """
        if self._span is None or self._running:
            raise TimerError(f"this timer is {self._state()}.", hint="read it after its with block")
        return self._span.elapsed_ms()

    def __repr__(self) -> str:
        shown = self._state() or f"{self.elapsed_ms:.3f} ms"
        return f"DeviceTimer({self._device}: {shown})"

    def _state(self) -> str:
        return "not started" if self._span is None else "still running" if self._running else ""


class DeviceTimers:
    """Named stages that may run many times: their milliseconds add up.

    Spans are stored until their events are over and then become numbers, so neither starting nor
    stopping waits, and events do not pile up in a long run.
    """

    def __init__(self, device: Device = None, *, clock: Clock | None = None) -> None:
        self._device = _resolved(device)
        self._begin = _beginner(self._device, clock)
        self._running: dict[str, Span] = {}
        self._unread: dict[str, list[Span]] = {}
        self._totals: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    @property
    def names(self) -> tuple[str, ...]:
        """The stages that ended at least once, in the order of their first end."""
        return tuple(self._totals)

    def start(self, name: str) -> None:
        """Start a stage. Raises TimerError if `name` runs already; different names may overlap."""
        if name in self._running:
            raise TimerError(f"{name!r} runs already.", hint="stop it before it starts again")
        self._running[name] = self._begin()

    def stop(self, name: str) -> None:
        """End a stage. Raises TimerError if `name` does not run."""
        if name not in self._running:
            raise TimerError(f"{name!r} was not started.", hint="start it first")
        span = self._running.pop(name)
        span.stop()
        self._unread.setdefault(name, []).append(span)
        self._totals.setdefault(name, 0.0)
        self._counts[name] += 1
        self._fold(name, lambda span: span.is_known)

    @contextmanager
    def time(self, name: str) -> Generator[None]:
        """Time a block as a stage."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def elapsed_ms(self, name: str) -> float:
        """Sum of all runs of `name`. Waits for the last one. Raises TimerError if none ended."""
        if name not in self._totals:
            state = "still runs" if name in self._running else "was not started"
            raise TimerError(f"{name!r} {state}.", hint="stop it before it is read")
        self._fold(name, lambda _: True)
        return self._totals[name]

    def count(self, name: str) -> int:
        """The number of times that `name` ended."""
        return self._counts[name]

    def summary(self) -> dict[str, float]:
        """Milliseconds by name."""
        return {name: self.elapsed_ms(name) for name in self._totals}

    def reset(self) -> None:
        """Forget everything, including running stages."""
        for kept in (self._running, self._unread, self._totals, self._counts):
            kept.clear()

    def __repr__(self) -> str:
        shown = [f"{n} {ms:.3f} ms in {self._counts[n]}" for n, ms in self.summary().items()]
        shown += [f"{name} running" for name in self._running]
        return f"DeviceTimers({self._device}: {', '.join(shown) or 'empty'})"

    def _fold(self, name: str, is_due: Callable[[Span], bool]) -> None:
        """Turn spans into numbers, oldest first, as long as `is_due`."""
        spans = self._unread[name]
        while spans and is_due(spans[0]):
            self._totals[name] += spans.pop(0).elapsed_ms()


def _resolved(device: Device) -> torch.device:
    """`device`, or the CPU if it is a CUDA device on a machine without CUDA."""
    found = torch.device(device or "cuda")
    return torch.device("cpu") if found.type == "cuda" and not torch.cuda.is_available() else found


def _beginner(device: torch.device, clock: Clock | None) -> Callable[[], Span]:
    """A function that begins spans on `device`."""
    if device.type == "cuda":
        return lambda: _EventSpan(device)
    if device.type == "cpu":
        return lambda: _HostSpan(clock or HOST_CLOCK)
    return lambda: _HostSpan(clock or (lambda: synced_seconds(device)))


# The engine takes these when it is built, and not during a run; no round judges prefixes.
_TAKEN = ("argmax", "verify_prefix", "softmax", "pick", "leftover")

# A native mixture of experts is one call of its own.
TIMED_OPS = (
    *(op for op in OPS if op not in _TAKEN),
    "mix",
    "latent_queries",
    "latent_values",
)


class HasModels(Protocol):
    @property
    def models(self) -> Mapping[str, HasKernels]: ...
    @property
    def device(self) -> torch.device: ...


@contextmanager
def kernel_times(llm: HasModels) -> Generator[DeviceTimers]:
    """Timers named "target linear", "draft attention" and so on, which run within the block."""
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
    """The same kernels, each timed under the name "`role` operator"."""
    return replace(
        kernels, **{op: _timed(getattr(kernels, op), f"{role} {op}", timers) for op in TIMED_OPS}
    )


def _timed(kernel: Callable[..., Any], name: str, timers: DeviceTimers) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        with timers.time(name):
            return kernel(*arguments, **named)

    return run
