"""Shaped logits, written slowly: one node, plain Python floats, nothing remembered."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from outrider.core.logits import AllowedTokens
from outrider.core.params import SamplingParams


def shaped(
    logits: Sequence[float],
    prompt: Sequence[int],
    text: Sequence[int],
    params: SamplingParams,
    *,
    stop_ids: frozenset[int] = frozenset(),
    bad_words: Sequence[Sequence[int]] = (),
    allowed: AllowedTokens | None = None,
) -> list[float]:
    """The logits of the token that follows `prompt` and `text`."""
    values = [
        value + (params.logit_bias or {}).get(token, 0.0) for token, value in enumerate(logits)
    ]
    for token in range(len(values)):
        if token in prompt or token in text:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= params.frequency_penalty * list(text).count(token)
        values[token] -= params.presence_penalty * (token in text)
    mask_V = allowed(text) if allowed is not None else None
    if mask_V is not None:
        may = {token for token in range(len(values)) if bool(mask_V[token])}
        may = may or set(stop_ids) or set(range(len(values)))
        values = [v if token in may else -math.inf for token, v in enumerate(values)]
    banned = {word[-1] for word in bad_words if _ends_with(text, word[:-1])}
    if len(text) < params.min_tokens:
        banned |= stop_ids
    rest = [-math.inf if token in banned else v for token, v in enumerate(values)]
    return rest if max(rest) > -math.inf else values


def _ends_with(text: Sequence[int], head: Sequence[int]) -> bool:
    start = len(text) - len(head)
    return start >= 0 and all(text[start + i] == token for i, token in enumerate(head))


@st.composite
def shaping_params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    """Any mixture of the features that shape logits."""
    bias = st.dictionaries(st.integers(0, vocab_size - 1), st.floats(-5, 5), max_size=3)
    return SamplingParams(
        repetition_penalty=draw(st.sampled_from([1.0, 1.5, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.2, -0.4])),
        logit_bias=draw(st.none() | bias),
        min_tokens=draw(st.integers(0, 6)),
    )
