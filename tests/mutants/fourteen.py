"""Fourteen bugs by which sampled speculation goes wrong in practice, each in the shipped default.

The text still looks right with any of them; only its distribution is not the target's.
"""

from __future__ import annotations

from checks.engine_distribution import check_penalised_engine_distribution
from checks.rng import check_no_number_is_used_twice
from checks.runs import (
    block_distribution,
    engine_distribution,
    reported_distribution,
    table_distribution,
)
from mutants.planting import Mutant

BLOCK = "outrider.verify.exact"
DISTRIBUTIONS = "outrider.core.sampling"
GROWING = "outrider.drafters.common.growth"
NOISE = "outrider.core.rng"
SHAPING = "outrider.core.logits"
SAMPLING = "outrider.core.sampling"
TABLE = "outrider.verify.rules"

MUTANTS = (
    Mutant(
        "bf16 draft, fp32 accept",
        GROWING,
        "self._sampler.draw_for(chain.params)(probs_V, chain.row.rng",
        "self._sampler.draw_for(chain.params)(probs_V.bfloat16(), chain.row.rng",
        reported_distribution,
    ),
    Mutant(
        "temperature x0.97",
        DISTRIBUTIONS,
        "max(params.temperature, MIN_TEMPERATURE)",
        "max(0.97 * params.temperature, MIN_TEMPERATURE)",
        engine_distribution,
    ),
    Mutant(
        "acceptance x1.02",
        BLOCK,
        "wanted / drawn if",
        "1.02 * wanted / drawn if",
        block_distribution,
    ),
    Mutant(
        "residual = p",
        SAMPLING,
        "(share * p_V.double() - proposal.double()).clamp_min(0)",
        "share * p_V.double()",
        block_distribution,
    ),
    Mutant(
        "residual = |p-q|",
        SAMPLING,
        "(share * p_V.double() - proposal.double()).clamp_min(0)",
        "(share * p_V.double() - proposal.double()).abs()",
        block_distribution,
    ),
    Mutant(
        "soft q treated as one-hot",
        BLOCK,
        "sampling.masses(q_NV, tokens)",
        "[1.0] * len(tokens)",
        block_distribution,
    ),
    Mutant(
        "one uniform used twice",
        BLOCK,
        "rng.coin(chance, length - 1, Role.ACCEPT)",
        "rng.coin(chance, length - 1, Role.DRAFT)",
        check_no_number_is_used_twice,
    ),
    Mutant(
        "argmax draft with soft q",
        GROWING,
        "return self._sampler.draw_for(chain.params)(probs_V, chain.row.rng, node, node)",
        "return int(logits_V.argmax())",
        reported_distribution,
    ),
    Mutant(
        "typical acceptance sold as exact",
        TABLE,
        "return EXACT[sampler](sampling)",
        "return LossyRule(sampler, typical, 0.09, exact=True)",
        table_distribution,
    ),
    Mutant(
        "history off by one in penalties",
        SHAPING,
        "paths.append((*paths[parent + 1], token))",
        "paths.append(paths[parent + 1])",
        check_penalised_engine_distribution,
    ),
    Mutant(
        "q without its top-p",
        GROWING,
        "return self._sampler.draw_for(chain.params)(probs_V, chain.row.rng, node, node)",
        "token = self._sampler.draw_for(chain.params)(probs_V, chain.row.rng, node, node); "
        "probs_V.copy_(torch.softmax(logits_V / chain.params.temperature, -1)); return token",
        reported_distribution,
    ),
    Mutant(
        "bonus from the wrong row",
        BLOCK,
        "p_WV[len(tokens)], shares",
        "p_WV[len(tokens) - 1], shares",
        block_distribution,
    ),
    Mutant(
        "a draft cut after it was drawn",
        GROWING,
        "Draft.chain(chain.tokens, chain.probs_NV)",
        "Draft.chain(chain.tokens[: (n := sum(q[t] > 0.4 for t, q in zip(chain.tokens, "
        "chain.probs_NV)))], chain.probs_NV[:n] if n else None)",
        engine_distribution,
    ),
    Mutant(
        "keys without the round",
        NOISE,
        "counter = (node + 1, start, self.sample, int(role))",
        "counter = (node + 1, 0, self.sample, int(role))",
        check_no_number_is_used_twice,
    ),
)
