"""Ranks as threads of one process: what is shared out, without the cost of starting anything.

`sharded(name, size)` builds the real `ShardedLM` over real shares of a tiny checkpoint. Only the
processes and torch.distributed are replaced, by threads that meet at a barrier.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from torch import Tensor

from doubles.kinds import Kind, stored
from outrider.core.protocols import CausalLM
from outrider.models.decoder import Decoder, Room
from outrider.models.loading import LoadOptions, load_model
from outrider.models.parallel.comm import RankError
from outrider.models.parallel.messages import apply
from outrider.models.parallel.ranks import HEADER, encode
from outrider.models.parallel.sharded import ShardedLM

PATIENCE_SECONDS = 20.0


class Meeting:
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

    def __init__(self, rank: int, meeting: Meeting) -> None:
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


class ThreadRanks:
    """Followers that get every message through its encoding, as processes would."""

    def __init__(self, models: Sequence[CausalLM]) -> None:
        self.models = models
        self.process_ids: list[int] = []
        self.told: list[list[int]] = []
        self._orders: list[SimpleQueue[bytes]] = [SimpleQueue() for _ in models]
        for model, orders in zip(models, self._orders, strict=True):
            threading.Thread(target=_follow, args=(model, orders), daemon=True).start()
        weakref.finalize(self, _stop, self._orders)
        self._lost: str | None = None

    def tell(self, message: Sequence[int]) -> None:
        self.told.append(list(message))
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


def _follow(model: CausalLM, orders: SimpleQueue[bytes]) -> None:
    while data := orders.get():
        message = array("q")
        message.frombytes(data[HEADER.size :])
        apply(message.tolist(), model)


def _stop(orders: Sequence[SimpleQueue[bytes]]) -> None:
    for queue in orders:
        queue.put(b"")


def share_out(
    name: str, size: int, options: LoadOptions, *, seed: int = 0
) -> tuple[ShardedLM, ThreadRanks, Meeting]:
    """The tiny checkpoint `name` among `size` threads."""
    meeting = Meeting(size)

    def load(rank: int) -> Decoder:
        return load_model(stored(name, seed), options, comm=ThreadComm(rank, meeting))

    with ThreadPoolExecutor(size) as pool:
        leader, *followers = pool.map(load, range(size))
    ranks = ThreadRanks(followers)
    return ShardedLM(leader, ranks), ranks, meeting


def sharded(name: str, size: int) -> Kind:
    def build(
        *, vocab_size: int = 96, seed: int = 0, num_slots: int = 256, page_size: int = 4
    ) -> CausalLM:
        assert vocab_size <= 96
        room = Room(num_slots=num_slots, page_size=page_size)
        return share_out(name, size, LoadOptions(room=room, device="cpu"), seed=seed)[0]

    return build
