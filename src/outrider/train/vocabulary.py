"""The ids that a text is mostly made of: what heads draft, and what laws are compared over."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.models.families import LlamaConfig


def frequent_ids(tokens: NDArray[np.integer[Any]], target: LlamaConfig, num_ids: int) -> Tensor:
    """The `num_ids` ids that `tokens` has most often, stop ids among them, in rising order."""
    return _rising(_counts(tokens, target), num_ids)


def covering_ids(tokens: NDArray[np.integer[Any]], target: LlamaConfig, share: float) -> Tensor:
    """The fewest ids that make up `share` of `tokens`, stop ids among them, in rising order."""
    counts = _counts(tokens, target)
    covered = np.cumsum(np.sort(counts)[::-1]) / counts.sum()
    return _rising(counts, int(np.searchsorted(covered, share)) + 1)


def digest_of_ids(ids_W: Tensor) -> int:
    """A number that tells one list of ids from another."""
    return int((ids_W.cpu() * torch.arange(1, len(ids_W) + 1)).sum())


def _counts(tokens: NDArray[np.integer[Any]], target: LlamaConfig) -> NDArray[np.int64]:
    counts = np.bincount(tokens, minlength=target.vocab_size)
    counts[list(target.stop_ids)] = counts.max() + 1
    return counts


def _rising(counts: NDArray[np.int64], num_ids: int) -> Tensor:
    likeliest = np.argsort(-counts, kind="stable")[:num_ids]
    return torch.tensor(np.sort(likeliest).astype(np.int64))
