"""Connections among the ranks of one machine, which rank 0 makes before it starts the others.

On CPUs these are memory or sockets without a name, which the other processes inherit, so no other
process can connect and nothing is left behind. CUDA devices meet through a file in a private folder
(NCCL).
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
from outrider.models.llama_weights import Comm
from outrider.plugins.parallel import comm
from outrider.plugins.parallel.comm import NcclComm, SharedComm, SocketComm

MEMORY, SOCKETS, NCCL = "memory", "sockets", "nccl"


class _End(Protocol):
    """A file or a socket."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Meeting:
    """Connections of one of three kinds (`how`): memory, sockets or NCCL. `own` are rank 0's ends,
    `others` the ends of ranks 1 and up; for memory all ends are the same file."""

    size: int
    how: str
    own: Sequence[_End] = ()
    others: Sequence[_End] = ()
    folder: TemporaryDirectory[str] | None = None

    @classmethod
    def on(cls, device: torch.device, size: int, *, native: bool = True) -> Meeting:
        """Make connections for ranks on `device`, with native kernels only if `native`."""
        if device.type == "cuda":
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
        """The argument of `join` for the process of `rank`, not 0; strings and numbers only."""
        return self._invitation(rank, self.inherited(rank))

    def started(self) -> None:
        """Close rank 0's copies of the ends that the others have inherited, so that an end is
        closed when its process is gone."""
        if self.how == SOCKETS:
            for end in self.others:
                end.close()

    def join(self) -> Comm:
        """Rank 0's `Comm`; call it once. Raises RankError if the other ranks do not join."""
        return join(self._invitation(0, [os.dup(end.fileno()) for end in self.own]))

    def close(self) -> None:
        """Close all ends: after all ranks have joined, or if none will."""
        for end in (*self.own, *self.others):
            end.close()
        if self.folder is not None:
            self.folder.cleanup()

    def _invitation(self, rank: int, at: Sequence[int]) -> dict[str, object]:
        store = "" if self.folder is None else str(Path(self.folder.name) / "store")
        return {"how": self.how, "rank": rank, "size": self.size, "at": list(at), "store": store}


def join(invitation: Mapping[str, Any]) -> Comm:
    """The `Comm` of an invited rank, over its descriptors. Raises RankError if ranks are
    missing."""
    rank, size, at = invitation["rank"], invitation["size"], invitation["at"]
    match invitation["how"]:
        case "memory":
            library = built_kernels(env.compiler(), env.cache_folder()).library
            patience = 0.0 if rank else comm.SILENCE_SECONDS
            memory = NativeRanks(
                given(library, "library"), *at, rank=rank, size=size, patience=patience
            )
            # The memory stays mapped.
            os.close(*at)
            return SharedComm(memory)
        case "sockets":
            return SocketComm(rank, size, [socket.socket(fileno=one) for one in at])
        case _:
            return NcclComm(rank, size, Path(invitation["store"]))
