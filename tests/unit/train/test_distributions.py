"""A teacher is asked once for a window, and not again by a later process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.core.clock import host_ints
from outrider_lab.train.losses import DistributionCache, TopProbs, top_distributions

WINDOW, KEPT, NUM_WINDOWS = 4, 3, 10


class Teacher:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, ids_BT: Tensor) -> TopProbs:
        self.asked += host_ints(ids_BT[:, 0])
        generator = torch.Generator().manual_seed(int(ids_BT.sum()))
        return top_distributions(torch.randn(ids_BT.numel(), 9, generator=generator), KEPT)


def windows(*numbers: int) -> Tensor:
    return torch.tensor([[number] * WINDOW for number in numbers])


def cache(folder: Path) -> DistributionCache:
    return DistributionCache(folder, "name", num_windows=NUM_WINDOWS, window=WINDOW, num_kept=KEPT)


def test_only_new_windows_are_taught_and_each_keeps_its_own_distributions(tmp_path: Path) -> None:
    teacher, kept = Teacher(), cache(tmp_path)
    first = kept.distributions(windows(3, 7), (3, 7), teacher)
    assert teacher.asked == [3, 7]
    mixed = kept.distributions(windows(7, 1, 3), (7, 1, 3), teacher)
    assert teacher.asked == [3, 7, 1]
    assert torch.equal(mixed.ids_PC[:WINDOW], first.ids_PC[WINDOW:])
    assert torch.equal(mixed.ids_PC[2 * WINDOW :], first.ids_PC[:WINDOW])
    assert torch.equal(mixed.logprobs_PC[2 * WINDOW :], first.logprobs_PC[:WINDOW])

    again = cache(tmp_path).distributions(windows(1, 7), (1, 7), teacher)
    assert teacher.asked == [3, 7, 1]
    assert torch.equal(again.ids_PC[WINDOW:], first.ids_PC[WINDOW:])


def test_what_is_kept_is_what_was_taught_up_to_half_precision(tmp_path: Path) -> None:
    taught = Teacher()(windows(2))
    found = cache(tmp_path).distributions(windows(2), (2,), Teacher())
    assert torch.equal(found.ids_PC, taught.ids_PC)
    torch.testing.assert_close(found.logprobs_PC, taught.logprobs_PC, atol=0.01, rtol=0.001)
