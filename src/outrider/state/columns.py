"""The plan of a pass while it is made, token by token.

Shapes:  N = packed tokens, B = sequences, P = page-table columns, E = extra keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.plan import PackedPlan

PageTable = np.ndarray[tuple[int, int], np.dtype[np.int32]]


class Columns:
    """The growing columns of a plan, one entry a packed token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.seq: list[int] = []
        self.visible: list[int] = []
        self.extra: list[Sequence[int]] = []

    def add_chain(self, rows: range, num_dropped: int = 0) -> None:
        """Tokens that are these rows of their sequence, of which so many were dropped before."""
        self.positions += range(rows.start + num_dropped, rows.stop + num_dropped)
        self.visible += range(rows.start + 1, rows.stop + 1)
        self.extra += [()] * len(rows)

    def add_node(self, *, position: int, visible: int, extra: Sequence[int]) -> None:
        self.positions.append(position)
        self.visible.append(visible)
        self.extra.append(extra)

    def plan(self, pages_BP: PageTable, page_size: int, device: torch.device) -> PackedPlan:
        columns = [self.tokens, self.positions, self.slots, self.seq, self.visible]
        packed_5N = _tensor(np.array(columns, dtype=np.int32), device)
        tokens_N, positions_N, slots_N, seq_N, visible_N = packed_5N.unbind(0)
        offsets_N1, extra_E = None, None
        if any(self.extra):
            ends = np.cumsum([0, *map(len, self.extra)], dtype=np.int32)
            flat = [slot for slots in self.extra for slot in slots]
            offsets_N1 = _tensor(ends, device)
            extra_E = _tensor(np.array(flat, dtype=np.int32), device)
        return PackedPlan(
            page_size=page_size,
            tokens_N=tokens_N,
            positions_N=positions_N,
            slots_N=slots_N,
            seq_N=seq_N,
            visible_N=visible_N,
            pages_BP=_tensor(pages_BP, device),
            extra_offsets_N1=offsets_N1,
            extra_slots_E=extra_E,
        )


def _tensor(array: np.ndarray[Any, np.dtype[np.int32]], device: torch.device) -> Tensor:
    tensor: Tensor = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
    return tensor.to(device)
