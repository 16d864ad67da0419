"""Traces for controllers: one round of one sequence, with only what policies read."""

from __future__ import annotations

from outrider.core.draft import RoundTrace


def trace(
    seq_id: int,
    num_drafted: int,
    num_accepted: int,
    *,
    ms: float = 1.0,
    num_waiting: int = 0,
    reading: bool = False,
) -> RoundTrace:
    """A round of `ms` milliseconds, or a pass that only read a part of the prompt."""
    return RoundTrace(
        seq_id=seq_id,
        pass_index=0,
        drafter="model",
        batch_size=1,
        num_target_passes=1,
        num_prompt_tokens=int(reading),
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        num_emitted=0 if reading else num_accepted + 1,
        num_rows_copied=0,
        draft_seconds=ms / 4000,
        verify_seconds=ms / 2000,
        accept_seconds=ms / 4000,
        num_waiting=num_waiting,
    )
