"""Compaction: a target that reads the rest of a text over fewer keys of its prompt.

A prompt longer than the budget loses keys once: when the target has read all of it but its last
token, and before any later token is fed. So every token of the answer is computed over the same
keys, drafted or not, in any batch and after a pre-emption: drafting stays exact with respect to the
compacted model. Rounds that assume as many rows as tokens refuse such a sequence (`drops`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from outrider.cache.pool import Keep
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, ContractError
from outrider.core.protocols import CacheStore, CausalLM, Drafter
from outrider.engine.round import Batch, Chunk, Chunks, CompactingLM, LiveSequence


@runtime_checkable
class CompactingStore(CacheStore, Protocol):
    """A memory whose sequences may have fewer rows than tokens."""

    def num_dropped(self, seq_id: int) -> int:
        """Return the number of committed tokens that have no rows of their own."""
        ...


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


def compaction_of(config: EngineConfig, target: CausalLM, drafter: Drafter) -> Compaction:
    """Return the configured compaction. Raises ConfigError if it is not supported."""
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
    return Compaction(Keep(config.kv_budget, config.kv_window))


def _rest(chunk: Chunk, first: Chunk | None) -> Chunk:
    return chunk if first is None else Chunk(chunk.seq, chunk.num_tokens - first.num_tokens)
