"""How much may be drafted where a memory cannot return to every token.

A recurrent memory keeps what a round may return to, and its room for that is a setting, or what a
device had left. Longer drafts are cut to it, and the user is told; nothing is turned off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

from outrider.core.config import EngineConfig
from outrider.core.protocols import CausalLM, StateStore


@runtime_checkable
class BoundedStore(StateStore, Protocol):
    """A memory that can return to `history` nodes of a round besides the pending token."""

    @property
    def history(self) -> int: ...


def within_history(config: EngineConfig, target: CausalLM) -> EngineConfig:
    """`config` with drafts no larger than the target's memory can return to."""
    most = _history(target)
    if most is None or most >= max(config.k, config.tree_nodes):
        return config
    return replace(
        config,
        k=min(config.k, most),
        min_k=min(config.min_k, most),
        tree_nodes=min(config.tree_nodes, most),
    )


def history_note(config: EngineConfig, target: CausalLM) -> str | None:
    """What to tell the user once if drafts are cut."""
    most, wanted = _history(target), max(config.k, config.tree_nodes)
    if most is None or most >= wanted:
        return None
    return (
        f"drafts are cut from {wanted} tokens a round to {most}, which the recurrent states can "
        "return to; --state-history raises that where memory allows"
    )


def _history(target: CausalLM) -> int | None:
    state = target.state
    return state.history if isinstance(state, BoundedStore) else None
