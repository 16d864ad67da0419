"""Nets that guess several places at once, in float64, for tests that enumerate laws.

Shapes:  B = sequences, H = heads, K = places, D = width, V = vocabulary, P = tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from doubles.tiny_attention import WIDTH
from doubles.toy_heads import LAYER, states_of
from outrider.core.budget import Budget
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter, DraftNeeds, DraftRow, HiddenStates
from outrider.core.rng import KeyedRng
from outrider.drafters.block import Context, Guess


class ToyHeads:
    """Heads that multiply a state by matrices of their own."""

    hidden_layers = (LAYER,)

    def __init__(self, *, num_heads: int = 2, vocab_size: int, seed: int = 7) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.num_heads = num_heads
        shape = (num_heads, WIDTH, vocab_size)
        self._heads_HDV = torch.randn(shape, generator=rng, dtype=torch.float64)

    def logits(self, hidden_BD: Tensor, num_heads: int) -> Tensor:
        return hidden_BD @ self._heads_HDV[:num_heads]


class ToyBlock:
    """Places that also know the pending token, surer of nearer ones."""

    hidden_layers = (LAYER,)
    num_context = 2

    def __init__(self, *, num_places: int = 2, vocab_size: int, seed: int = 7) -> None:
        self._heads = ToyHeads(num_heads=num_places, vocab_size=vocab_size, seed=seed)
        self.num_places = num_places

    def guess(self, contexts: list[Context], num_places: int) -> Guess:
        states = [
            context.hidden_CLD.sum((0, 1)) + 0.3 * context.next_ids[-1] for context in contexts
        ]
        logits_HBV = self._heads.logits(torch.stack(states), num_places)
        sure_K = torch.tensor([0.9, 0.5, 0.3, 0.2][:num_places])
        return Guess(logits_HBV.transpose(0, 1), sure_K.expand(len(contexts), -1))


def state_row(
    text: Sequence[int], budget: Budget, params: SamplingParams, seq_id: int = 0
) -> DraftRow:
    """A row whose states the target has made of all but the pending token."""
    hidden = HiddenStates(len(text) - 1, partial(states_of, tuple(text)))
    noise = KeyedRng(params.seed, 0, len(text))
    return DraftRow(seq_id, list(text), None, budget, params, noise, hidden=hidden)


@dataclass(frozen=True, slots=True)
class GivenStates:
    """Gives `inner` states that no target made, so that it can be asked as any drafter is. With
    `num_nodes` it is asked for trees."""

    inner: Drafter
    num_nodes: int = 0

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds()

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.inner.open(seq_id, prompt)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        given: list[DraftRow] = []
        for row in rows:
            hidden = HiddenStates(len(row.tokens) - 1, partial(states_of, tuple(row.tokens)))
            budget = replace(row.budget, num_nodes=self.num_nodes)
            given.append(replace(row, hidden=hidden, budget=budget))
        return self.inner.propose(given)

    def close(self, seq_id: int) -> None:
        self.inner.close(seq_id)
