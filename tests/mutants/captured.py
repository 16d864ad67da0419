"""Bugs of captured rounds: what graphs suffer from, whose memory outlives the texts in it."""

from __future__ import annotations

from checks.captured import (
    check_memory_of_host_rounds,
    check_numbers_of_a_request,
    check_rows_in_turn,
)
from mutants.planting import Mutant

SAMPLING = "outrider.plugins.gpu.rounds.sampling"
SHAPING = "outrider.plugins.gpu.rounds.shaping"
VERIFY = "outrider.plugins.gpu.rounds.verify"

MUTANTS = (
    Mutant(
        "rows that are none keep an earlier draft",
        VERIFY,
        "for row in range(shape.rows):\n        seq",
        "for row in range(len(batch)):\n        seq",
        check_memory_of_host_rounds,
    ),
    Mutant(
        "rows that are none write tokens of their own",
        VERIFY,
        "[:, source_N]\n",
        '[:, source_N]; fields["plan"][0, num_nodes:] = 0\n',
        check_memory_of_host_rounds,
    ),
    Mutant(
        "rows that are none judge the draft of row 0",
        VERIFY,
        "draft = seq.draft if row < len(batch) else Draft.empty()",
        "draft = seq.draft",
        check_memory_of_host_rounds,
    ),
    Mutant(
        "penalties of an earlier text stay in a row",
        SHAPING,
        "ids[size:], entries[:, size:] = self.ids_S[0], self.entries_3S[:, :1]",
        "ids[size:] += 0",
        check_rows_in_turn,
    ),
    Mutant(
        "nodes of a tree see a chain",
        VERIFY,
        "parents_below(0, (*draft.parents, *below))",
        "parents_below(0, (*range(-1, len(draft) - 1), *below))",
        check_memory_of_host_rounds,
    ),
    Mutant(
        "the last row of a path is not moved",
        VERIFY,
        "nodes_K < found.num_accepted_B[:, None]",
        "nodes_K < found.num_accepted_B[:, None] - 1",
        check_memory_of_host_rounds,
    ),
    Mutant(
        "top-k of row 0 for all",
        SAMPLING,
        "_top_k(logits_BXV, filters.top_k_B[:, None, None])",
        "_top_k(logits_BXV, filters.top_k_B[:1, None, None])",
        check_rows_in_turn,
    ),
    Mutant(
        "seeds of 32 bits in a graph",
        VERIFY,
        "top_k, params.rng_seed, seq.sample",
        "top_k, params.rng_seed & 0xFFFFFFFF, seq.sample",
        check_numbers_of_a_request,
    ),
)
