"""Bugs in the acceptance rules and in the law they judge by."""

from __future__ import annotations

from checks.laws import check_filter_cases
from checks.runs import acceptance, exact_law, greedy_walks, match_law
from mutants.planting import Mutant

EXACT = "outrider.verify.token"
MATCH = "outrider.verify.match"
LAWS = "outrider.core.laws"

MUTANTS = (
    Mutant("residual is p", EXACT, "(law - proposal).clamp_min(0)", "law.clone()", exact_law),
    Mutant(
        "residual is |p-q|",
        EXACT,
        "(law - proposal).clamp_min(0)",
        "(law - proposal).abs()",
        exact_law,
    ),
    Mutant(
        "residual of a certain proposal is p",
        EXACT,
        "left_V[proposal] = 0",
        "left_V[proposal] += 0",
        exact_law,
    ),
    Mutant(
        "residual forgotten between siblings",
        EXACT,
        "law = residual(law, proposal)",
        "residual(law, proposal)",
        exact_law,
    ),
    Mutant(
        "ratio inverted",
        EXACT,
        "mass(law, token) / drawn if",
        "drawn / max(mass(law, token), 1e-9) if",
        exact_law,
    ),
    Mutant(
        "acceptance times 1.02",
        EXACT,
        "mass(law, token) / drawn if",
        "1.02 * mass(law, token) / drawn if",
        exact_law,
    ),
    Mutant(
        "acceptance times 0.98",
        EXACT,
        "mass(law, token) / drawn if",
        "0.98 * mass(law, token) / drawn if",
        exact_law,
    ),
    Mutant(
        "typical acceptance",
        EXACT,
        "mass(law, token) / drawn if",
        "float(mass(law, token) > 0.2) if",
        exact_law,
    ),
    Mutant(
        "acceptance unchecked",
        EXACT,
        "if noise.coin(ratio, child, Role.ACCEPT)",
        "if ratio >= 0",
        exact_law,
    ),
    Mutant(
        "soft q taken for certain in the residual",
        EXACT,
        "law = residual(law, proposal)",
        "law = residual(law, token)",
        exact_law,
    ),
    Mutant(
        "soft q taken for certain, exact but slow",
        EXACT,
        "token if draft.probs_NV is None else draft.probs_NV[child]",
        "token",
        acceptance,
    ),
    Mutant(
        "law of the wrong node",
        EXACT,
        "law = row.laws.law(node + 1)",
        "law = row.laws.law(max(node, 0))",
        exact_law,
    ),
    Mutant(
        "number of the draft used again",
        EXACT,
        "noise.coin(ratio, child, Role.ACCEPT)",
        "noise.coin(ratio, child, Role.DRAFT)",
        exact_law,
    ),
    Mutant(
        "siblings share a number",
        EXACT,
        "noise.coin(ratio, child, Role.ACCEPT)",
        "noise.coin(ratio, node, Role.ACCEPT)",
        exact_law,
    ),
    Mutant(
        "greedy residual is not the law",
        EXACT,
        "    if isinstance(law, int):\n        return law",
        "    if isinstance(law, int):\n        return 0",
        greedy_walks,
    ),
    Mutant(
        "match draws all places alike", MATCH, "row.noise, len(path))", "row.noise, 0)", match_law
    ),
    Mutant(
        "match follows any child",
        MATCH,
        "if row.draft.tokens[c] == token)",
        "if row.draft.tokens[c] >= 0)",
        match_law,
    ),
    Mutant(
        "match reads the parent's law",
        MATCH,
        "row.laws.law(node + 1)",
        "row.laws.law(max(node, 0))",
        match_law,
    ),
    Mutant(
        "temperature times 0.97",
        LAWS,
        "max(params.temperature, _MIN_TEMPERATURE)",
        "max(0.97 * params.temperature, _MIN_TEMPERATURE)",
        check_filter_cases,
    ),
    Mutant(
        "top-p keeps one too many",
        LAWS,
        "before_NV < top_p",
        "before_NV <= top_p",
        check_filter_cases,
    ),
    Mutant(
        "top-k cuts ties", LAWS, "scaled_NV < edge_N1", "scaled_NV <= edge_N1", check_filter_cases
    ),
    Mutant(
        "min-p of all mass",
        LAWS,
        "params.min_p * probs_NV.amax(-1, keepdim=True)",
        "params.min_p * probs_NV.sum(-1, keepdim=True)",
        check_filter_cases,
    ),
    Mutant(
        "top-p not renormalised",
        LAWS,
        "return _renormalised(probs_NV.masked_fill(~mask_NV, 0))",
        "return probs_NV.masked_fill(~mask_NV, 0)",
        check_filter_cases,
    ),
)
