"""Bugs in rounds: where outcomes end, what is committed, counted and freed."""

from __future__ import annotations

from checks.engine import (
    check_admission,
    check_all_accepted,
    check_all_rejected,
    check_budget_anywhere,
    check_cancelling,
    check_clamp,
    check_one_pass_a_round,
    check_stop_anywhere,
)
from checks.runs import greedy_batch, stepwise_batch
from mutants.planting import Mutant

CLAMP = "outrider.engine.round"
READING = "outrider.engine.stages"
SETTLE = "outrider.engine.round"
STAGES = "outrider.engine.stages"
ADMISSION = "outrider.sched.jobs"
DRAFTING = "outrider.engine.drafting"
RESIDENTS = "outrider.engine.requests"
STEPWISE = "outrider.engine.round"
SUMMARY = "outrider.metrics"

MUTANTS = (
    Mutant(
        "commit keeps one too many",
        SETTLE,
        "_kept(one.num_fed, one.outcome)",
        "_kept(one.num_fed + 1, one.outcome)",
        check_all_rejected,
    ),
    Mutant(
        "the pending token is not kept",
        SETTLE,
        "_kept(one.num_fed, one.outcome)",
        "_kept(one.num_fed - 1, one.outcome)",
        check_all_rejected,
    ),
    Mutant(
        "stop token left out", CLAMP, "tokens[: stop + 1]", "tokens[: max(stop, 1)]", check_clamp
    ),
    Mutant(
        "stop token one late",
        CLAMP,
        "tokens[: stop + 1]",
        "tokens[: stop + 2]",
        check_stop_anywhere,
    ),
    Mutant(
        "budget one too many",
        CLAMP,
        "outcome.tokens[: seq.num_remaining]",
        "outcome.tokens[: seq.num_remaining + 1]",
        check_clamp,
    ),
    Mutant(
        "budget one too few",
        CLAMP,
        "outcome.tokens[: seq.num_remaining]",
        "outcome.tokens[: max(seq.num_remaining - 1, 1)]",
        check_budget_anywhere,
    ),
    Mutant(
        "stop string not told of", CLAMP, "tokens[:matched]", "tokens[: matched + 1]", check_clamp
    ),
    Mutant(
        "outcome not clamped in memory",
        SETTLE,
        "_kept(one.num_fed, one.outcome)",
        "range(one.num_fed + len(one.outcome.draft))",
        check_stop_anywhere,
    ),
    Mutant(
        "drafts past the budget",
        STAGES,
        "seq.num_remaining - 1)",
        "seq.num_remaining)",
        check_budget_anywhere,
    ),
    Mutant(
        "distributions of the mate",
        READING,
        "exact=exact))\n        start = end\n",
        "exact=exact))\n        start = end - 1\n",
        greedy_batch,
    ),
    Mutant(
        "draft hung from the wrong row",
        "outrider.core.draft",
        "(root + 1 + parent for",
        "(max(root, parent) for",
        check_all_accepted,
    ),
    Mutant(
        "drafts of depth one less",
        STAGES,
        "else min(seq.budget.depth,",
        "else min(seq.budget.depth - 1,",
        check_all_accepted,
    ),
    Mutant(
        "shared passes counted twice",
        SUMMARY,
        "sum(trace.num_target_passes for trace in passes)",
        "sum(trace.num_target_passes for trace in records)",
        check_one_pass_a_round,
    ),
    Mutant(
        "room for drafts not reserved",
        ADMISSION,
        "ahead * self.reserve) + self.spare",
        "ahead * self.reserve)",
        check_admission,
    ),
    Mutant(
        "memory kept after the end",
        RESIDENTS,
        "        self.target.state.close(seq_id)\n",
        "        self.target.state.length(seq_id)\n",
        check_cancelling,
    ),
    Mutant(
        "draft memory kept after the end",
        DRAFTING,
        "            self.others.close(seq_id, self.drafter)\n",
        "            self.drafter.name\n",
        check_cancelling,
    ),
    Mutant(
        "stepwise asks one token late",
        STEPWISE,
        "_part(row, 0, row.logits_from + 1)",
        "_part(row, 0, row.logits_from + 2)",
        stepwise_batch,
    ),
)
