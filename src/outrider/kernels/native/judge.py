"""The verdicts of a native round by themselves, on logits that are there already.

Shapes:  B = rows, K = depth of the deepest draft, M = logits rows, V = vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64

import torch
from torch import Tensor

from outrider.kernels.native.ops import function
from outrider.kernels.native.rounds import (
    MemoryStruct,
    RoundRow,
    RoundStruct,
    RoundVerdict,
    Row,
    tell,
)


class NativeJudge:
    """Verdicts alone, as a round finds them: on chains whose logits are there already."""

    def __init__(self, library: ctypes.CDLL, team: int) -> None:
        self._team, self._run = team, function(library, "judge")

    def __call__(
        self, rows: Sequence[RoundRow], logits_MV: Tensor, probs_BKV: Tensor | None
    ) -> list[RoundVerdict] | None:
        """Writes over the logits. `probs_BKV` are what the chains were drawn from, None if they
        were chosen. None if a distribution is none."""
        num_logits, vocab_size = logits_MV.shape
        most, told = max(len(row.drafted) for row in rows), (Row * len(rows))()
        drafts = (c_int32 * (len(rows) * most))()
        memory = MemoryStruct(
            logits=logits_MV.data_ptr(), num_wanted=num_logits, num_logits=vocab_size
        )
        leftover_V = torch.empty(vocab_size)
        best = (c_int64 * num_logits)()
        address = ctypes.addressof(memory)
        described = RoundStruct(
            self._team,
            address,
            None if probs_BKV is None else address,
            ctypes.addressof(told),
            len(rows),
            most,
            vocab_size,
            drafts=ctypes.addressof(drafts),
            distributions=None if probs_BKV is None else probs_BKV.data_ptr(),
            leftover=leftover_V.data_ptr(),
            best=ctypes.addressof(best),
        )
        for index, row in enumerate(rows):
            tell(told[index], row, len(row.drafted))
            told[index].wants_laws = row.wants_laws
            drafts[index * most : index * most + len(row.drafted)] = row.drafted
        if not self._run(ctypes.addressof(described)):
            return None
        return [
            RoundVerdict(tuple(row.drafted), one.num_accepted, one.next)
            for row, one in zip(rows, told, strict=True)
        ]
