"""Where the ranks of one machine meet: what rank 0 makes before it starts the other processes.

On CPUs that is memory or sockets without a name, which the others inherit, so no other process can
come in and nothing is left behind. CUDA devices meet in a file of a private folder (NCCL).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from outrider.core import env
from outrider.core.errors import given
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.ranks import NativeRanks, shared_memory
from outrider.models.share import Comm
from outrider.plugins.parallel import comm
from outrider.plugins.parallel.comm import NcclComm, SharedComm, SocketComm

MEMORY, SOCKETS, NCCL = "memory", "sockets", "nccl"


class _End(Protocol):
    """A file or a socket."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Meeting:
    """One of three ways. `own` are rank 0's ends and `others` those of ranks 1 and on; of memory
    all are the same one."""

    size: int
    how: str
    own: Sequence[_End] = ()
    others: Sequence[_End] = ()
    folder: TemporaryDirectory[str] | None = None

    @classmethod
    def on(cls, place: torch.device, size: int, *, native: bool = True) -> Meeting:
        """For ranks on devices like `place`. Without `native` no native kernels are used."""
        if place.type == "cuda":
            return cls(size, NCCL, folder=TemporaryDirectory(prefix="outrider-ranks-"))
        library = built_kernels(env.compiler(), env.cache_folder()).library if native else None
        if library is not None:
            memory = os.fdopen(shared_memory(library, size), "r+b", buffering=0)
            return cls(size, MEMORY, own=[memory], others=[memory] * (size - 1))
        pairs = [socket.socketpair() for _ in range(1, size)]
        own, others = zip(*pairs, strict=True)
        return cls(size, SOCKETS, own=own, others=others)

    def inherited(self, rank: int) -> tuple[int, ...]:
        """The descriptors that the process of `rank`, not 0, inherits."""
        return (self.others[rank - 1].fileno(),) if self.others else ()

    def invitation(self, rank: int) -> dict[str, object]:
        """What the process of `rank`, not 0, gives to `join`; strings and numbers."""
        return self._invitation(rank, self.inherited(rank))

    def started(self) -> None:
        """The others have inherited their ends, so rank 0 lets go of them: then an end is closed
        when its process is gone."""
        if self.how == SOCKETS:
            for end in self.others:
                end.close()

    def join(self) -> Comm:
        """That of rank 0, once. Raises RankError if the others do not come."""
        return join(self._invitation(0, [os.dup(end.fileno()) for end in self.own]))

    def close(self) -> None:
        """After all have joined, or where none will."""
        for end in (*self.own, *self.others):
            end.close()
        if self.folder is not None:
            self.folder.cleanup()

    def _invitation(self, rank: int, at: Sequence[int]) -> dict[str, object]:
        store = "" if self.folder is None else str(Path(self.folder.name) / "store")
        return {"how": self.how, "rank": rank, "size": self.size, "at": list(at), "store": store}


def join(invitation: Mapping[str, Any]) -> Comm:
    """Takes the descriptors over. Raises RankError if the others do not come."""
    rank, size, at = invitation["rank"], invitation["size"], invitation["at"]
    match invitation["how"]:
        case "memory":
            library = built_kernels(env.compiler(), env.cache_folder()).library
            patience = 0.0 if rank else comm.SILENCE_SECONDS
            memory = NativeRanks(
                given(library, "library"), *at, rank=rank, size=size, patience=patience
            )
            # It stays mapped.
            os.close(*at)
            return SharedComm(memory)
        case "sockets":
            return SocketComm(rank, size, [socket.socket(fileno=one) for one in at])
        case _:
            return NcclComm(rank, size, Path(invitation["store"]))
