"""Bugs in the acceptance rules and in the law they judge by."""

from __future__ import annotations

from checks.batched import check_batched_block, check_batched_token
from checks.law import check_filter_cases
from checks.noise import check_each_emitted_token_has_its_own_race
from checks.runs import (
    acceptance,
    block_acceptance,
    block_law,
    coupled_law,
    exact_law,
    greedy_walks,
    match_law,
)
from mutants.planting import Mutant

EXACT = "outrider.verify.exact"
BLOCK = "outrider.verify.exact"
MATCH = "outrider.verify.match"
COUPLED = "outrider.verify.match"
BATCHED = "outrider.verify.batched"
SAMPLING = "outrider.core.sampling"

MUTANTS = (
    Mutant(
        "residual is p",
        SAMPLING,
        "(share * p_V.double() - proposal.double()).clamp_min(0)",
        "share * p_V.double()",
        exact_law,
    ),
    Mutant(
        "residual is |p-q|",
        SAMPLING,
        "(share * p_V.double() - proposal.double()).clamp_min(0)",
        "(share * p_V.double() - proposal.double()).abs()",
        exact_law,
    ),
    Mutant(
        "residual of a certain proposal is p",
        SAMPLING,
        "left_V[proposal] = 0",
        "left_V[proposal] += 0",
        exact_law,
    ),
    Mutant(
        "residual forgotten between siblings",
        EXACT,
        "law = residual(law, proposal, leftover)",
        "residual(law, proposal, leftover)",
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
        "law = residual(law, proposal, leftover)",
        "law = residual(law, token, leftover)",
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
        "coupled draws all places alike",
        COUPLED,
        "noise.race_at(law, depth)",
        "noise.race_at(law, 0)",
        coupled_law,
    ),
    Mutant(
        "coupled draws anew in each round",
        COUPLED,
        "noise.race_at(law, depth)",
        "noise.pick(law, depth, 2)",
        check_each_emitted_token_has_its_own_race,
    ),
    Mutant(
        "block: share above one",
        BLOCK,
        "min(1.0, shares[-1] * ratio)",
        "shares[-1] * ratio",
        block_law,
    ),
    Mutant(
        "block: no token makes up for another",
        BLOCK,
        "min(1.0, shares[-1] * ratio)",
        "shares[-1] * min(1.0, ratio)",
        block_law,
    ),
    Mutant(
        "block: shortest beginning first",
        BLOCK,
        "range(len(tokens), 0, -1)",
        "range(1, len(tokens) + 1)",
        block_law,
    ),
    Mutant(
        "block: leftover of all of p",
        BLOCK,
        "leftover(p_V, q_V, share)",
        "leftover(p_V, q_V)",
        block_law,
    ),
    Mutant(
        "block: coin forgets what was refused",
        BLOCK,
        "left / (left + 1 - share)",
        "left / max(left, share)",
        block_law,
    ),
    Mutant(
        "block: leftover with the share after it",
        BLOCK,
        "_refused(shares[length - 1], p",
        "_refused(shares[length], p",
        block_law,
    ),
    Mutant(
        "block: law of the wrong place",
        BLOCK,
        "p_WV[length - 1], q_NV",
        "p_WV[length], q_NV",
        block_law,
    ),
    Mutant(
        "block: nothing left keeps all",
        BLOCK,
        "float(share == 1)",
        "1.0",
        block_law,
    ),
    Mutant(
        "block: coins share a number",
        BLOCK,
        "noise.coin(chance, length - 1, Role.ACCEPT)",
        "noise.coin(chance, 0, Role.ACCEPT)",
        block_law,
    ),
    Mutant(
        "block: trees judged as chains",
        BLOCK,
        "draft.max_depth < len(draft)",
        "draft.max_depth < 0",
        block_law,
    ),
    Mutant(
        "block: the token rule, exact but slow",
        BLOCK,
        "draft.max_depth < len(draft)",
        "draft.max_depth > 0",
        block_acceptance,
    ),
    Mutant(
        "batched: accepted after a refusal",
        BATCHED,
        "accepted_BK.cumprod(-1).sum(-1)",
        "accepted_BK.sum(-1)",
        check_batched_token,
    ),
    Mutant(
        "batched: tokens behind a chain's end count",
        BATCHED,
        "(position_BK <= depth_B[:, None])",
        "(position_BK > 0)",
        check_batched_token,
    ),
    Mutant(
        "batched: the block rule's last coin is that of the longest chain",
        BATCHED,
        "torch.where(depth_B > length, inner_B, chance_B)",
        "inner_B",
        check_batched_block,
    ),
    Mutant(
        "batched: residual is |p-q|",
        BATCHED,
        "(p_BV - q_BV).clamp_min(0)",
        "(p_BV - q_BV).abs()",
        check_batched_token,
    ),
    Mutant(
        "batched: next token by the root's number",
        BATCHED,
        "numbers.next_BW.gather(-1, kept_B[:, None])",
        "numbers.next_BW.gather(-1, 0 * kept_B[:, None])",
        check_batched_token,
    ),
    Mutant(
        "batched: block share above one",
        BATCHED,
        "(shares[-1] * ratio_B).clamp_max(1)",
        "(shares[-1] * ratio_B).clamp_max(9)",
        check_batched_block,
    ),
    Mutant(
        "batched: block keeps the shortest",
        BATCHED,
        "torch.where(heads_B, length, kept_B)",
        "torch.where(heads_B & (kept_B == 0), length, kept_B)",
        check_batched_block,
    ),
    Mutant(
        "top-p keeps one too many",
        SAMPLING,
        "before_NV < top_p",
        "before_NV <= top_p",
        check_filter_cases,
    ),
    Mutant(
        "top-k cuts ties",
        SAMPLING,
        "logits_NV < edge_N1",
        "logits_NV <= edge_N1",
        check_filter_cases,
    ),
    Mutant(
        "min-p of all mass",
        SAMPLING,
        "min_p * probs_NV.amax(-1, keepdim=True)",
        "min_p * probs_NV.sum(-1, keepdim=True)",
        check_filter_cases,
    ),
    Mutant(
        "top-p not renormalised",
        SAMPLING,
        "return _renormalised(probs_NV.masked_fill(~mask_NV, 0))",
        "return probs_NV.masked_fill(~mask_NV, 0)",
        check_filter_cases,
    ),
)
