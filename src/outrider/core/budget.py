"""How much speculation one round may spend, and what it got for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """At most `depth` draft tokens along any path (K of a chain); 0 means do not speculate."""

    depth: int


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """What one pass did for one sequence. Every metric and controller derives from these records.

    A round emits `num_accepted + 1` tokens, always; a pass that only read a chunk of the prompt
    emits none. Seconds are those of the whole pass, in which `batch_size` sequences took part:
    records that share `pass_index` share their seconds. `num_accepted` counts draft nodes kept
    after clamping. `num_waiting` counts requests that were not yet admitted.
    """

    seq_id: int
    pass_index: int
    drafter: str
    batch_size: int
    num_target_passes: int
    num_prompt_tokens: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    num_rows_copied: int
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    num_waiting: int = 0
