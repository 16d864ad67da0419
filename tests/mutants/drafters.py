"""Bugs in drafters: reported laws, draft memory, look-ups."""

from __future__ import annotations

from checks.drafters import check_lookup
from checks.runs import drafter_memory, drafting_law, engine_law, racing_along
from mutants.planting import Mutant

MODEL, GROWING = "outrider.drafters.model", "outrider.drafters.growth"
NOISE = "outrider.core.rng"
NGRAM = "outrider.drafters.ngram"

MUTANTS = (
    Mutant(
        "reported law at another temperature",
        GROWING,
        "chain.tokens.append(self.draw(law_V, chain.row.noise, node))",
        "chain.tokens.append(self.draw(law_V, chain.row.noise, node)); "
        "law_V.copy_(torch.softmax(logits_V, -1))",
        engine_law,
    ),
    Mutant(
        "argmax draft with soft q in the engine",
        GROWING,
        "chain.tokens.append(self.draw(law_V, chain.row.noise, node))",
        "chain.tokens.append(int(logits_V.argmax()))",
        engine_law,
    ),
    Mutant(
        "draft ignores its filters",
        GROWING,
        "processed_probs(logits_V[None], chain.row.params, self.sampling, law_1V)[0]",
        "law_1V[0].copy_(torch.softmax(logits_V, -1))",
        drafting_law,
    ),
    Mutant(
        "draft nodes share a number",
        NOISE,
        "noise.pick(law_V, node, Role.DRAFT)",
        "noise.pick(law_V, 0, Role.DRAFT)",
        engine_law,
    ),
    Mutant(
        "a racing drafter a place behind",
        NOISE,
        "noise.race_at(law_V, node)",
        "noise.race_at(law_V, max(node - 1, 0))",
        racing_along,
    ),
    Mutant(
        "refused drafts stay in draft memory",
        MODEL,
        "state.commit({seq_id: range(kept)})",
        "state.commit({seq_id: range(state.num_staged(seq_id))})",
        drafter_memory,
    ),
    Mutant(
        "draft memory a token short",
        MODEL,
        "start, end = length + kept, len(tokens) - 1",
        "start, end = length + kept + 1, len(tokens) - 1",
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
)
