"""Scripted language model without weights, for tests and demos: logits hash the last tokens.

`ScriptedLM(Script(seed=7))` prefers one token after every context. Another model of the same seed
and `agreement` a prefers the same token in a share a of all contexts and a certain other token in
the others, so as a draft of the first it is accepted at rate a under greedy decoding. Logits are
`spread` times a uniform number each, with the preferred token `gap` above: spread 0 is a sharp
distribution, a gap near 0 with a larger spread a soft one.

Shapes:  M = packed logits rows, V = vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core.errors import CapacityError, ContractError
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.core.tree import ROOT


@dataclass(slots=True)
class _ScriptedMemory:
    committed: list[int] = field(default_factory=list[int])
    staged: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])


class TokenMemory:
    """A StateStore that stores token ids only. Misuse fails an assertion.

    The assertions say what any caller of a StateStore must do.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._sequences: dict[int, _ScriptedMemory] = {}

    def open(self, seq_id: int, tokens: Sequence[int], salt: str = "") -> int:
        del salt
        if seq_id in self._sequences:
            raise ContractError("the sequence is open already")
        if not all(token >= 0 for token in tokens):
            raise ContractError("ids are not negative")
        self._sequences[seq_id] = _ScriptedMemory()
        return 0

    def fork(self, source: int, new: int, length: int | None = None) -> None:
        if new in self._sequences:
            raise ContractError("the sequence is open already")
        committed = self._sequences[source].committed
        if not (length is None or 0 <= length <= len(committed)):
            raise ContractError("a fork is no longer than its source")
        self._sequences[new] = _ScriptedMemory(committed[:length])

    def length(self, seq_id: int) -> int:
        return len(self._sequences[seq_id].committed)

    def num_staged(self, seq_id: int) -> int:
        return len(self._sequences[seq_id].staged)

    def reserve(self, counts: Mapping[int, int]) -> None:
        if sum(counts.values()) > self.num_free_tokens:
            raise CapacityError("the scripted model's memory is full.", hint="raise num_slots")

    def commit(self, paths: Mapping[int, Sequence[int]]) -> int:
        for seq_id, path in paths.items():
            memory = self._sequences[seq_id]
            if not all(node >= 0 for node in path):
                raise ContractError("a path has no root in it")
            if [memory.parents[node] for node in path] != [ROOT, *path][: len(path)]:
                raise ContractError("a path goes from the root down")
            memory.committed += [memory.staged[node] for node in path]
            memory.staged, memory.parents = [], []
        return 0

    def close(self, seq_id: int) -> None:
        del self._sequences[seq_id]

    @property
    def num_free_tokens(self) -> int:
        held = (len(m.committed) + len(m.staged) for m in self._sequences.values())
        return self._num_slots - sum(held)

    def stage(self, rows: Sequence[StepRow]) -> None:
        """Stage tokens. Raises CapacityError, with nothing staged, if they do not fit."""
        if sum(len(row.tokens) for row in rows) > self.num_free_tokens:
            raise CapacityError("the scripted model's memory is full.", hint="raise num_slots")
        for row in rows:
            memory = self._sequences[row.seq_id]
            first = len(memory.staged)
            if not all(ROOT <= p < first + i for i, p in enumerate(row.parents)):
                raise ContractError("parents come before their children")
            memory.staged += row.tokens
            memory.parents += row.parents

    def context(self, seq_id: int, node: int, order: int) -> tuple[int, ...]:
        """Return the last `order` tokens that a staged node sees, its own the last."""
        memory = self._sequences[seq_id]
        path: list[int] = []
        while node != ROOT and len(path) < order:
            path.append(memory.staged[node])
            node = memory.parents[node]
        rest = order - len(path)
        return (*memory.committed[max(0, len(memory.committed) - rest) :], *path[::-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The behaviour of a ScriptedLM: its distribution depends on the last `order` tokens."""

    vocab_size: int = 64
    seed: int = 0
    order: int = 3
    agreement: float = 1.0
    gap: float = 8.0
    spread: float = 0.0
    stop_ids: tuple[int, ...] = ()
    max_tokens: int = 4096
    num_slots: int = 1 << 20

    def logits(self, context: tuple[int, ...]) -> Tensor:
        """Return float32 logits of shape V."""
        logits_V = torch.zeros(self.vocab_size)
        if self.spread:
            rng = torch.Generator().manual_seed(self._hash(context, 0))
            logits_V = torch.rand(self.vocab_size, generator=rng) * self.spread
        logits_V[self.preferred(context)] = self.spread + self.gap
        return logits_V

    def preferred(self, context: tuple[int, ...]) -> int:
        token = self._hash(context, 1) % self.vocab_size
        if self._hash(context, 2) < self.agreement * 2**64:
            return token
        other = 1 + self._hash(context, 3) % (self.vocab_size - 1)
        return (token + other) % self.vocab_size

    def _hash(self, context: tuple[int, ...], purpose: int) -> int:
        """Return a hash of 64 bits."""
        text = f"{self.seed} {purpose} {context}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class ScriptedLM:
    """A CausalLM by hash. `num_steps` and `num_rows` count passes and packed tokens."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.num_steps = 0
        self.num_rows = 0
        self._memory = TokenMemory(script.num_slots)
        self._spec = ModelSpec(
            name="scripted",
            family="scripted",
            vocab_size=script.vocab_size,
            hidden_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            ffn_size=1,
            max_tokens=script.max_tokens,
            num_parameters=0,
            bytes_per_weight=4,
            bytes_per_kv=4,
            stop_ids=script.stop_ids,
        )

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def state(self) -> TokenMemory:
        return self._memory

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        if needs.hidden_layers:
            raise ContractError("it has no hidden states")
        if not all(0 <= token < self.spec.vocab_size for row in rows for token in row.tokens):
            raise ContractError("a token lies outside the vocabulary")
        first = [self._memory.num_staged(row.seq_id) for row in rows]
        self._memory.stage(rows)
        self.num_steps += 1
        self.num_rows += sum(len(row.tokens) for row in rows)
        logits = [
            self.script.logits(self._memory.context(row.seq_id, node, self.script.order))
            for start, row in zip(first, rows, strict=True)
            for node in range(start + row.logits_from, start + len(row.tokens))
        ]
        return StepOutput(torch.stack(logits) if logits else torch.zeros(0, self.spec.vocab_size))
