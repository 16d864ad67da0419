"""Running a program of static memory again and again: eagerly, or captured as one CUDA graph.

A capture records the kernels of one run with their addresses; a launch replays them with a single
call. What a round decided is copied to one of two pinned buffers behind an event, so that the host
may read a round while the next one runs. Nothing else waits.

Shapes:  B = rows, R = numbers of a report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Libraries choose algorithms and allocate workspaces in their first calls.
_WARM_UPS = 2


class Launcher(Protocol):
    """Makes launches of programs. `prepare` puts the memory that a program reads and moves on into
    the state that its next run is to find; it may be called several times."""

    def make(
        self, program: Callable[[], None], prepare: Callable[[], None]
    ) -> Callable[[], None]: ...


class EagerLauncher:
    """Runs a program operator by operator, on any device."""

    def make(self, program: Callable[[], None], prepare: Callable[[], None]) -> Callable[[], None]:
        prepare()
        return program


class GraphLauncher:
    """One CUDA graph a program. All graphs share a pool of memory: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def make(self, program: Callable[[], None], prepare: Callable[[], None]) -> Callable[[], None]:
        """Runs `program` for real some times before it is captured."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        prepare()
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                program()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            program()
        prepare()
        return graph.replay


def launcher_for(device: torch.device) -> Launcher:
    return GraphLauncher(device) if device.type == "cuda" else EagerLauncher()


@dataclass(frozen=True, slots=True)
class Ticket:
    """A report on its way to the host."""

    report_BR: Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> Tensor:
        """The report, in host memory. Waits for it, for nothing behind it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.report_BR


class Mailbox:
    """Two host buffers in turns: a report may be read until the one after the next is posted."""

    def __init__(self, like_BR: Tensor) -> None:
        self._on_cuda = like_BR.is_cuda
        self._slots = [
            torch.zeros(like_BR.shape, dtype=like_BR.dtype, pin_memory=self._on_cuda)
            for _ in range(2)
        ]
        self._turn = 0

    def post(self, report_BR: Tensor) -> Ticket:
        """Copy `report_BR` once the work asked for so far is done; returns at once."""
        slot_BR = self._slots[self._turn][: report_BR.shape[0]]
        self._turn = 1 - self._turn
        slot_BR.copy_(report_BR, non_blocking=True)
        if not self._on_cuda:
            return Ticket(slot_BR, None)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(report_BR.device))
        return Ticket(slot_BR, arrived)
