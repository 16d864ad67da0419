"""A target that reads texts and says how likely it finds each token: perplexity.

The perplexity of tokens x_1 ... x_n is exp of the mean of -ln p(x_i | what is before x_i), here
over those tokens that have something before them in their window. Windows are read by themselves.

Shapes:  N = tokens, M = tokens that are told, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.api.wrapper import Cache, ModelWrapper, load_wrapper

# Of the model's matrices, or of all its weights.
QUANTISED = ("int8", "int4")
FORMATS = ("float32", "bfloat16", "float16", *QUANTISED)
# exp of more is no float.
_MOST_NATS = 700.0


class Judge(Protocol):
    """Reads ids and gives logits of shape [1, N, V], as `ModelWrapper` does."""

    def forward(
        self, ids: Sequence[int], past_key_values: Cache | None = None, use_cache: bool = True
    ) -> tuple[Tensor, Cache | None]: ...


@dataclass(frozen=True, slots=True)
class Nats:
    """The sum of -ln p over `num_tokens` tokens. Sums add up; perplexities do not."""

    total: float = 0.0
    num_tokens: int = 0

    def __add__(self, other: Nats) -> Nats:
        return Nats(self.total + other.total, self.num_tokens + other.num_tokens)

    @property
    def perplexity(self) -> float | None:
        """None without a token, and where no number is large enough."""
        mean = self.total / self.num_tokens if self.num_tokens else math.inf
        return math.exp(mean) if mean < _MOST_NATS else None


def load_judge(target: str, form: str, device: str = "auto") -> ModelWrapper:
    """`target` in a format of FORMATS; int8 and int4 are of the checkpoint's own dtype. Raises
    ConfigError, CheckpointError or MachineError."""
    quantise = form if form in QUANTISED else "none"
    dtype = "auto" if form in QUANTISED else form
    return load_wrapper(target, dtype, device, quantise=quantise)[0]


def log_laws(judge: Judge, ids: Sequence[int]) -> Tensor:
    """Natural logarithms of the laws after each of `ids`, of shape [N, V] in float64."""
    logits_1NV, _ = judge.forward(ids, use_cache=False)
    return logits_1NV[0].to("cpu", torch.float64).log_softmax(-1)


def nats_of(log_NV: Tensor, ids: Sequence[int], start: int = 1) -> Nats:
    """Of `ids` from place `start` (at least 1) on, whose laws are `log_NV`."""
    places_M = torch.arange(start, len(ids))
    told_M = torch.tensor(ids)[start:]
    total = -float(log_NV[places_M - 1, told_M].sum())
    return Nats(total, len(ids) - start) if len(ids) > start else Nats()


def read(judge: Judge, ids: Sequence[int], start: int = 1) -> Nats:
    """Both in one step."""
    return nats_of(log_laws(judge, ids), ids, start) if len(ids) > start else Nats()


def windows_of(texts: Sequence[Sequence[int]], size: int, most: int) -> list[tuple[int, ...]]:
    """`texts` cut to windows of at most `size` tokens, until they have `most` tokens together; one
    of a single token says nothing and is left out."""
    found: list[tuple[int, ...]] = []
    left = most
    for ids in texts:
        for start in range(0, len(ids), size):
            window = tuple(ids[start : start + min(size, left)])
            if len(window) > 1:
                found.append(window)
                left -= len(window)
    return found
