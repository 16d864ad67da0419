"""The bugs that a certificate plants: each is one line of shipped source, changed."""

from __future__ import annotations

from outrider.proof.planting import Mutant

_TOKEN = "outrider.verify.exact"
_BLOCK = "outrider.verify.exact"
_MATCH = "outrider.verify.match"
_COUPLED = "outrider.verify.match"
_LAWS = "outrider.core.sampling"
_NOISE = "outrider.core.rng"
_SAMPLING = "outrider.core.sampling"
_SHAPING = "outrider.core.logits"
_SETTLE = "outrider.engine.round"
_STAGES = "outrider.engine.stages"

# What a round decides, and the laws that it decides by.
DECISIONS = (
    Mutant(
        "token: residual is p",
        _TOKEN,
        "law = residual(law, proposal, leftover)",
        "residual(law, proposal, leftover)",
    ),
    Mutant(
        "token: a refused point mass stays",
        _SAMPLING,
        "left_V[proposal] = 0",
        "left_V[proposal] += 0",
    ),
    Mutant(
        "token: acceptance times 1.02",
        _TOKEN,
        "mass(law, token) / drawn if",
        "1.02 * mass(law, token) / drawn if",
    ),
    Mutant(
        "token: soft q taken for one-hot",
        _TOKEN,
        "law = residual(law, proposal, leftover)",
        "law = residual(law, token, leftover)",
    ),
    Mutant(
        "token: the draft's number used again",
        _TOKEN,
        "noise.coin(ratio, child, Role.ACCEPT)",
        "noise.coin(ratio, child, Role.DRAFT)",
    ),
    Mutant(
        "token: bonus from the wrong row",
        _TOKEN,
        "law = row.laws.law(node + 1)",
        "law = row.laws.law(max(node, 0))",
    ),
    Mutant(
        "residual is p",
        _SAMPLING,
        "(share * p_V.double() - proposal.double()).clamp_min(0)",
        "share * p_V.double()",
    ),
    Mutant(
        "residual is |p - q|",
        _SAMPLING,
        "(share * p_V.double() - proposal.double()).clamp_min(0)",
        "(share * p_V.double() - proposal.double()).abs()",
    ),
    Mutant(
        "block: acceptance times 1.02",
        _BLOCK,
        "wanted / drawn if",
        "1.02 * wanted / drawn if",
    ),
    Mutant(
        "block: bonus from the wrong row",
        _BLOCK,
        "p_WV[len(tokens)], shares[-1]",
        "p_WV[len(tokens) - 1], shares[-1]",
    ),
    Mutant(
        "match: a draft kept unlooked-at",
        _MATCH,
        "if row.draft.tokens[c] == token)",
        "if row.draft.tokens[c] >= 0)",
    ),
    Mutant(
        "coupled: one race for all places",
        _COUPLED,
        "noise.race_at(law, depth)",
        "noise.race_at(law, 0)",
    ),
    Mutant(
        "temperature times 0.97",
        _LAWS,
        "max(params.temperature, MIN_TEMPERATURE)",
        "max(0.97 * params.temperature, MIN_TEMPERATURE)",
    ),
    Mutant(
        "penalties one token late",
        _SHAPING,
        "paths.append((*paths[parent + 1], token))",
        "paths.append(paths[parent + 1])",
    ),
)

# How numbers are keyed, which enumeration does not see.
KEYS = (
    Mutant(
        "keys without the round",
        _NOISE,
        "counter = (node + 1, start, self.sample, int(role))",
        "counter = (node + 1, 0, self.sample, int(role))",
    ),
    Mutant(
        "keys without the node",
        _NOISE,
        "counter = (node + 1, start, self.sample, int(role))",
        "counter = (0, start, self.sample, int(role))",
    ),
)

# What the engine does around it.
ROUNDS = (
    Mutant(
        "a refused draft kept in memory",
        _SETTLE,
        "_kept(one.num_fed, one.outcome)",
        "range(one.num_fed + len(one.outcome.draft))",
    ),
    Mutant(
        "drafts hung from the wrong row",
        _STAGES,
        "(root + 1 + parent for",
        "(max(root, parent) for",
    ),
)
