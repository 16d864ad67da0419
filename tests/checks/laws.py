"""Processed laws against the slow ones of `proof/laws.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.core.sampling import processed_probs
from outrider.proof.laws import filtered


def floats(values_V: Tensor) -> list[float]:
    return [float(value) for value in values_V]


def near_an_edge(logits: Sequence[float], params: SamplingParams) -> bool:
    """Rounding alone may decide whether a token passes top-p or min-p."""
    closest = math.inf
    probs = filtered(logits, SamplingParams(temperature=params.temperature, top_k=params.top_k))
    mass = 0.0
    for prob in sorted(probs, reverse=True):
        closest = min(closest, abs(mass - params.top_p))
        mass += prob
    if params.top_p < 1:
        closest = min(closest, abs(mass - params.top_p))
    highest = max(probs)
    for prob in probs:
        # Tokens as likely as the likeliest pass at min_p = 1 without any rounding.
        if prob != highest:
            closest = min(closest, abs(prob / highest - params.min_p))
    return closest < 1e-9


def check_filters(logits: Sequence[float], params: SamplingParams) -> None:
    got = processed_probs(torch.tensor([logits], dtype=torch.float64), params)[0]
    wanted = filtered(logits, params)
    assert len(got) == len(wanted)
    assert all(abs(g - w) <= 1e-12 for g, w in zip(floats(got), wanted, strict=True)), (got, wanted)


def check_filter_cases() -> None:
    """Ties at a top-k edge all pass; exact top-p edges close; filters see what is left."""
    flat = [0.0] * 4
    cases: list[tuple[list[float], SamplingParams, list[float]]] = [
        (flat, SamplingParams(temperature=2.0), [0.25] * 4),
        (flat, SamplingParams(temperature=1.0, top_k=2), [0.25] * 4),
        ([1.0, 0.0, 0.0, -9.0], SamplingParams(temperature=1.0, top_k=2, top_p=0.0), [1, 0, 0, 0]),
        (flat, SamplingParams(temperature=1.0, top_p=0.5), [0.5, 0.5, 0, 0]),
        (flat, SamplingParams(temperature=1.0, top_p=0.51), [1 / 3, 1 / 3, 1 / 3, 0]),
        (flat, SamplingParams(temperature=1.0, top_p=0.0), [1, 0, 0, 0]),
        (flat, SamplingParams(temperature=1.0, min_p=1.0), [0.25] * 4),
        ([2.0, 3.0], SamplingParams(temperature=0.1, min_p=1.0), [0, 1]),
    ]
    for logits, params, wanted in cases:
        got = processed_probs(torch.tensor([logits], dtype=torch.float64), params)[0]
        assert torch.allclose(got, torch.tensor(wanted, dtype=torch.float64), atol=1e-15)
        check_filters(logits, params)
    # Half of the mass is left after top-k, so top-p at 0.5 counts shares of what is left.
    check_filters([0.0, 0.0, -0.3, -0.3], SamplingParams(temperature=1.0, top_k=2, top_p=0.4))
    check_filters([1.0, 0.7, 0.1, -2.0], SamplingParams(temperature=0.6, top_p=0.6, min_p=0.4))
