"""Text to learn from that is soon learned: the same few windows, with a pattern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider_lab.train.loop import Batch


@dataclass(frozen=True, slots=True)
class Repeating:
    """`Batches` of 4 windows of 24 ids below `vocab_size`."""

    facts: Mapping[str, object] = field(default_factory=dict[str, object])
    vocab_size: int = 96

    @property
    def windows(self) -> Tensor:
        """ids_BT of all of them."""
        return torch.arange(4 * 24).view(4, 24) * 7 % self.vocab_size

    def batch(self, step: int, device: torch.device) -> Batch:
        return Batch(self.windows.to(device), (0, 1, 2, 3), step)
