"""Where an outcome ends: one function for stop tokens, stop strings, budget and window.

It runs before memory is committed and before any drafter hears of the outcome, so every memory ends
exactly where the text does, wherever in the accepted path the end lies.
"""

from __future__ import annotations

from outrider.core.draft import Outcome
from outrider.core.sequence import FinishReason, LiveSequence


def clamp(outcome: Outcome, seq: LiveSequence) -> tuple[Outcome, FinishReason | None]:
    """`outcome` up to its end, and why it ended there (None: it goes on)."""
    tokens = outcome.tokens[: seq.room]
    reason: FinishReason | None = "length" if len(tokens) == seq.room else None
    stop = next((i for i, token in enumerate(tokens) if token in seq.stop_ids), None)
    if stop is not None:
        tokens, reason = tokens[: stop + 1], "stop"
    matched = seq.match(tokens) if seq.match else None
    if matched is not None:
        tokens, reason = tokens[:matched], "stop"
    return outcome.keep(len(tokens)), reason
