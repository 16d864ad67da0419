"""Targets that read text otherwise: over fewer keys, with a bounded history, token by token.

A prompt longer than the budget loses keys once: when the target has read all of it but its last
token, and before any later token is fed. So every token of the answer is computed over the same
keys, drafted or not, in any batch and after a pre-emption: drafting stays exact with respect to the
compacted model. Rounds that assume as many rows as tokens refuse such a sequence (`drops`).

Shapes:  M = packed logits rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.cache.pool import Keep
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, ContractError
from outrider.core.protocols import CacheStore, CausalLM, Drafter, DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.engine.round import Batch, Chunk, Chunks, LiveSequence


@runtime_checkable
class CompactingStore(CacheStore, Protocol):
    """A memory whose sequences may have fewer rows than tokens."""

    def num_dropped(self, seq_id: int) -> int:
        """Return the number of committed tokens that have no rows of their own."""
        ...


@runtime_checkable
class CompactingLM(CausalLM, Protocol):
    """A target that can drop keys of tokens that it has read."""

    def compact(self, seq_id: int, keep: Keep) -> None: ...


@dataclass(frozen=True, slots=True)
class Compaction:
    """A policy that drops all keys of a prompt except those that `keep` chooses."""

    keep: Keep

    def shared(self, seq: LiveSequence) -> Sequence[int]:
        """Return the beginning of the text that may be shared from memory. The rest is computed
        over fewer keys, also when it is read again."""
        end = self._end(seq)
        return seq.tokens[:-1] if end is None else seq.tokens[: min(end, len(seq.tokens) - 1)]

    def num_dropped(self, target: CausalLM, seq_id: int) -> int:
        state = target.state
        return state.num_dropped(seq_id) if isinstance(state, CompactingStore) else 0

    def drops(self, target: CausalLM, seq: LiveSequence) -> bool:
        """Return whether keys of `seq` are gone, or will be before its next token is fed."""
        return self._end(seq) is not None or self.num_dropped(target, seq.seq_id) > 0

    def before(
        self,
        target: CausalLM,
        batch: Batch,
        chunks: Chunks,
        read: Callable[[Sequence[Chunk]], object],
    ) -> Sequence[Chunk]:
        """Prepare a pass over rounds of `batch` and `chunks`: `read` the prompts that end in it,
        and compact them. Return the rest of the chunks."""
        whole = [Chunk(seq, len(seq.tokens) - target.state.length(seq.seq_id)) for seq in batch]
        ending = {
            chunk.seq.seq_id: first
            for chunk in (*whole, *chunks)
            if (first := self._first(target, chunk)) is not None
        }
        if not ending:
            return chunks
        read([chunk for chunk in ending.values() if chunk.num_tokens])
        for seq_id in ending:
            if not isinstance(target, CompactingLM):
                raise ContractError("target is no CompactingLM")
            target.compact(seq_id, self.keep)
        left = [_rest(chunk, ending.get(chunk.seq.seq_id)) for chunk in chunks]
        return [chunk for chunk in left if chunk.num_tokens]

    def _first(self, target: CausalLM, chunk: Chunk) -> Chunk | None:
        """Return the part of `chunk` up to the end of a prompt that is compacted there, or None."""
        seq_id, end = chunk.seq.seq_id, self._end(chunk.seq)
        length = target.state.length(seq_id)
        if end is None or self.num_dropped(target, seq_id) or length + chunk.num_tokens < end:
            return None
        return Chunk(chunk.seq, end - length)

    def _end(self, seq: LiveSequence) -> int | None:
        """Return the number of tokens after which keys are dropped; None if all are retained."""
        end = seq.prompt_length - 1
        return end if end > self.keep.budget else None


def keep_of(config: EngineConfig) -> Keep | None:
    """Return how much of a longer prompt is retained; None for all of it. Raises ConfigError for a
    window that leaves nothing to choose."""
    return Keep(config.kv_budget, config.kv_window) if config.kv_budget else None


def compaction_of(config: EngineConfig, target: CausalLM, drafter: Drafter) -> Compaction | None:
    """Return the configured compaction, or None. Raises ConfigError if it is not supported."""
    keep = keep_of(config)
    if keep is None:
        return None
    if not isinstance(target, CompactingLM):
        raise ConfigError(
            f"kv_budget={config.kv_budget}: this target keeps all of its keys.",
            hint="leave --kv-budget at 0, or choose a model of the Llama family or GPT-2 in one "
            "process",
        )
    if target.spec.window:
        raise ConfigError(
            f"kv_budget={config.kv_budget}: layers of this target see the last "
            f"{target.spec.window} tokens, and the remaining keys have lost their positions.",
            hint="leave --kv-budget at 0",
        )
    if target.spec.kv_layers:
        raise ConfigError(
            f"kv_budget={config.kv_budget}: layers of this target have keys of different sizes.",
            hint="leave --kv-budget at 0",
        )
    if drafter.needs.hidden_layers:
        raise ConfigError(
            f"kv_budget={config.kv_budget}: drafter {drafter.name!r} reads hidden states, which "
            "are dropped with the keys.",
            hint="leave --kv-budget at 0, or choose another --drafter",
        )
    return Compaction(keep)


def _rest(chunk: Chunk, first: Chunk | None) -> Chunk:
    return chunk if first is None else Chunk(chunk.seq, chunk.num_tokens - first.num_tokens)


@runtime_checkable
class FreeingStore(CacheStore, Protocol):
    """A memory that frees what no later token attends to."""

    @property
    def reach(self) -> int:
        """Tokens that the next token of a text attends to, itself included; 0 for all."""
        ...


def most_held(target: CausalLM, step: int, page_size: int) -> int:
    """Return the arena tokens that a text of any length takes at most, if a job feeds at most
    `step` tokens of it; 0 if that is not bounded."""
    reach = target.state.reach if isinstance(target.state, FreeingStore) else 0
    return reach + step + page_size if reach else 0


@runtime_checkable
class BoundedStore(CacheStore, Protocol):
    """A memory that can return to `history` nodes of a round, in addition to the pending token.

    A recurrent memory keeps the states to which a round may return. Their number is a setting, or
    is given by the free memory of a device. Longer drafts are cut to it, and the user is notified.
    """

    @property
    def history(self) -> int: ...


def within_history(config: EngineConfig, target: CausalLM) -> EngineConfig:
    """Return `config` with drafts no larger than the target's memory can return to."""
    most = _history(target)
    if most is None or most >= max(config.most_k, config.tree_nodes):
        return config
    return replace(
        config,
        k=min(config.most_k, most),
        min_k=min(config.min_k, most),
        tree_nodes=min(config.tree_nodes, most),
    )


