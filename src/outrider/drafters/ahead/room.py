"""What a draft model's memory must hold when it drafts ahead, beside what it holds anyway."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AheadRoom:
    """`num_rows` packed tokens and `num_logits` rows of logits in one pass; `num_slots` KV
    positions of every sequence beyond its text."""

    num_rows: int
    num_logits: int
    num_slots: int


def room_needed(k: int, fan_out: int, batch: int) -> AheadRoom:
    """For `batch` sequences that draft `k` tokens after each of `fan_out` foreseen verdicts.

    A sequence stages a trunk (a token that was not read yet, the pending one and the draft) and `k`
    nodes a branch. A pass reads all trunks, or the newest node of every branch.
    """
    return AheadRoom(
        num_rows=batch * max(k + 2, fan_out),
        num_logits=batch * max(k + 1, fan_out),
        num_slots=k + 2 + k * fan_out,
    )
