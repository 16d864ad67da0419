"""Ranks as threads of one process: what is shared out, without the cost of starting anything.

`sharded(name, size)` builds the real `ShardedLM` over real shares of a tiny checkpoint. Only the
processes are replaced, by threads that meet at a barrier, or in the memory that processes share.
"""

from __future__ import annotations

import os
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from doubles.kinds import Kind, stored
from outrider.core.errors import MachineError
from outrider.core.protocols import CausalLM
from outrider.kernels.registry import is_native
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.llama_weights import Comm
from outrider.models.loading import load_model
from outrider.plugins.parallel.comm import RankError
from outrider.plugins.parallel.meeting import Meeting, join
from outrider.plugins.parallel.messages import apply
from outrider.plugins.parallel.ranks import HEADER, encode
from outrider.plugins.parallel.sharded import ShardedLM

PATIENCE_SECONDS = 20.0


class Barrier:
    """Where the ranks of one model meet; counts what they did together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_sums = 0
        self.barrier = threading.Barrier(size, timeout=PATIENCE_SECONDS)
        self.given: list[Tensor | None] = [None] * size
        self.mail: Mapping[tuple[int, int], SimpleQueue[Tensor]] = {
            (source, to): SimpleQueue() for source in range(size) for to in range(size)
        }


class ThreadComm:
    """A `Comm` among threads, which adds up in the order of ranks."""

    backend, memory, ordered = "threads", None, True

    def __init__(self, rank: int, meeting: Barrier) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting

    def all_reduce_(self, tensor: Tensor) -> None:
        self._meeting.given[self.rank] = tensor
        self.barrier()
        first, *others = (given for given in self._meeting.given if given is not None)
        total = first.clone()
        for other in others:
            total += other
        self.barrier()
        tensor.copy_(total)
        self._meeting.num_sums += self.rank == 0

    def send(self, tensor: Tensor, to: int) -> None:
        self._meeting.mail[self.rank, to].put(tensor.clone())

    def recv_(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._meeting.mail[source, self.rank].get(timeout=PATIENCE_SECONDS))

    def barrier(self) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankError("a thread did not come") from error

    def end(self) -> None:
        self._meeting.barrier.abort()


class ThreadRanks:
    """Followers that get every message through its encoding, as processes would."""

    def __init__(self, models: Sequence[LlamaModel], comms: Sequence[Comm]) -> None:
        self.models = models
        self.process_ids: list[int] = []
        self.told: list[list[int]] = []
        self._leads, *others = comms
        self._orders: list[SimpleQueue[bytes]] = [SimpleQueue() for _ in models]
        over = threading.Event()
        for model, comm, orders in zip(models, others, self._orders, strict=True):
            given = model, comm, orders, over
            threading.Thread(target=_follow, args=given, daemon=True).start()
        weakref.finalize(self, _stop, self._leads, self._orders, over)
        self._lost: str | None = None

    def tell(self, message: Sequence[int]) -> None:
        self.told.append(list(message))
        if self._leads.memory is not None:
            self._leads.memory.tell(message)
            return
        for orders in self._orders:
            orders.put(encode(message))

    def check(self) -> None:
        if self._lost is not None:
            raise RankError(self._lost)

    def lose(self, reason: str) -> RankError:
        return self.end(reason)

    def end(self, reason: str) -> RankError:
        self._lost = reason
        return RankError(reason)


def _follow(
    model: LlamaModel, comm: Comm, orders: SimpleQueue[bytes], over: threading.Event
) -> None:
    try:
        for message in _messages(model, comm, orders):
            apply(message, model, torch.device("cpu"))
    except MachineError:
        # Rank 0 may end while another one returns from the last pass.
        if not over.is_set():
            raise


def _messages(model: LlamaModel, comm: Comm, orders: SimpleQueue[bytes]) -> Iterator[list[int]]:
    if comm.memory is not None:
        while (message := comm.memory.next_message(model.native_share)) is not None:
            yield message
        return
    while data := orders.get():
        received = array("q")
        received.frombytes(data[HEADER.size :])
        yield received.tolist()


def _stop(comm: Comm, orders: Sequence[SimpleQueue[bytes]], over: threading.Event) -> None:
    over.set()
    comm.end()
    for queue in orders:
        queue.put(b"")


def barrier_comms(size: int, meeting: Barrier | None = None) -> list[Comm]:
    meeting = meeting or Barrier(size)
    return [ThreadComm(rank, meeting) for rank in range(size)]


def process_comms(size: int, *, native: bool) -> list[Comm]:
    """Those that processes have: memory with native kernels, else sockets."""
    meeting = Meeting.on(torch.device("cpu"), size, native=native)
    comms = [meeting.join()]
    for rank in range(1, size):
        inherited = [os.dup(one) for one in meeting.inherited(rank)]
        comms.append(join({**meeting.invitation(rank), "at": inherited}))
    meeting.close()
    return comms


def shared_comms(size: int) -> list[Comm]:
    if not is_native(torch.device("cpu"), torch.float32):
        pytest.skip("no native kernels here")
    return process_comms(size, native=True)


def socket_comms(size: int) -> list[Comm]:
    return process_comms(size, native=False)


WAYS: Sequence[Callable[[int], list[Comm]]] = (barrier_comms, shared_comms, socket_comms)


def share_out(
    name: str, comms: Sequence[Comm], options: LoadOptions, *, seed: int = 0
) -> tuple[ShardedLM, ThreadRanks]:
    """The tiny checkpoint `name` among threads, one for each of `comms`."""

    def load(comm: Comm) -> LlamaModel:
        model = load_model(stored(name, seed), options, comm=comm)
        assert isinstance(model, LlamaModel)
        return model

    with ThreadPoolExecutor(len(comms)) as pool:
        leader, *followers = pool.map(load, comms)
    ranks = ThreadRanks(followers, comms)
    return ShardedLM(leader, comms[0], ranks), ranks


def sharded(name: str, size: int) -> Kind:
    def build(
        *, vocab_size: int = 96, seed: int = 0, num_slots: int = 256, page_size: int = 4
    ) -> CausalLM:
        assert vocab_size <= 96
        capacity = ModelCapacity(num_slots=num_slots, page_size=page_size)
        options = LoadOptions(capacity=capacity, device="cpu")
        return share_out(name, barrier_comms(size), options, seed=seed)[0]

    return build
