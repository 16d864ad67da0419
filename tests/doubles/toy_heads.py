"""Hidden states and blocks in float64 for tests that enumerate distributions or follow a memory.

Shapes:  P = tokens, N = packed tokens, M = packed logits rows, K = captured layers (1 here),
         D = width, V = vocabulary.

Nets that guess several places at once, in float64, for tests that enumerate distributions.

Shapes:  B = sequences, H = heads, K = places, D = width, V = vocabulary, P = tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from doubles.tiny_attention import WIDTH
from doubles.toy_hybrid import ToyHybrid
from outrider.core.draft import Budget, Draft
from outrider.core.params import SamplingParams
from outrider.core.protocols import (
    CacheStore,
    CausalLM,
    Drafter,
    DraftNeeds,
    DraftRow,
    HiddenStates,
    StepOutput,
    StepRow,
)
from outrider.core.rng import KeyedRng, Rng
from outrider.core.spec import ModelSpec
from outrider.plugins.heads.passes import NetOutput
from outrider_lab.models.block_net import BlockContext, Guess

LAYER = 1
_RATES_D = torch.tensor([1.0, 0.37, 1.9, 0.11], dtype=torch.float64)


def state_after(text: Sequence[int]) -> Tensor:
    """state_D: what a made-up target thinks after `text`; the last tokens count most."""
    state_D = torch.zeros(WIDTH, dtype=torch.float64)
    for place, token in enumerate(text):
        state_D = 0.6 * state_D + torch.sin((token + 1) * _RATES_D + 0.1 * place)
    return state_D


def states_of(text: Sequence[int], start: int, stop: int) -> Tensor:
    """hidden_PKD of tokens `start` to `stop` of `text`."""
    rows = [state_after(text[: place + 1]) for place in range(start, stop)]
    empty = torch.zeros(0, WIDTH, dtype=torch.float64)
    return (torch.stack(rows) if rows else empty)[:, None]


class HiddenOver:
    """HiddenStore over another store: it remembers the tokens and makes their states up, those of
    each of the `layers` in a size of its own."""

    def __init__(self, store: CacheStore, layers: Sequence[int] = (LAYER,)) -> None:
        self._store, self._layers = store, layers
        self._kept: dict[int, list[int]] = {}
        self._staged: dict[int, list[int]] = {}

    def hidden(self, seq_id: int, start: int, stop: int) -> Tensor:
        assert stop <= len(self._kept[seq_id])
        states_P1D = states_of(self._kept[seq_id], start, stop)
        return torch.cat([states_P1D * layer for layer in self._layers], dim=1)

    def note(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            self._staged[row.seq_id] += row.tokens

    def open(self, seq_id: int, tokens: Sequence[int], salt: str = "") -> int:
        shared = self._store.open(seq_id, tokens, salt)
        self._kept[seq_id], self._staged[seq_id] = list(tokens[:shared]), []
        return shared

    def fork(self, source: int, new: int, length: int | None = None) -> None:
        self._store.fork(source, new, length)
        self._kept[new], self._staged[new] = self._kept[source][:length], []

    def length(self, seq_id: int) -> int:
        return self._store.length(seq_id)

    def num_staged(self, seq_id: int) -> int:
        return self._store.num_staged(seq_id)

    def reserve(self, counts: Mapping[int, int]) -> None:
        self._store.reserve(counts)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> int:
        for seq_id, path in paths.items():
            self._kept[seq_id] += [self._staged[seq_id][node] for node in path]
            self._staged[seq_id] = []
        return self._store.commit(paths)

    def close(self, seq_id: int) -> None:
        self._store.close(seq_id)
        del self._kept[seq_id], self._staged[seq_id]

    @property
    def num_free_tokens(self) -> int:
        return self._store.num_free_tokens


class WithHidden:
    """A target that keeps made-up hidden states beside its memory."""

    def __init__(self, model: CausalLM, layers: tuple[int, ...] = (LAYER,)) -> None:
        self._model, self._layers = model, layers
        self.state = HiddenOver(model.state, layers)

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        assert needs.hidden_layers in ((), self._layers)
        out = self._model.step(rows, DraftNeeds())
        self.state.note(rows)
        return out


class ToyNet:
    """HeadNet whose block is a toy hybrid, told of the state of the token before."""

    hidden_layers = (LAYER,)

    def __init__(self, *, vocab_size: int, seed: int = 7, num_slots: int = 2048) -> None:
        rng = torch.Generator().manual_seed(seed)
        self._block = ToyHybrid(vocab_size=vocab_size, seed=seed, num_slots=num_slots)
        self._out_DV = torch.randn(WIDTH, vocab_size, generator=rng, dtype=torch.float64)
        self._back_VD = torch.randn(vocab_size, WIDTH, generator=rng, dtype=torch.float64)

    @property
    def state(self) -> CacheStore:
        return self._block.state

    def fuse(self, hidden_PKD: Tensor) -> Tensor:
        return torch.tanh(hidden_PKD[:, 0])

    def step(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        all_rows = [replace(row, logits_from=0) for row in rows]
        logits_NV = self._block.step(all_rows, DraftNeeds()).logits_MV
        assert hidden_ND.shape == (len(logits_NV), WIDTH)
        logits_NV = logits_NV + hidden_ND @ self._out_DV
        places: list[int] = []
        start = 0
        for row in rows:
            places += range(start + row.logits_from, start + len(row.tokens))
            start += len(row.tokens)
        return NetOutput(logits_NV[places], torch.tanh(logits_NV @ self._back_VD))


class ToyHeads:
    """Heads that multiply a state of one layer by matrices of their own."""

    def __init__(
        self, *, num_heads: int = 2, vocab_size: int, seed: int = 7, layer: int = LAYER
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.num_heads, self.hidden_layers = num_heads, (layer,)
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

    def guess(self, contexts: list[BlockContext], num_places: int) -> Guess:
        states = [
            context.hidden_CLD.sum((0, 1)) + 0.3 * context.next_ids[-1] for context in contexts
        ]
        logits_HBV = self._heads.logits(torch.stack(states), num_places)
        sure_K = torch.tensor([0.9, 0.5, 0.3, 0.2][:num_places])
        return Guess(logits_HBV.transpose(0, 1), sure_K.expand(len(contexts), -1))


def state_row(
    text: Sequence[int],
    budget: Budget,
    params: SamplingParams,
    seq_id: int = 0,
    rng: Rng | None = None,
) -> DraftRow:
    """A row whose states the target has made of all but the pending token."""
    hidden = HiddenStates(len(text) - 1, partial(states_of, tuple(text)))
    own = rng or KeyedRng(params.rng_seed, 0, len(text))
    return DraftRow(seq_id, list(text), None, budget, params, own, hidden=hidden)


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
