"""The contracts of a drafter and of an acceptance rule, as tests that their authors run:
docs/extending.md shows how. The code is in outrider/plugins/proof/contracts.py."""

from outrider.plugins.proof.contracts import (
    GREEDY,
    VOCAB,
    DrafterContract,
    ProposalContract,
    RuleContract,
    check_budgets,
    check_draws,
    check_ids_again,
    check_memory,
    check_rows_alone,
    check_same,
    check_shape,
    check_texts,
    fresh_draft,
    row,
)

__all__ = [
    "GREEDY",
    "VOCAB",
    "DrafterContract",
    "ProposalContract",
    "RuleContract",
    "check_budgets",
    "check_draws",
    "check_ids_again",
    "check_memory",
    "check_rows_alone",
    "check_same",
    "check_shape",
    "check_texts",
    "fresh_draft",
    "row",
]
