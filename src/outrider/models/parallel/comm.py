"""Communication of tensor parallelism over torch.distributed: sums, and sends between two ranks.

A rank is one process (or device) of `size`, numbered from 0; rank 0 leads. Every rank makes the
same calls in the same order. Tensors are contiguous and on the rank's own device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed
from torch import Tensor, device

from outrider.core.errors import MachineError


class RankError(MachineError):
    """A rank ended, fell silent or could not start, so the others cannot go on."""


class Comm(Protocol):
    """Blocks until the tensor may be used. Raises RankError when another rank is gone."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce_(self, tensor: Tensor) -> None:
        """Leave the sum over all ranks in `tensor`, with the same bits on every rank."""
        ...

    def send(self, tensor: Tensor, to: int) -> None: ...
    def recv_(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` with what rank `source` sends; it must have the same size."""
        ...

    def barrier(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The comm of a model that is whole in one process."""

    rank: int = 0
    size: int = 1

    def all_reduce_(self, tensor: Tensor) -> None:
        del tensor

    def send(self, tensor: Tensor, to: int) -> None:
        raise AssertionError(f"{tensor.shape} for rank {to}, but there is none")

    def recv_(self, tensor: Tensor, source: int) -> None:
        raise AssertionError(f"{tensor.shape} from rank {source}, but there is none")

    def barrier(self) -> None:
        pass


# How long a rank may keep the others waiting before it counts as hung.
SILENCE_SECONDS = 60.0
LOOPBACK = "127.0.0.1"


class TorchComm:
    """Raises MachineError if this PyTorch lacks the backend, RankError if the others do not come
    within SILENCE_SECONDS. `store` is the file in which the ranks meet.

    The backend is gloo between processes on CPUs and NCCL between CUDA devices. The process group
    is made directly rather than by `init_process_group`, of which a process can have only one.
    Ranks of one machine meet in a file that the leader removes afterwards, and speak over the
    loopback interface; no object is ever sent, hence nothing is unpickled. A sum of two ranks has
    the same bits whatever the order; with more ranks gloo and NCCL add in an order that depends on
    where in the buffer a number lies.
    """

    def __init__(self, rank: int, size: int, *, store: Path, place: device) -> None:
        self.rank, self.size = rank, size
        self.backend = "nccl" if place.type == "cuda" else "gloo"
        make = {"gloo": _gloo, "nccl": _nccl}[self.backend]
        self._group: Any = _guarded(lambda: make(store, rank, size))

    def all_reduce_(self, tensor: Tensor) -> None:
        _guarded(lambda: self._group.allreduce([tensor]).wait())

    def send(self, tensor: Tensor, to: int) -> None:
        _guarded(lambda: self._group.send([tensor], to, 0).wait())

    def recv_(self, tensor: Tensor, source: int) -> None:
        _guarded(lambda: self._group.recv([tensor], source, 0).wait())

    def barrier(self) -> None:
        _guarded(lambda: self._group.barrier().wait())


def _guarded(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        raise RankError(f"the ranks of a shared model lost each other: {error}") from error


def _distributed(name: str) -> Any:
    """torch.distributed, whose process groups have no type stubs."""
    distributed: Any = torch.distributed
    if not distributed.is_available() or not hasattr(distributed, name):
        raise MachineError(
            f"PyTorch {torch.__version__} was built without {name}.",
            hint="leave --tensor-parallel at 1, or install PyTorch's own build",
        )
    return distributed


def _gloo(store: Path, rank: int, size: int) -> Any:
    distributed = _distributed("ProcessGroupGloo")
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    # By default gloo asks the network for this host's name, which may not answer.
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = timedelta(seconds=SILENCE_SECONDS)
    return gloo(distributed.FileStore(str(store), size), rank, size, options)


def _nccl(store: Path, rank: int, size: int) -> Any:
    distributed = _distributed("ProcessGroupNCCL")
    nccl = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=SILENCE_SECONDS)
    return nccl(distributed.FileStore(str(store), size), rank, size, options)
