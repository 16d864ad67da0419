"""The law of a token, written slowly in Python floats: what every exact rule has to emit.

It shares no code with what it checks (`core/logits.py`, `core/sampling.py`): bias, penalties and
bans first, then temperature, top-k, top-p and min-p, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.core.params import SamplingParams


def plain_law(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    text: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> list[float]:
    """Probabilities of what follows `prompt` and `text`; greedy is the first of the largest."""
    shaped = [_penalised(i, value, params, prompt, text) for i, value in enumerate(logits)]
    banned = {word[-1] for word in bad_words if _follows(text, word[:-1])}
    if any(value > -math.inf for i, value in enumerate(shaped) if i not in banned):
        shaped = [-math.inf if i in banned else value for i, value in enumerate(shaped)]
    if params.greedy:
        best = shaped.index(max(shaped))
        return [float(i == best) for i in range(len(shaped))]
    return filtered(shaped, params)


def _penalised(
    token: int, logit: float, params: SamplingParams, prompt: Sequence[int], text: Sequence[int]
) -> float:
    logit += (params.logit_bias or {}).get(token, 0.0)
    if token in prompt or token in text:
        factor = params.repetition_penalty
        logit = logit / factor if logit > 0 else logit * factor
    times = list(text).count(token)
    return logit - params.frequency_penalty * times - params.presence_penalty * (times > 0)


def _follows(text: Sequence[int], head: Sequence[int]) -> bool:
    start = len(text) - len(head)
    return start >= 0 and tuple(text[start:]) == tuple(head)


def filtered(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p and min-p, in this order."""
    scaled = [value / params.temperature for value in logits]
    if params.top_k:
        edge = sorted(scaled, reverse=True)[: params.top_k][-1]
        scaled = [value if value >= edge else -math.inf for value in scaled]
    highest = max(scaled)
    probs = _shares([math.exp(value - highest) for value in scaled])
    if params.top_p < 1:
        kept = _nucleus(probs, params.top_p)
        probs = _shares([prob if token in kept else 0.0 for token, prob in enumerate(probs)])
    if params.min_p:
        floor = params.min_p * max(probs)
        probs = _shares([prob if prob >= floor else 0.0 for prob in probs])
    return probs


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
