"""Tensor-parallel split (Megatron-LM): the part of a Llama-shaped checkpoint that each rank holds.

Matrices that read the residual (q, k, v, gate, up) are cut by outputs, so a rank has whole heads
and whole FFN features; matrices that write to it (out, down) are cut by inputs, and one sum over
ranks follows each (Shoeybi et al. 2019). Query heads go with the key head that they read. The
output head is cut by tokens; all ranks hold the embedding.

Shapes:  M = packed logits rows, V = vocabulary or a rank's part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.errors import ConfigError, MachineError
from outrider.kernels.native.ranks import NativeRanks
from outrider.models.families import LlamaConfig


@dataclass(frozen=True, slots=True)
class Share:
    """The share of rank `rank` of `size` in anything that is cut."""

    rank: int = 0
    size: int = 1

    def cut(self, total: int) -> slice:
        """The rank's part of `total` rows or columns; parts differ by at most one."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def part(self, config: LlamaConfig) -> LlamaConfig:
        """The sizes of this rank's model. Rank 0 gets whole logits, others compute their part."""
        columns = self.cut(config.vocab_size)
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=config.num_kv_heads // self.size,
            ffn_size=config.ffn_size // self.size,
            vocab_size=columns.stop - columns.start if self.rank else config.vocab_size,
        )


WHOLE = Share()


def check_split(config: LlamaConfig, size: int) -> None:
    """Raise ConfigError unless `size` ranks can have equal parts of every layer."""
    counts: Mapping[str, int] = {
        "key/value heads": config.num_kv_heads,
        "features of the FFN": config.ffn_size,
    }
    for what, count in counts.items():
        if count % size:
            fitting = [n for n in range(2, 65) if not config.num_kv_heads % n | config.ffn_size % n]
            listed = ", ".join(map(str, fitting))
            raise ConfigError(
                f"tensor_parallel={size}: the target has {count} {what}, which {size} ranks "
                "cannot share equally.",
                hint=f"--tensor-parallel takes {listed}" if listed else "leave it at 1",
            )


class RankError(MachineError):
    """A rank ended, fell silent or could not start, so the others cannot go on."""


class Comm(Protocol):
    """Sums and messages among ranks. Calls block, and raise RankError if another rank is gone."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def backend(self) -> str:
        """The means of communication, for reports."""
        ...

    @property
    def memory(self) -> NativeRanks | None:
        """The shared memory over which native passes sum; None if ranks share no memory."""
        ...

    @property
    def ordered(self) -> bool:
        """True if sums are added up in the order of ranks, at every offset of a tensor."""
        ...

    def all_reduce_(self, tensor: Tensor) -> None:
        """Leave the sum over all ranks in `tensor`, with the same bits on every rank."""
        ...

    def send(self, tensor: Tensor, to: int) -> None: ...
    def recv_(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` with the tensor that rank `source` sends, which has the same size."""
        ...

    def barrier(self) -> None: ...
    def end(self) -> None:
        """Make calls that wait fail, in every rank. May be called from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The comm of a model that is whole in one process."""

    rank: int = 0
    size: int = 1
    backend: str = "none"
    memory: None = None
    ordered: bool = True

    def all_reduce_(self, tensor: Tensor) -> None:
        del tensor

    def send(self, tensor: Tensor, to: int) -> None:
        raise AssertionError(f"{tensor.shape} for rank {to}, but there is none")

    def recv_(self, tensor: Tensor, source: int) -> None:
        raise AssertionError(f"{tensor.shape} from rank {source}, but there is none")

    def barrier(self) -> None:
        pass

    def end(self) -> None:
        pass


class LogitParts:
    """Brings every rank's columns of the logits to rank 0.

    A column has the bits that a whole head would give it: no sum is cut.
    """

    def __init__(self, comm: Comm, vocab_size: int, logits_MV: Tensor) -> None:
        """`logits_MV` is the buffer for the logits of one step."""
        self._comm = comm
        self._columns = [Share(rank, comm.size).cut(vocab_size) for rank in range(comm.size)]
        # A product writes contiguous rows and peers send them, so parts need a buffer of their own.
        widest = max(columns.stop - columns.start for columns in self._columns)
        num_numbers = logits_MV.shape[0] * widest if comm.size > 1 and comm.rank == 0 else 0
        self._flat = torch.empty(num_numbers, device=logits_MV.device)

    def own(self, logits_MV: Tensor) -> Tensor:
        """The buffer that this rank's head writes to; the next call overwrites it."""
        if self._comm.size == 1 or self._comm.rank:
            return logits_MV
        return self._buffer(logits_MV.shape[0], self._columns[0])

    def gather(self, part_MV: Tensor, logits_MV: Tensor) -> None:
        """Fill rank 0's `logits_MV`, given what `own` returned and the head wrote."""
        if self._comm.rank:
            self._comm.send(part_MV, 0)
            return
        if self._comm.size == 1:
            return
        logits_MV[:, self._columns[0]] = part_MV
        for rank, columns in enumerate(self._columns[1:], start=1):
            theirs_MV = self._buffer(logits_MV.shape[0], columns)
            self._comm.recv_(theirs_MV, rank)
            logits_MV[:, columns] = theirs_MV

    def _buffer(self, num_rows: int, columns: slice) -> Tensor:
        width = columns.stop - columns.start
        return self._flat[: num_rows * width].view(num_rows, width)