def history_note(config: EngineConfig, target: CausalLM) -> str | None:
    """Return a note for the user if drafts are cut, else None."""
    most, wanted = _history(target), max(config.most_k, config.tree_nodes)
    if most is None or most >= wanted:
        return None
    return (
        f"drafts are cut from {wanted} tokens a round to {most}, which the recurrent states can "
        "return to; --state-history raises that where memory allows"
    )


def _history(target: CausalLM) -> int | None:
    state = target.state
    return state.history if isinstance(state, BoundedStore) else None


@dataclass(frozen=True, slots=True)
class StepwiseLM:
    """A CausalLM over `model` whose passes compute logits of at most one token of a row: the kill
    switch for batched verification.

    Logits must be bit-identical to the batched pass on row-invariant kernels, so switching this on
    and off distinguishes a numerics problem from a bookkeeping one. A round costs as many passes as
    its longest row has tokens with logits.
    """

    model: CausalLM

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def state(self) -> CacheStore:
        return self.model.state

    def compact(self, seq_id: int, keep: Keep) -> None:
        """Compact a sequence, if the model can."""
        if not isinstance(self.model, CompactingLM):
            raise ContractError("model is no CompactingLM")
        self.model.compact(seq_id, keep)

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        logits: list[list[Tensor]] = [[] for _ in rows]
        heads = [_part(row, 0, row.logits_from + 1) for row in rows]
        self._pass(list(enumerate(heads)), logits, needs)
        for at in range(1, max((row.num_logits for row in rows), default=0)):
            parts = [
                (index, _part(row, row.logits_from + at, row.logits_from + at + 1))
                for index, row in enumerate(rows)
                if at < row.num_logits
            ]
            self._pass(parts, logits, needs)
        num_passes = max([1, *(row.num_logits for row in rows)])
        flat = [row_V for row_logits in logits for row_V in row_logits]
        if not flat:
            return StepOutput(torch.empty(0, self.spec.vocab_size), num_passes=num_passes)
        return StepOutput(torch.stack(flat), num_passes=num_passes)

    def _pass(
        self, parts: Sequence[tuple[int, StepRow]], logits: list[list[Tensor]], needs: DraftNeeds
    ) -> None:
        out = self.model.step([part for _, part in parts], needs)
        if out.hidden_NKD is not None:
            raise ContractError("hidden states have to be stored in memory")
        wanted = [index for index, part in parts if part.num_logits]
        for index, row_V in zip(wanted, out.logits_MV.clone(), strict=True):
            logits[index].append(row_V)


def _part(row: StepRow, start: int, end: int) -> StepRow:
    tokens, parents = row.tokens[start:end], row.parents[start:end]
    return StepRow(row.seq_id, tokens, parents, max(row.logits_from - start, 0))
