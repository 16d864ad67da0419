"""Compaction and bounded history: when prompt keys are dropped, how far a round may draft.

A prompt longer than the budget loses keys once: when the target has read all of it but its last
token, and before any later token is fed. So every token of the answer is computed over the same
keys, drafted or not, in any batch and after a pre-emption: drafting stays exact with respect to the
compacted model. Rounds that take the number of tokens for the number of rows cannot run such a
sequence and say so (`drops`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from outrider.cache.compaction import Keep
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, ContractError
from outrider.core.protocols import CacheStore, CausalLM, Drafter
from outrider.core.sequence import LiveSequence
from outrider.engine.round import Batch, Chunk, Chunks


@runtime_checkable
class CompactingStore(CacheStore, Protocol):
    """A memory whose sequences may have fewer rows than tokens."""

    def num_dropped(self, seq_id: int) -> int:
        """Committed tokens that have no rows of their own."""
        ...


@runtime_checkable
class CompactingLM(CausalLM, Protocol):
    """A target that can drop keys of what it has read."""

    def compact(self, seq_id: int, keep: Keep) -> None: ...


@dataclass(frozen=True, slots=True)
class Compaction:
    """Drops all keys of a prompt but those that `keep` chooses."""

    keep: Keep

    def shared(self, seq: LiveSequence) -> Sequence[int]:
        """The text that the memory may already have: what lies behind is computed over fewer keys,
        also when it is read again."""
        end = self._end(seq)
        return seq.tokens[:-1] if end is None else seq.tokens[: min(end, len(seq.tokens) - 1)]

    def num_dropped(self, target: CausalLM, seq_id: int) -> int:
        state = target.state
        return state.num_dropped(seq_id) if isinstance(state, CompactingStore) else 0

    def drops(self, target: CausalLM, seq: LiveSequence) -> bool:
        """Whether keys of `seq` are gone, or will be before its next token is fed."""
        return self._end(seq) is not None or self.num_dropped(target, seq.seq_id) > 0

    def before(
        self,
        target: CausalLM,
        batch: Batch,
        chunks: Chunks,
        read: Callable[[Sequence[Chunk]], object],
    ) -> Sequence[Chunk]:
        """Before a pass over rounds of `batch` and `chunks`: `read` the prompts that end in it and
        compact them. What is left of the chunks."""
        whole = [Chunk(seq, len(seq.tokens) - target.state.length(seq.seq_id)) for seq in batch]
        due = {
            chunk.seq.seq_id: first
            for chunk in (*whole, *chunks)
            if (first := self._first(target, chunk)) is not None
        }
        if not due:
            return chunks
        read([chunk for chunk in due.values() if chunk.num_tokens])
        for seq_id in due:
            if not isinstance(target, CompactingLM):
                raise ContractError("target is no CompactingLM")
            target.compact(seq_id, self.keep)
        left = [_behind(chunk, due.get(chunk.seq.seq_id)) for chunk in chunks]
        return [chunk for chunk in left if chunk.num_tokens]

    def _first(self, target: CausalLM, chunk: Chunk) -> Chunk | None:
        """The part of `chunk` up to the end of a prompt that is to be compacted there."""
        seq_id, end = chunk.seq.seq_id, self._end(chunk.seq)
        length = target.state.length(seq_id)
        if end is None or self.num_dropped(target, seq_id) or length + chunk.num_tokens < end:
            return None
        return Chunk(chunk.seq, end - length)

    def _end(self, seq: LiveSequence) -> int | None:
        """Tokens after which keys are dropped; None where all are kept."""
        end = seq.prompt_length - 1
        return end if end > self.keep.budget else None


def keep_of(config: EngineConfig) -> Keep | None:
    """What of a longer prompt is kept; None for all. Raises ConfigError for a window that leaves
    nothing to choose."""
    return Keep(config.kv_budget, config.kv_window) if config.kv_budget else None


def compaction_of(config: EngineConfig, target: CausalLM, drafter: Drafter) -> Compaction | None:
    """What the settings say of it. Raises ConfigError where target or drafter cannot go along."""
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
            f"{target.spec.window} tokens, and keys that are left have lost their places.",
            hint="leave --kv-budget at 0",
        )
    if drafter.needs.hidden_layers:
        raise ConfigError(
            f"kv_budget={config.kv_budget}: drafter {drafter.name!r} reads hidden states, which "
            "are dropped with the keys.",
            hint="leave --kv-budget at 0, or choose another --drafter",
        )
    return Compaction(keep)


def _behind(chunk: Chunk, first: Chunk | None) -> Chunk:
    return chunk if first is None else Chunk(chunk.seq, chunk.num_tokens - first.num_tokens)


@runtime_checkable
class FreeingStore(CacheStore, Protocol):
    """A memory that gives back what no later token sees."""

    @property
    def reach(self) -> int:
        """Tokens of a text that its next one sees, itself included; 0 for all."""
        ...


def most_held(target: CausalLM, step: int, page_size: int) -> int:
    """Arena tokens that a text of any length takes, where a job feeds `step` tokens of it at most;
    0 where that is not bounded."""
    reach = target.state.reach if isinstance(target.state, FreeingStore) else 0
    return reach + step + page_size if reach else 0


@runtime_checkable
class BoundedStore(CacheStore, Protocol):
    """A memory that can return to `history` nodes of a round besides the pending token.

    A recurrent memory keeps the states that a round may return to, and its room for them is a
    setting, or what a device had left. Longer drafts are cut to it, and the user is told.
    """

    @property
    def history(self) -> int: ...


def within_history(config: EngineConfig, target: CausalLM) -> EngineConfig:
    """`config` with drafts no larger than the target's memory can return to."""
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
    """What to tell the user once if drafts are cut."""
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
