"""Bugs in where sequences stand, and in who is read how much."""

from __future__ import annotations

from checks.machine import fairness, histories
from mutants.planting import Mutant

LEDGER = "outrider.sched.jobs"
WORKS = "outrider.sched.jobs"

MUTANTS = (
    Mutant(
        "a verdict that came is still drafted ahead of",
        LEDGER,
        "            self._ahead.remove(seq_id)\n\n    def _await_next",
        "            pass\n\n    def _await_next",
        histories,
    ),
    Mutant(
        "a chunk counts for a token",
        LEDGER,
        "self._unread[seq_id] -= work.num_tokens",
        "self._unread[seq_id] -= 1",
        histories,
    ),
    Mutant(
        "who failed waits for nothing",
        LEDGER,
        "self._await(seq_id, stage, index=0)",
        "pass",
        histories,
    ),
    Mutant(
        "a chunk reads the pending token",
        WORKS,
        "waiting[work.seq_id] - 1) for",
        "waiting[work.seq_id]) for",
        histories,
    ),
    Mutant(
        "a prompt goes to the end of the queue with every chunk",
        LEDGER,
        "insort(waiting, seq_id, key=self._arrival.__getitem__)",
        "waiting.append(seq_id)",
        fairness,
    ),
    Mutant(
        "the oldest prompt gets a quarter",
        WORKS,
        "max(size // 2, 1)",
        "max(size // 4, 1)",
        fairness,
    ),
    Mutant(
        "the longest of the others comes first",
        WORKS,
        "key=lambda work: work.num_tokens)",
        "key=lambda work: -work.num_tokens)",
        fairness,
    ),
)
