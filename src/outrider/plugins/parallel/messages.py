"""Messages from rank 0 to the other ranks, each a list of integers: the calls of their shares.

The first number is the kind of call. Lists are preceded by their length, so a message can be read
by itself. The other ranks have no pages and no sequences: rank 0 plans every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core.clock import host_ints
from outrider.kernels.plan import PackedPlan


class RankCall(IntEnum):
    PASS = 0
    COPY = 1


class Share(Protocol):
    """A rank's part of a model, as rank 0 controls it."""

    def follow(self, plan: PackedPlan, wanted_M: Tensor) -> None:
        """Run this rank's part of a pass, whose logits rank 0 gathers."""
        ...

    def copy_slots(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the arena's contents of the slots `source` to the slots `target`."""
        ...


# The fields of a plan that are lists of numbers, the page table flattened.
_COLUMNS = tuple(item.name for item in fields(PackedPlan) if item.name != "page_size")


def pass_message(plan: PackedPlan, wanted_M: Tensor) -> list[int]:
    """The message for a pass of `plan` that computes logits of the packed tokens `wanted_M`. Lists
    of extra keys that the plan lacks are empty."""
    message = [RankCall.PASS, plan.page_size, plan.pages_BP.shape[0], *_listed(wanted_M)]
    for name in _COLUMNS:
        message += _listed(getattr(plan, name))
    return message


def copy_message(source: Sequence[int], target: Sequence[int]) -> list[int]:
    return [RankCall.COPY, len(source), *source, len(target), *target]


def apply(message: Sequence[int], share: Share, device: torch.device) -> None:
    """Run the call of `message` on `share`, with tensors on `device`."""
    reader = _Reader(message)
    match RankCall(reader.one()):
        case RankCall.PASS:
            page_size, num_rows = reader.one(), reader.one()

            def column() -> Tensor:
                return torch.tensor(reader.listed(), dtype=torch.int32, device=device)

            wanted_M = column()
            columns: dict[str, Any] = {name: column() for name in _COLUMNS}
            columns["pages_BP"] = columns["pages_BP"].view(num_rows, -1)
            if not columns["extra_offsets_N1"].numel():
                columns |= {"extra_offsets_N1": None, "extra_slots_E": None}
            share.follow(PackedPlan(page_size=page_size, **columns), wanted_M)
        case RankCall.COPY:
            share.copy_slots(reader.listed(), reader.listed())


def _listed(numbers: Tensor | None) -> list[int]:
    if numbers is None:
        return [0]
    return [numbers.numel(), *host_ints(numbers.flatten())]


class _Reader:
    """Reads a message from front to back."""

    def __init__(self, message: Sequence[int]) -> None:
        self._message = message
        self._at = 0

    def one(self) -> int:
        self._at += 1
        return self._message[self._at - 1]

    def listed(self) -> list[int]:
        count = self.one()
        self._at += count
        return list(self._message[self._at - count : self._at])
