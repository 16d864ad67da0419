"""Communication of tensor parallelism: sums over all ranks, and messages between two of them.

A rank is one process (or device) of `size`, numbered from 0; rank 0 leads. Every rank makes the
same calls in the same order. Tensors are contiguous and on the rank's own device. No `Comm` listens
at a port or sends objects, so nothing is unpickled.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed
from torch import Tensor

from outrider.core.errors import MachineError
from outrider.kernels.native.ranks import NativeRanks

# A rank that keeps rank 0 waiting for longer counts as hung.
SILENCE_SECONDS = 60.0
_LOST = "the ranks of a shared model lost each other"


class RankError(MachineError):
    """A rank ended, fell silent or could not start, so the others cannot go on."""


class SharedComm:
    """Communication between processes on CPUs of one machine, through shared memory."""

    backend = "shared memory"
    ordered = True

    def __init__(self, memory: NativeRanks) -> None:
        self.rank, self.size, self.memory = memory.rank, memory.size, memory

    def all_reduce_(self, tensor: Tensor) -> None:
        _together(self.memory.sum(tensor))

    def send(self, tensor: Tensor, to: int) -> None:
        _together(self.memory.send(tensor, to))

    def recv_(self, tensor: Tensor, source: int) -> None:
        _together(self.memory.receive(tensor, source))

    def barrier(self) -> None:
        self.all_reduce_(torch.zeros(1))

    def end(self) -> None:
        self.memory.end()


def _together(answer: bool) -> None:
    if not answer:
        raise RankError(f"{_LOST}: one is gone, or was waited for too long")


class SocketComm:
    """Communication between processes without native kernels: each rank has a pair of connected
    sockets with rank 0, which sums. Other ranks have no connections with each other."""

    backend = "sockets"
    ordered = True
    memory = None

    def __init__(self, rank: int, size: int, peers: Sequence[socket.socket]) -> None:
        """`peers` are the sockets to ranks 1 and up, or to rank 0."""
        self.rank, self.size = rank, size
        self._peers = dict(zip(range(1, size) if rank == 0 else [0], peers, strict=True))
        for peer in peers:
            peer.settimeout(None if rank else SILENCE_SECONDS)
            weakref.finalize(self, peer.close)

    def all_reduce_(self, tensor: Tensor) -> None:
        if self.rank:
            self.send(tensor, 0)
            self.recv_(tensor, 0)
            return
        summand = torch.empty_like(tensor)
        for rank in self._peers:
            self.recv_(summand, rank)
            tensor += summand
        for rank in self._peers:
            self.send(tensor, rank)

    def send(self, tensor: Tensor, to: int) -> None:
        _guarded(lambda: self._peers[to].sendall(_bytes(tensor)))

    def recv_(self, tensor: Tensor, source: int) -> None:
        left, peer = _bytes(tensor), self._peers[source]
        while left:
            count = _guarded(lambda left=left: peer.recv_into(left))
            if not count:
                raise RankError(f"{_LOST}: rank {source} is gone")
            left = left[count:]

    def barrier(self) -> None:
        self.all_reduce_(torch.zeros(1))

    def end(self) -> None:
        for peer in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)


def _bytes(tensor: Tensor) -> memoryview:
    numbers: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


class NcclComm:
    """Communication between CUDA devices of one machine. Raises MachineError if this PyTorch lacks
    NCCL, RankError if the other ranks do not join within SILENCE_SECONDS. `store` is the file
    through which the ranks meet; the leader removes it afterwards.

    The process group is made directly rather than by `init_process_group`, of which a process can
    have only one. A sum of two ranks has the same bits in any order; for more ranks, the order in
    which NCCL adds depends on the offset of a number in the buffer.
    """

    backend = "nccl"
    memory = None

    def __init__(self, rank: int, size: int, store: Path) -> None:
        self.rank, self.size = rank, size
        self.ordered = size <= 2
        self._group: Any = _guarded(lambda: _nccl(store, rank, size))

    def all_reduce_(self, tensor: Tensor) -> None:
        _guarded(lambda: self._group.allreduce([tensor]).wait())

    def send(self, tensor: Tensor, to: int) -> None:
        _guarded(lambda: self._group.send([tensor], to, 0).wait())

    def recv_(self, tensor: Tensor, source: int) -> None:
        _guarded(lambda: self._group.recv([tensor], source, 0).wait())

    def barrier(self) -> None:
        _guarded(lambda: self._group.barrier().wait())

    def end(self) -> None:
        pass


def _guarded(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (OSError, RuntimeError) as error:
        raise RankError(f"{_LOST}: {error or type(error).__name__}") from error


def _nccl(store: Path, rank: int, size: int) -> Any:
    # Its process groups have no type stubs.
    distributed: Any = torch.distributed
    if not distributed.is_available() or not hasattr(distributed, "ProcessGroupNCCL"):
        raise MachineError(
            f"PyTorch {torch.__version__} was built without NCCL.",
            hint="leave --tensor-parallel at 1, or install PyTorch's own build",
        )
    nccl = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=SILENCE_SECONDS)
    return nccl(distributed.FileStore(str(store), size), rank, size, options)
