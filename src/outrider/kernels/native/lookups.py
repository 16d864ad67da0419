"""Look-ups in texts, one native call a round (csrc/suffix.cpp, csrc/ngram.cpp).

A call reads the new tokens of a text and drafts its continuation. drafters/suffix.py and
drafters/ngram.py have the definitions, and all constants; probabilities have the same bits.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass

from outrider.core.draft import Budget
from outrider.core.errors import ContractError
from outrider.kernels.native.ops import function, struct_fields


class SuffixSettings(Structure):
    """The struct of the same name in csrc/suffix.cpp."""

    _fields_ = struct_fields(
        (c_double * 20, "first_hits"),
        (c_double, "first_trials fade shared_fade likeness evenness highest"),
        (c_double, "least_kept least_in_tree"),
        (c_int64, "most_states"),
        (c_int32, "most_children unused"),
    )


class NgramSettings(Structure):
    """The struct of the same name in csrc/ngram.cpp."""

    _fields_ = struct_fields(
        (c_double * 6, "first"),
        (c_double, "weight evenness fade highest least_begun least_gone_on"),
        (c_int32 * 16, "kinds"),
        (c_int32, "max_n min_n"),
    )


class LookupRoom(Structure):
    """The struct of the same name in csrc/lookups.h: buffers of a call."""

    _fields_ = struct_fields((c_void_p, "unread tokens parents kept"))


class NativeTexts:
    """Texts of requests. One thread at a time may call `offer`, whose buffers are reused; other
    threads may open and close texts at the same time."""

    branches = False

    def __init__(self, library: ctypes.CDLL, make: str, settings: Structure) -> None:
        self._address: int = function(library, make)(ctypes.addressof(settings))
        weakref.finalize(self, function(library, "lookup_free"), self._address)
        self._open, self._offer, self._close = (
            function(library, f"lookup_{name}") for name in ("open", "offer", "close")
        )
        # The sequences that native code has, also at the moment of an interrupt.
        self._num_read: dict[int, int] = {}
        self._most_unread = self._most_nodes = 0
        self._widen(64, 64)

    def open(self, seq_id: int, prompt_length: int) -> None:
        self._open(self._address, seq_id, prompt_length)
        self._num_read[seq_id] = 0

    def offer(
        self, seq_id: int, tokens: Sequence[int], budget: Budget
    ) -> tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...] | None] | None:
        """Draft the continuation of a text, as `Texts` in common/context.py defines it."""
        start, depth, size = self._num_read[seq_id], budget.depth, budget.size
        unread = tokens[start:]
        count = len(unread)
        if count > self._most_unread or size > self._most_nodes:
            self._widen(count, size)
        self._unread[:count] = unread
        self._num_read[seq_id] = start + count
        found = self._offer(self._address, seq_id, count, depth, size, self._buffers_address)
        if not found:
            return None
        parents = tuple(self._parents[:found]) if self.branches and size > depth else None
        return tuple(self._tokens[:found]), tuple(self._kept[:found]), parents

    def close(self, seq_id: int) -> None:
        del self._num_read[seq_id]
        self._close(self._address, seq_id)

    def _widen(self, num_unread: int, num_nodes: int) -> None:
        most_unread = max(num_unread, self._most_unread)
        most_nodes = max(num_nodes, self._most_nodes)
        unread, kept = (c_int32 * most_unread)(), (c_double * most_nodes)()
        tokens, parents = (c_int32 * most_nodes)(), (c_int32 * most_nodes)()
        buffers = LookupRoom(*map(ctypes.addressof, (unread, tokens, parents, kept)))
        address = ctypes.addressof(buffers)
        # One statement, which no interrupt divides: it frees the old buffers.
        (
            self._buffers, self._buffers_address, self._most_unread, self._most_nodes,
            self._unread, self._tokens, self._parents, self._kept,
        ) = buffers, address, most_unread, most_nodes, unread, tokens, parents, kept  # fmt: skip


class NativeSuffix(NativeTexts):
    """Texts that are remembered after their requests, and a corpus."""

    branches = True

    def __init__(self, library: ctypes.CDLL, settings: SuffixSettings) -> None:
        super().__init__(library, "suffix", settings)
        self._learn, self._forget, self._states = (
            function(library, f"suffix_{name}") for name in ("learn", "forget", "states")
        )

    @property
    def num_states(self) -> int:
        return self._states(self._address)

    def learn(self, text: Sequence[int]) -> None:
        tokens = (c_int32 * len(text))()
        tokens[:] = text
        self._learn(self._address, ctypes.addressof(tokens), len(text))

    def forget(self) -> None:
        if self._num_read:
            raise ContractError("requests are open")
        self._forget(self._address)


@dataclass(frozen=True, slots=True)
class NativeLookups:
    """Makes objects that look texts up with `library`."""

    library: ctypes.CDLL

    def suffix(self, settings: SuffixSettings) -> NativeSuffix:
        return NativeSuffix(self.library, settings)

    def ngram(self, settings: NgramSettings) -> NativeTexts:
        return NativeTexts(self.library, "ngram", settings)
