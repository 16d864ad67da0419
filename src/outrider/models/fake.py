"""A language model without weights, for tests and demos: its law is a hash of the last tokens.

`ScriptedLM(Script(seed=7))` prefers one token after every context. Another of the same seed and
`agreement` a prefers the same token in a share a of all contexts (which ones is a hash as well) and
a certain other token elsewhere; so as a draft of the first it is accepted at rate a under greedy
decoding. Everything is a pure function of seed and context: no stream of random numbers, no state
but the tokens themselves.

Logits are `spread` times a uniform number each, and the preferred token lies `gap` above all of
them: spread 0 is a sharp law; a gap near 0 with a larger spread is a soft one.

Shapes:  M = packed logits rows, V = vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.errors import ContractError
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.models.token_memory import TokenMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a ScriptedLM says: its law depends on the last `order` tokens."""

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
        """Float32, of shape V."""
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
        """64 bits."""
        text = f"{self.seed} {purpose} {context}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class ScriptedLM:
    """CausalLM by hash. `num_steps` and `num_rows` count passes and packed tokens."""

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
