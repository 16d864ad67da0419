"""A hybrid memory in small: one attention layer and one recurrent layer, in float64.

Attention rows roll back by dropping them; the recurrence cannot run backwards, so every staged node
keeps the state after it. No pages, no sharing: it is the second, unlike, implementation that keeps
the contracts honest.

Shapes:  S = rows, D = width, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from doubles.tiny_attention import WIDTH, toy_spec
from outrider.core.errors import CapacityError
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.tree import ROOT


@dataclass(frozen=True, slots=True)
class _Node:
    """A token that was fed: its parent, its attention row and the recurrent state after it."""

    parent: int
    row_D: Tensor
    state_D: Tensor


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
        rng = torch.Generator().manual_seed(seed)
        self.spec = toy_spec("toy-hybrid", vocab_size)
        self.state = HybridStore(num_slots)
        self._embed_VD = torch.randn(vocab_size, WIDTH, generator=rng, dtype=torch.float64)
        self._head_EV = torch.randn(2 * WIDTH, vocab_size, generator=rng, dtype=torch.float64)
        self._decay_D = torch.rand(WIDTH, generator=rng, dtype=torch.float64)
        self._logits_MV = torch.empty(0)

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        del needs
        self.state.require(rows)
        logits = [self._row(row) for row in rows]
        self._logits_MV.fill_(torch.nan)
        self._logits_MV = torch.cat([torch.empty(0, self.spec.vocab_size).double(), *logits])
        return StepOutput(self._logits_MV[:])

    def _row(self, row: StepRow) -> Tensor:
        features: list[Tensor] = []
        for token, parent in zip(row.tokens, row.parents, strict=True):
            before = self.state.path(row.seq_id, parent)
            x_D = self._embed_VD[token]
            state_D = before[-1].state_D if before else torch.zeros_like(x_D)
            state_D = torch.lerp(x_D, state_D, self._decay_D)
            self.state.stage(row.seq_id, _Node(parent, x_D, state_D))
            rows_SD = torch.stack([*(node.row_D for node in before), x_D])
            seen_D = torch.softmax(rows_SD @ x_D, dim=0) @ rows_SD
            features.append(torch.cat([seen_D, 3 * state_D]))
        wanted = features[row.logits_from :]
        return torch.stack(wanted) @ self._head_EV if wanted else self._head_EV[:0]
