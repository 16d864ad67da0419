"""A hybrid memory in small: one attention layer and one recurrent layer, in float64.

Attention rows roll back by dropping them; the recurrence cannot run backwards, so every staged node
keeps the state after it. No pages, no sharing: it is the second, unlike, implementation that keeps
the contracts honest.

Shapes:  S = rows, D = width, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from doubles.tiny_attention import WIDTH, toy_spec
from outrider.core.errors import CapacityError
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.tree import ROOT


class _State:
    """A recurrent state, with the states and the logits that were computed from it before: a
    thousand branches of an experiment read the same beginnings."""

    __slots__ = ("following", "logits", "value_D")

    def __init__(self, value_D: Tensor) -> None:
        self.value_D = value_D
        self.following: dict[int, _State] = {}
        self.logits: dict[tuple[int, ...], Tensor] = {}


class _Weights:
    """The weights of one seed, for all models that have it."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.embed_VD = torch.randn(vocab_size, WIDTH, generator=rng, dtype=torch.float64)
        self.head_EV = torch.randn(2 * WIDTH, vocab_size, generator=rng, dtype=torch.float64)
        self.decay_D = torch.rand(WIDTH, generator=rng, dtype=torch.float64)
        self.start = _State(torch.zeros(WIDTH, dtype=torch.float64))
        self._num_computed = 0

    def after(self, state: _State, token: int) -> _State:
        """The state once `token` was read."""
        known = state.following.get(token)
        if known is None:
            value_D = torch.lerp(self.embed_VD[token], state.value_D, self.decay_D)
            known = state.following.setdefault(token, _State(value_D))
        return known

    def logits(self, tokens: tuple[int, ...], state: _State) -> Tensor:
        """Of attention of the last of `tokens` over all of them, and of `state`."""
        known = state.logits.get(tokens)
        if known is None:
            rows_SD = self.embed_VD[list(tokens)]
            seen_D = torch.softmax(rows_SD @ rows_SD[-1], dim=0) @ rows_SD
            logits_V = torch.cat([seen_D, 3 * state.value_D]) @ self.head_EV
            known = state.logits.setdefault(tokens, logits_V)
            self._num_computed += 1
            if self._num_computed % MOST_KNOWN == 0:
                self.start = _State(self.start.value_D)
        return known


# Rows of logits that are remembered of one seed: some hundred bytes each.
MOST_KNOWN = 50_000
_weights = cache(_Weights)


@dataclass(frozen=True, slots=True)
class _Node:
    """A token that was fed: its parent, and the recurrent state after it."""

    parent: int
    token: int
    state: _State


@dataclass(slots=True)
class _Sequence:
    kept: list[_Node] = field(default_factory=list[_Node])
    staged: list[_Node] = field(default_factory=list[_Node])

    def path(self, node: int) -> list[_Node]:
        """Everything that `node` follows, itself included."""
        below: list[_Node] = []
        while node != ROOT:
            below.append(self.staged[node])
            node = self.staged[node].parent
        return self.kept + below[::-1]


class HybridStore:
    """StateStore over Python lists; `num_slots` bounds the tokens held by all sequences."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._sequences: dict[int, _Sequence] = {}

    def open(self, seq_id: int, tokens: Sequence[int], salt: str = "") -> int:
        del tokens, salt
        assert seq_id not in self._sequences
        self._sequences[seq_id] = _Sequence()
        return 0

    def fork(self, source: int, new: int, length: int | None = None) -> None:
        assert new not in self._sequences
        kept = self._sequences[source].kept[:length]
        self._require(len(kept))
        self._sequences[new] = _Sequence(kept)

    def length(self, seq_id: int) -> int:
        return len(self._sequences[seq_id].kept)

    def num_staged(self, seq_id: int) -> int:
        return len(self._sequences[seq_id].staged)

    def reserve(self, counts: Mapping[int, int]) -> None:
        self._require(sum(counts.values()))

    def commit(self, paths: Mapping[int, Sequence[int]]) -> int:
        return sum(self._commit(self._sequences[seq_id], path) for seq_id, path in paths.items())

    def close(self, seq_id: int) -> None:
        del self._sequences[seq_id]

    @property
    def num_free_tokens(self) -> int:
        held = sum(len(seq.kept) + len(seq.staged) for seq in self._sequences.values())
        return self._num_slots - held

    def check(self) -> None:
        assert self.num_free_tokens >= 0

    def require(self, rows: Sequence[StepRow]) -> None:
        self._require(sum(len(row.tokens) for row in rows))

    def path(self, seq_id: int, node: int) -> list[_Node]:
        return self._sequences[seq_id].path(node)

    def stage(self, seq_id: int, node: _Node) -> None:
        self._sequences[seq_id].staged.append(node)

    def _require(self, num_tokens: int) -> None:
        if num_tokens > self.num_free_tokens:
            raise CapacityError(f"no room for {num_tokens} more tokens.")

    @staticmethod
    def _commit(seq: _Sequence, path: Sequence[int]) -> int:
        seq.kept += [seq.staged[node] for node in path]
        seq.staged = []
        return sum(node != place for place, node in enumerate(path))


class ToyHybrid:
    """`seed` makes the weights."""

    def __init__(self, *, vocab_size: int = 11, seed: int = 0, num_slots: int = 256) -> None:
        self.spec = toy_spec("toy-hybrid", vocab_size)
        self.state = HybridStore(num_slots)
        self._weights = _weights(vocab_size, seed)
        self._logits_MV = torch.empty(0)

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        del needs
        self.state.require(rows)
        wanted = [logits_V for row in rows for logits_V in self._row(row)]
        self._logits_MV.fill_(torch.nan)
        nothing_0V = self._weights.head_EV[:0]
        self._logits_MV = torch.stack(wanted) if wanted else nothing_0V.clone()
        return StepOutput(self._logits_MV[:])

    def _row(self, row: StepRow) -> list[Tensor]:
        """The logits that the row asks for; all its nodes are staged."""
        weights, found = self._weights, list[Tensor]()
        for node, (token, parent) in enumerate(zip(row.tokens, row.parents, strict=True)):
            before = self.state.path(row.seq_id, parent)
            state = weights.after(before[-1].state if before else weights.start, token)
            self.state.stage(row.seq_id, _Node(parent, token, state))
            if node >= row.logits_from:
                tokens = (*(one.token for one in before), token)
                found.append(weights.logits(tokens, state))
        return found
