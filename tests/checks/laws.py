"""Processed laws, written slowly: plain Python floats, one filter after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.laws import processed_probs
from outrider.core.params import SamplingParams


def floats(values_V: Tensor) -> list[float]:
    return [float(value) for value in values_V]


def processed(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The law of temperature, top-k, top-p and min-p, in this order."""
    scaled = [value / params.temperature for value in logits]
    if params.top_k:
        edge = sorted(scaled, reverse=True)[: params.top_k][-1]
        scaled = [value if value >= edge else -math.inf for value in scaled]
    probs = _softmax(scaled)
    if params.top_p < 1:
        kept = _nucleus(probs, params.top_p)
        probs = _shares([prob if token in kept else 0.0 for token, prob in enumerate(probs)])
    if params.min_p:
        floor = params.min_p * max(probs)
        probs = _shares([prob if prob >= floor else 0.0 for prob in probs])
    return probs


def _softmax(scaled: Sequence[float]) -> list[float]:
    highest = max(scaled)
    return _shares([math.exp(value - highest) for value in scaled])


def _nucleus(probs: Sequence[float], top_p: float) -> set[int]:
    """Likeliest first, the lower id first among equals, until their mass reaches `top_p`."""
    kept: list[int] = []
    for token in sorted(range(len(probs)), key=lambda token: (-probs[token], token)):
        if kept and math.fsum(probs[k] for k in kept) >= top_p:
            break
        kept.append(token)
    return set(kept)


def _shares(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def near_an_edge(logits: Sequence[float], params: SamplingParams) -> bool:
    """Rounding alone may decide whether a token passes top-p or min-p."""
    closest = math.inf
    probs = processed(logits, SamplingParams(temperature=params.temperature, top_k=params.top_k))
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
    wanted = processed(logits, params)
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
