"""Bugs in drafting ahead: keys, distributions and numbers of branches, memory of trunks."""

from __future__ import annotations

from checks.ahead import (
    check_ahead_is_exact,
    check_ahead_is_the_text_in_turns,
    check_left_over_is_not_found,
    check_saguaro_is_exact,
)
from mutants.planting import Mutant

TABLE = "outrider.plugins.lanes.ahead.table"
TREE = "outrider.plugins.lanes.ahead.tree"
SAGUARO = "outrider.plugins.lanes.ahead.forecast"

MUTANTS = (
    Mutant(
        "a key without the round's start",
        TABLE,
        "return start == self.start and row",
        "return row",
        check_left_over_is_not_found,
    ),
    Mutant(
        "a key without the token",
        TABLE,
        "self.branches.get((last.num_accepted, row.tokens[-1]))",
        "next((b for k, b in self.branches.items() if k[0] == last.num_accepted), None)",
        check_ahead_is_the_text_in_turns,
    ),
    Mutant(
        "distributions of the wrong branch",
        TREE,
        "self._probs_KBV[:, index]",
        "self._probs_KBV[:, index - 1]",
        check_ahead_is_exact,
    ),
    Mutant(
        "a branch with the numbers of the round before",
        TREE,
        "self.row.rng_after(branch.accepted + 1)",
        "self.row.rng_after(branch.accepted)",
        check_ahead_is_the_text_in_turns,
    ),
    Mutant(
        "a branch a place too low",
        TREE,
        "self.root + branch.accepted for",
        "self.root + max(branch.accepted - 1, 0) for",
        check_ahead_is_the_text_in_turns,
    ),
    Mutant(
        "another distribution drawn from than reported",
        SAGUARO,
        "probs_V.copy_(changed_V / total)",
        "probs_V.copy_(changed_V)",
        check_saguaro_is_exact,
    ),
)
