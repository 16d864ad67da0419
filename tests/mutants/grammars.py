"""Bugs of a parser that walks a draft tree: masks of another node, or of another text."""

from __future__ import annotations

from checks.grammar_distribution import check_grammar_distribution
from mutants.planting import Mutant

GRAMMAR = "outrider.api.grammar"

MUTANTS = (
    Mutant(
        "a parser that is not taken back",
        GRAMMAR,
        "self._matcher.rollback(self._num_read - shared)",
        "self._matcher.is_stopped()",
        check_grammar_distribution,
    ),
    Mutant(
        "masks kept when the text has grown",
        GRAMMAR,
        "self._known.clear()",
        "self._known.items()",
        check_grammar_distribution,
    ),
    Mutant(
        "masks in the order of the walk",
        GRAMMAR,
        "for suffix in asked]",
        "for suffix in sorted(asked)]",
        check_grammar_distribution,
    ),
)
