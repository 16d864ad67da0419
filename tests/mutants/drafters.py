"""Bugs in drafters: reported distributions, draft memory, look-ups."""

from __future__ import annotations

from checks.drafters import check_lookup
from checks.runs import (
    drafter_memory,
    drafting_distribution,
    engine_distribution,
    half_read_text,
    racing_along,
    rules_of_requests,
    self_drafting,
    self_drafts_at_once,
)
from mutants.planting import Mutant

MODEL, GROWING = "outrider.drafters.common.draft_model", "outrider.drafters.common.growth"
NOISE = "outrider.core.rng"
NGRAM = "outrider.drafters.ngram"
OWN = "outrider.drafters.common.draft_model"
ROUND, STAGES = "outrider.engine.round", "outrider.engine.stages"

MUTANTS = (
    Mutant(
        "reported distribution at another temperature",
        GROWING,
        "return self._sampler.draw_for(chain.params)(probs_V, chain.row.rng, node, node)",
        "token = self._sampler.draw_for(chain.params)(probs_V, chain.row.rng, node, node); "
        "probs_V.copy_(torch.softmax(logits_V, -1)); return token",
        engine_distribution,
    ),
    Mutant(
        "argmax draft with soft q in the engine",
        GROWING,
        "return self._sampler.draw_for(chain.params)(probs_V, chain.row.rng, node, node)",
        "return int(logits_V.argmax())",
        engine_distribution,
    ),
    Mutant(
        "draft ignores its filters",
        GROWING,
        "self._sampler.probs(logits_V[None], chain.params, node, out_1V)[0]",
        "out_1V[0].copy_(torch.softmax(logits_V, -1))",
        drafting_distribution,
    ),
    Mutant(
        "draft nodes share a number",
        NOISE,
        "rng.pick(probs_V, node, Role.DRAFT)",
        "rng.pick(probs_V, 0, Role.DRAFT)",
        engine_distribution,
    ),
    Mutant(
        "a racing drafter a place behind",
        NOISE,
        "rng.race_at(probs_V, depth)",
        "rng.race_at(probs_V, max(depth - 1, 0))",
        racing_along,
    ),
    Mutant(
        "drafts of a request drawn for the engine's rule",
        GROWING,
        "self.draw if params.sampler is None else draw_for(params.sampler)",
        "self.draw",
        rules_of_requests,
    ),
    Mutant(
        "a request judged by the engine's rule",
        STAGES,
        "self.rules.get(seq.speculation.sampler, self.rule)",
        "self.rule",
        rules_of_requests,
    ),
    Mutant(
        "refused drafts stay in draft memory",
        MODEL,
        "state.commit({seq_id: kept})",
        "state.commit({seq_id: range(state.num_staged(seq_id))})",
        drafter_memory,
    ),
    Mutant(
        "draft memory a token short",
        MODEL,
        "start, end = length + len(kept), len(tokens) - 1",
        "start, end = length + len(kept) + 1, len(tokens) - 1",
        drafter_memory,
    ),
    Mutant(
        "lookup takes the shortest tail",
        NGRAM,
        "range(max_n, min_n - 1, -1)",
        "range(min_n, max_n + 1)",
        check_lookup,
    ),
    Mutant(
        "lookup copies one place off",
        NGRAM,
        "tokens[start : start + count]",
        "tokens[start + 1 : start + 1 + count]",
        check_lookup,
    ),
    Mutant(
        "lookup repeats the last token",
        NGRAM,
        "drafted[start + len(drafted) - len(tokens)]",
        "drafted[-1]",
        check_lookup,
    ),
    Mutant(
        "a copy's draft stays in the target's memory",
        OWN,
        "self.model.state.commit({row.seq_id: () for row in rows})",
        "self.model.state.commit({})",
        self_drafting,
    ),
    Mutant(
        "a copy drafts for a text that was not read",
        ROUND,
        "zip(batch, counts, strict=True) if count]",
        "zip(batch, counts, strict=True) if count > 99]",
        self_drafts_at_once,
    ),
    Mutant(
        "a copy drafts from a text read in part",
        OWN,
        "if length(row.seq_id) == len(row.tokens) - 1",
        "if length(row.seq_id) <= len(row.tokens) - 1",
        half_read_text,
    ),
)
