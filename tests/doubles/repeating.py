"""Text to learn from that is soon learned: the same few windows, with a pattern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.train.loop import Batch


@dataclass(frozen=True, slots=True)
class Repeating:
    """`Batches` of 4 windows of 24 ids below 96."""

    facts: Mapping[str, object] = field(default_factory=dict[str, object])

    def batch(self, step: int, device: torch.device) -> Batch:
        ids_BT: Tensor = torch.arange(4 * 24).view(4, 24) * 7 % 96
        return Batch(ids_BT.to(device), (0, 1, 2, 3), step, 0)
