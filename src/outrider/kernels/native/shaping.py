"""Bias, penalties, masks and bans of logits, described to native code (csrc/shaping.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_void_p
from dataclasses import dataclass

from outrider.core.errors import blaming
from outrider.core.logits import LogitsProcessor, NodeLimits, SparseShaping
from outrider.core.protocols import DraftRow
from outrider.kernels.native.ops import struct_fields


class ShapingStruct(Structure):
    _fields_ = struct_fields(
        (c_void_p, "bias_ids seen_ids biases counts allowed ends banned ban_starts find_limits"),
        (c_int32, "num_biases num_seen num_ends index"),
        (c_float, "repetition frequency presence unused"),
    )

    def describe(self, shaping: SparseShaping, limits: NodeLimits | None) -> None:
        """Point to the lists of `shaping`, which may move when the text grows, and to `limits`."""
        self.bias_ids, self.num_biases = shaping.bias_ids.buffer_info()
        self.seen_ids, self.num_seen = shaping.seen_ids.buffer_info()
        self.biases, _ = shaping.biases.buffer_info()
        self.counts, _ = shaping.counts.buffer_info()
        self.repetition = shaping.repetition
        self.frequency, self.presence = shaping.frequency, shaping.presence
        self.limit_to(limits)

    def limit_to(self, limits: NodeLimits | None) -> None:
        self.allowed = self.banned = None
        if limits is not None:
            masks_NV = limits.allowed_NV
            self.allowed = None if masks_NV is None else masks_NV.data_ptr()
            self.ends, self.num_ends = limits.ends.buffer_info()
            self.ban_starts, _ = limits.starts.buffer_info()
            self.banned, _ = limits.banned.buffer_info() if limits.banned else (None, 0)

    def of(self, shaping: SparseShaping, limits: NodeLimits | None) -> int:
        """Return the address of this structure, which describes these."""
        self.describe(shaping, limits)
        return ctypes.addressof(self)


@dataclass(slots=True)
class DraftShaping:
    """The logits processor of the sequence `seq_id`, whose draft grows below `tokens`."""

    seq_id: int
    shaper: LogitsProcessor
    tokens: Sequence[int]

    @classmethod
    def of(cls, row: DraftRow) -> DraftShaping | None:
        return None if row.shaper is None else cls(row.seq_id, row.shaper, row.tokens)


_FIND_LIMITS = ctypes.CFUNCTYPE(c_int32, c_int32, c_void_p, c_int32, c_int32)


class Shapings:
    """The structures of drafts that grow in a call, over `vocab_size` ids. Native code requests
    masks and bans of nodes when it has chosen the tokens before them."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._structs: dict[int, ShapingStruct] = {}
        self._rows: dict[int, DraftShaping] = {}
        self._found: NodeLimits | None = None  # Native code has pointers to it.
        self._error: BaseException | None = None
        self._find_limits = _FIND_LIMITS(self._limit)

    def of(self, index: int, row: DraftShaping | None) -> int | None:
        """Return the address of structure `index`, which describes `row`; None without one."""
        if row is None:
            return None
        struct = self._structs.setdefault(index, ShapingStruct(index=index))
        self._rows[index], self._error = row, None
        with blaming(row.seq_id):
            struct.describe(row.shaper.lists(row.tokens), None)
            limited = row.shaper.sparse(row.tokens) is None
        struct.find_limits = ctypes.cast(self._find_limits, c_void_p) if limited else None
        return ctypes.addressof(struct)

    def check(self) -> None:
        """Raise the error of a mask that failed in the last call, if one did."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _limit(self, index: int, paths: int, count: int, depth: int) -> int:
        try:
            row, drafted = self._rows[index], list[int]()
            if depth:
                drafted = (c_int32 * (count * depth)).from_address(paths)[:]
            suffixes = [drafted[i * depth : (i + 1) * depth] for i in range(count)]
            with blaming(row.seq_id):
                self._found = row.shaper.limits(row.tokens, suffixes, self._vocab_size)
            self._structs[index].limit_to(self._found)
        except BaseException as error:  # noqa: BLE001 - native code has no exceptions: `check` raises
            self._error = error
            return 0
        return 1
