"""A scripted target and a scripted block that check every length and every state they are given.

A hidden state is (position, whose): the target's are told from the block's own. The target wants
the token at each position of a known text; the block guesses that token too, but where it errs.

Shapes:  M = packed logits rows, N = packed tokens, P = tokens, K = captured layers (1), V =
         vocabulary, D = 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from doubles.tiny_attention import toy_spec
from outrider.core.protocols import CacheStore, DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.core.tree import ROOT
from outrider.plugins.heads.passes import NetOutput
from outrider_lab.models.scripted import TokenMemory

VOCAB = 50
LAYER = 2
Whose = Literal["zero", "target", "block"]
_NAMES: tuple[Whose, ...] = ("zero", "target", "block")
_MARKS = {name: float(mark) for mark, name in enumerate(_NAMES)}


class HiddenMemory:
    """TokenMemory with a state of each token that is kept."""

    def __init__(self) -> None:
        self.tokens = TokenMemory(1 << 12)

    def hidden(self, seq_id: int, start: int, stop: int) -> Tensor:
        assert 0 <= start <= stop <= self.length(seq_id), "a state of what the target has not kept"
        places = [[[float(p), _MARKS["target"]]] for p in range(start, stop)]
        return torch.tensor(places).reshape(-1, 1, 2)

    def open(self, seq_id: int, tokens: Sequence[int], salt: str = "") -> int:
        return self.tokens.open(seq_id, tokens, salt)

    def fork(self, source: int, new: int, length: int | None = None) -> None:
        self.tokens.fork(source, new, length)

    def length(self, seq_id: int) -> int:
        return self.tokens.length(seq_id)

    def num_staged(self, seq_id: int) -> int:
        return self.tokens.num_staged(seq_id)

    def reserve(self, counts: Mapping[int, int]) -> None:
        self.tokens.reserve(counts)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> int:
        return self.tokens.commit(paths)

    def close(self, seq_id: int) -> None:
        self.tokens.close(seq_id)

    @property
    def num_free_tokens(self) -> int:
        return self.tokens.num_free_tokens


@dataclass(frozen=True, slots=True)
class Reading:
    """A token that the block read: at `position`, with the state of the token before it."""

    position: int
    token: int
    whose: Whose


class ScriptedBlock:
    """HeadNet that guesses `text`, one off at the positions that `errs` names. `passes` has what
    each of its passes read."""

    hidden_layers = (LAYER,)

    def __init__(
        self, text: Sequence[int], errs: Callable[[int], bool] = lambda position: False
    ) -> None:
        self.state: CacheStore = TokenMemory(1 << 12)
        self.passes: list[tuple[Reading, ...]] = []
        self._text, self._errs = tuple(text), errs

    def fuse(self, hidden_PKD: Tensor) -> Tensor:
        assert hidden_PKD.shape[1:] == (1, 2)
        return hidden_PKD[:, 0]

    def step(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        assert isinstance(self.state, TokenMemory)
        readings: list[Reading] = []
        guesses: list[Tensor] = []
        for row in rows:
            start = self.state.length(row.seq_id) + self.state.num_staged(row.seq_id)
            assert row.parents[0] == self.state.num_staged(row.seq_id) - 1
            places = range(start, start + len(row.tokens))
            readings += [
                Reading(place, token, _whose(hidden_ND[len(readings) + index], place))
                for index, (place, token) in enumerate(zip(places, row.tokens, strict=True))
            ]
            guesses += [self._guess(place) for place in places[row.logits_from :]]
        self.state.stage(rows)
        self.passes.append(tuple(readings))
        own = [[float(reading.position), _MARKS["block"]] for reading in readings]
        logits_MV = torch.stack(guesses) if guesses else torch.zeros(0, VOCAB)
        return NetOutput(logits_MV, torch.tensor(own))

    def _guess(self, position: int) -> Tensor:
        return _sure((_next(self._text, position) + self._errs(position + 1)) % VOCAB)


def _whose(state_D: Tensor, position: int) -> Whose:
    """Whose state was given for the token before `position`; its position must be right."""
    whose = _NAMES[int(state_D[1])]
    assert (whose == "zero") == (position == 0)
    assert float(state_D[0]) == max(position - 1, 0)
    return whose


@dataclass(frozen=True, slots=True)
class TargetPass:
    """`length` tokens were kept before it; `num_rows` have logits."""

    length: int
    num_rows: int


@dataclass(slots=True)
class ScriptedTarget:
    """CausalLM that wants `text`, and looks at `block` before every pass: a block may lag behind,
    but it holds text alone, and nothing that was drafted."""

    text: tuple[int, ...]
    block: ScriptedBlock
    state: HiddenMemory = field(default_factory=HiddenMemory)
    passes: list[TargetPass] = field(default_factory=list[TargetPass])

    @property
    def spec(self) -> ModelSpec:
        return toy_spec("scripted", VOCAB)

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        assert needs.hidden_layers == (LAYER,)
        wanted: list[Tensor] = []
        for row in rows:
            length = self.state.length(row.seq_id)
            assert row.parents == tuple(range(ROOT, len(row.tokens) - 1))
            assert row.tokens[: row.logits_from + 1] == self._known(length, row.logits_from + 1)
            assert self.block.state.length(row.seq_id) <= length + row.logits_from + 1
            assert self.block.state.num_staged(row.seq_id) == 0
            if len(row.tokens) > row.logits_from + 1:
                # It drafted, so it has read all text, the pending token as well.
                assert self.block.state.length(row.seq_id) == length + 1
            self.passes.append(TargetPass(length, row.num_logits))
            places = range(length, length + len(row.tokens))[row.logits_from :]
            wanted += [_sure(_next(self.text, place)) for place in places]
        self.state.tokens.stage(rows)
        return StepOutput(torch.stack(wanted) if wanted else torch.zeros(0, VOCAB))

    def _known(self, start: int, count: int) -> tuple[int, ...]:
        return self.text[start : start + count]


def _next(text: Sequence[int], position: int) -> int:
    return text[position + 1] if position + 1 < len(text) else 0


def _sure(token: int) -> Tensor:
    logits_V = torch.zeros(VOCAB)
    logits_V[token] = 9.0
    return logits_V
