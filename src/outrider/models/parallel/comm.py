"""What ranks that share one model say to each other: sums of tensors, and tensors between two.

A rank is one process (or device) of `size`, numbered from 0; rank 0 leads. Every rank makes the
same calls in the same order. All tensors are contiguous and on the rank's own device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

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
