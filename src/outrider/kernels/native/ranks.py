"""Ranks on one machine, over memory that their processes share (csrc/ranks.h).

The ranks are those of one model, or an engine and its drafter's process.

The memory has no name in any folder: rank 0 makes it, the others inherit its descriptor, and the
system frees it with the last of them, however they end.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from ctypes import c_char, c_int64, string_at

from torch import Tensor

from outrider.core.errors import MachineError
from outrider.core.files import anonymous_file
from outrider.kernels.native.ops import function
from outrider.kernels.native.rounds import RoundModel

# The most bytes that are taken from a stream at once.
_PIECE = 1 << 16


def shared_memory(library: ctypes.CDLL, size: int) -> int:
    """The descriptor of zeroed memory for `size` ranks. Raises MachineError if impossible."""
    num_bytes = function(library, "ranks_bytes")(size)
    if num_bytes < 0:
        raise MachineError(f"{size} ranks are more than share memory on one machine.")
    try:
        return anonymous_file("outrider-ranks", num_bytes)
    except OSError as error:
        raise MachineError(f"there is no memory for ranks to share: {error}") from error


class NativeRanks:
    """Rank `rank` of `size` over the memory of `descriptor`. After a wait of `patience` seconds the
    ranks count as ended; 0 waits for ever. Methods that return a bool return False at the end."""

    def __init__(
        self, library: ctypes.CDLL, descriptor: int, *, rank: int, size: int, patience: float
    ) -> None:
        # Mapped as long as this object lives, which objects with the address keep alive.
        self._memory = mmap.mmap(descriptor, 0)
        self._first = c_char.from_buffer(self._memory)
        self.rank, self.size = rank, size
        start = ctypes.addressof(self._first)
        self.address: int = function(library, "ranks")(start, rank, size, patience)
        self._sum, self._send, self._receive, self._tell, self._turn, self._follow, self._end = (
            function(library, f"ranks_{name}")
            for name in ("sum", "send", "receive", "tell", "turn", "follow", "end")
        )
        self._put, self._take = (function(library, f"ranks_{name}") for name in ("put", "take"))
        self._taken = (c_char * _PIECE)()
        self._taken_at = ctypes.addressof(self._taken)

    def sum(self, numbers: Tensor) -> bool:
        """Replace `numbers`, float32, by their sum over all ranks, added in the order of ranks."""
        return bool(self._sum(self.address, numbers.data_ptr(), numbers.numel()))

    def send(self, tensor: Tensor, to: int) -> bool:
        return bool(self._send(self.address, to, tensor.data_ptr(), tensor.nbytes))

    def receive(self, tensor: Tensor, source: int) -> bool:
        return bool(self._receive(self.address, source, tensor.data_ptr(), tensor.nbytes))

    def put(self, data: bytes, to: int, patience: float) -> int | None:
        """Offer `data` to rank `to`. Return the number of bytes accepted, as soon as some fit: 0 if
        none fit for `patience` seconds (0: wait for ever), None at the end."""
        count: int = self._put(self.address, to, data, len(data), patience)
        return None if count < 0 else count

    def take(self, size: int, source: int, patience: float) -> bytes | None:
        """Take at most `size` bytes that rank `source` put, as soon as there are some. Empty if
        none come for `patience` seconds (0: wait for ever), None at the end."""
        most = min(size, _PIECE)
        count: int = self._take(self.address, source, self._taken_at, most, patience)
        return None if count < 0 else string_at(self._taken_at, count)

    def tell(self, message: Sequence[int]) -> bool:
        """Send `message` to all other ranks, for their `next_message`."""
        numbers = (c_int64 * len(message))(*message)
        return bool(self._tell(self.address, ctypes.addressof(numbers), len(message)))

    def next_message(self, share: RoundModel | None) -> list[int] | None:
        """The next message of rank 0, None at the end. Until it comes, this rank's `share` of the
        model runs its part of rank 0's native passes; None if there are no such passes."""
        decoder = blank = logits = None
        if share is not None:
            described = share.forward.blank_pass(share.page_size)
            decoder, blank = share.forward.address, ctypes.addressof(described)
            logits = share.logits_MV.data_ptr()
        count = self._follow(self.address, decoder, blank, logits)
        if count < 0:
            return None
        numbers = (c_int64 * count)()
        together = self._receive(self.address, 0, ctypes.addressof(numbers), 8 * count)
        return numbers[:] if together else None

    def end(self) -> None:
        """End all waits among the ranks, now and from now on."""
        self._end(self.address)

    def __enter__(self) -> None:
        """Begin a turn. A thread of rank 0 holds it while it announces a pass and runs it."""
        self._turn(self.address, True)

    def __exit__(self, *_: object) -> None:
        self._turn(self.address, False)
