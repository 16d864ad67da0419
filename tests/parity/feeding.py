"""Ways to feed one text to a model, which must all give the same logits.

Shapes:  N = tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from outrider.core.protocols import CausalLM, DraftNeeds, StepRow

SEQUENCE = 7


def feed(model: CausalLM, tokens: Sequence[int], sizes: Iterable[int]) -> Tensor:
    """logits_NV of `tokens`, fed in chunks of these sizes that are each committed."""
    model.state.open(SEQUENCE, ())
    parts: list[Tensor] = []
    start = 0
    for size in sizes:
        chunk = tokens[start : start + size]
        parts.append(model.step([StepRow.chain(SEQUENCE, chunk)], DraftNeeds()).logits_MV.clone())
        model.state.commit({SEQUENCE: range(len(chunk))})
        start += size
    assert start == len(tokens)
    model.state.close(SEQUENCE)
    return torch.cat(parts)


def greedy(model: CausalLM, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy continuation, one token a step after the prompt."""
    model.state.open(SEQUENCE, ())
    text, chunk = list(prompt), list(prompt)
    while len(text) < len(prompt) + num_tokens:
        row = StepRow.chain(SEQUENCE, chunk, logits_from=len(chunk) - 1)
        logits_MV = model.step([row], DraftNeeds()).logits_MV
        model.state.commit({SEQUENCE: range(len(chunk))})
        chunk = [int(logits_MV[-1].argmax())]
        text += chunk
    model.state.close(SEQUENCE)
    return text[len(prompt) :]
