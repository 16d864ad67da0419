"""Bugs in drafters that look up, in how they are scored, and in the watchdog."""

from __future__ import annotations

from checks.drafters import (
    check_automaton,
    check_counts,
    check_gate,
    check_recycling,
    check_shadow,
    check_suffix,
    check_trees,
    check_watchdog,
)
from checks.merged import check_members_are_chosen_before_they_draw
from mutants.planting import Mutant

AUTOMATON = "outrider.drafters.common.suffix_automaton"
SUFFIX = "outrider.drafters.suffix"
MEMORY = "outrider.drafters.suffix"
RECYCLING = "outrider_lab.drafters.recycling"
GATE = "outrider.drafters.ngram"
BAND = "outrider.plugins.controllers"
SHADOW = "outrider.drafters.portfolio"
WATCHDOG = "outrider.control.heuristics"

MUTANTS = (
    Mutant(
        "runs are not split",
        AUTOMATON,
        "if self._length[target] == length:",
        "if self._length[target] >= length:",
        check_automaton,
    ),
    Mutant(
        "a split forgets what followed",
        AUTOMATON,
        "self._copy_edges(target, split)",
        "self._copy_edges(state, split)",
        check_automaton,
    ),
    Mutant(
        "only one edge leads to a split",
        AUTOMATON,
        "found = None if state == NONE else self._edges.get(state + token * _STEP)",
        "found = None",
        check_automaton,
    ),
    Mutant(
        "the end of a text is its own context",
        AUTOMATON,
        "while state != ROOT and not self._total[state]:",
        "while False:",
        check_automaton,
    ),
    Mutant(
        "a token foreseen is not counted",
        AUTOMATON,
        "counts[edge] = counts[edge] + 1",
        "counts[edge] = counts[edge]",
        check_counts,
    ),
    Mutant(
        "children worth more than their parent",
        SUFFIX,
        "child = probability * share",
        "child = share",
        check_suffix,
    ),
    Mutant(
        "requests do not share what they wrote",
        MEMORY,
        "self._growing = TextWriter(memory.growing)\n        self._others",
        "self._growing = TextWriter(SuffixAutomaton())\n        self._others",
        check_suffix,
    ),
    Mutant(
        "ranks are kept by the token that they name",
        RECYCLING,
        "verified = (tokens[-1 - len(last.tokens)], *last.draft.tokens)",
        "verified = (tokens[-1], *last.draft.tokens)",
        check_recycling,
    ),
    Mutant(
        "what the text did not reach counts as refused",
        SHADOW,
        "observe(row.seq_id, len(written), common_prefix(drafted, written))",
        "observe(row.seq_id, len(drafted), common_prefix(drafted, written))",
        check_shadow,
    ),
    Mutant(
        "a drawn draft is left out because of its tokens",
        SHADOW,
        "if draft.tokens:\n                    drafts[index] = made_by",
        "if draft.tokens and draft.tokens[0]:\n                    drafts[index] = made_by",
        check_members_are_chosen_before_they_draw,
    ),
    Mutant(
        "every look-up counts as right",
        GATE,
        "self.rates.add(kind, right, _FIRST[kind])",
        "self.rates.add(kind, 1, _FIRST[kind])",
        check_gate,
    ),
    Mutant(
        "all nodes of a tree count as its depth",
        BAND,
        "trace.num_accepted / trace.num_positions",
        "trace.num_accepted / trace.num_drafted",
        check_trees,
    ),
    Mutant(
        "a watchdog that never bites",
        WATCHDOG,
        "counts.highest >= counts.needed",
        "counts.highest >= 0",
        check_watchdog,
    ),
    Mutant(
        "a watchdog that bites everybody",
        WATCHDOG,
        "counts.highest >= counts.needed",
        "False",
        check_watchdog,
    ),
)
