"""The verdicts of a native round by themselves, on logits that are there already.

Shapes:  M = logits rows, V = vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from outrider.kernels.native.ops import function
from outrider.kernels.native.rounds import (
    Drafts,
    MemoryStruct,
    RoundRow,
    RoundStruct,
    RoundVerdict,
)


class NativeJudge:
    """Verdicts alone, as a round finds them: on drafts whose logits are there already."""

    def __init__(self, library: ctypes.CDLL, team: int) -> None:
        self._team, self._run = team, function(library, "judge")

    def __call__(self, rows: Sequence[RoundRow], logits_MV: Tensor) -> list[RoundVerdict] | None:
        """Writes over the logits. None if a distribution is none."""
        num_logits, vocab_size = logits_MV.shape
        most = max(row.num_drafted for row in rows)
        drafts = Drafts(len(rows), most)
        memory = MemoryStruct(
            logits=logits_MV.data_ptr(), num_wanted=num_logits, num_logits=vocab_size
        )
        leftover_V = torch.empty(vocab_size)
        best = (c_int64 * num_logits)()
        described = RoundStruct(
            self._team,
            ctypes.addressof(memory),
            num_rows=len(rows),
            most_drafted=most,
            vocab_size=vocab_size,
            leftover=leftover_V.data_ptr(),
            best=ctypes.addressof(best),
        )
        drafts.described_in(described)
        for index, row in enumerate(rows):
            drafts.describe(index, row, index * most)
        if not self._run(ctypes.addressof(described)):
            return None
        return [drafts.verdict(index, index * most) for index in range(len(rows))]
