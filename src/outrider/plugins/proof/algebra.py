"""Part one: a round's output follows the target's distribution, shown without sampling.

A round is run once for every combination of its random choices, through the shipped rule, and the
target continues each outcome to a fixed length. The joint distribution of those texts must be the
target's own. Leviathan, Kalman, Matias 2023 (arXiv 2211.17192), appendix A.1, proves this for the
token rule on paper; here the code is checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from torch import Tensor

from outrider.core.draft import Outcome
from outrider.core.protocols import VerifyRow
from outrider.plugins.proof.cases import FIXED, RuleCase, Text, generated
from outrider.plugins.proof.check import Check, Effort, Part
from outrider.plugins.proof.distributions import (
    Distribution,
    EveryBranch,
    Sampler,
    exact_samplers,
    runs,
)

# Sums of a few thousand products of float64 shares are off by far less.
TOLERANCE = 1e-9
# Errors by which a broken rule may fail, besides emitting a wrong distribution.
DEFECTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
_PORTION = 170


@dataclass(frozen=True, slots=True)
class RuleProof:
    """The result of enumerating one rule: the largest total variation, and its case.

    `defect` is the error that stopped the rule, None if there was none.
    """

    rule: str
    num_cases: int
    num_branches: int
    worst: float
    worst_case: str
    defect: str | None = None

    @property
    def holds(self) -> bool:
        return self.defect is None and self.num_cases > 0 and self.worst <= TOLERANCE

    @property
    def finding(self) -> str:
        """The worst result, in words."""
        if self.defect is not None:
            return f"{self.worst_case}: {self.defect}"
        return f"{self.worst_case}: total variation {self.worst:.1e}"


def algebra(effort: Effort, *, seed: int, own: str) -> Part:
    """Run every exact rule, and the user's `own`, on the fixed cases and on generated ones."""
    proofs: list[RuleProof] = []
    for sampler in exact_samplers(own):
        yield f"{sampler.name}: {len(FIXED)} fixed cases"
        proofs.append(prove_rule(sampler, FIXED))
        cases = generated(seed)
        for done in range(0, effort.num_generated, _PORTION):
            end = min(done + _PORTION, effort.num_generated)
            yield f"{sampler.name}: generated cases {done + 1} to {end}"
            proofs.append(prove_rule(sampler, islice(cases, end - done)))
    worst = max(proof.worst for proof in proofs)
    rules = list(dict.fromkeys(proof.rule for proof in proofs))
    num_cases = sum(proof.num_cases for proof in proofs)
    num_branches = sum(proof.num_branches for proof in proofs)
    check = Check(
        name="algebra",
        title="exact algebra",
        holds=all(proof.holds for proof in proofs),
        summary=f"{len(rules)} rules, {num_cases:,} cases, {num_branches:,} branches; "
        f"largest distance {worst:.1e}",
        facts={
            "rules": rules,
            "num_cases": num_cases,
            "num_branches": num_branches,
            "max_total_variation": worst,
            "tolerance": TOLERANCE,
        },
        problems=tuple(f"{p.rule}, {p.finding}" for p in proofs if not p.holds),
    )
    return (check,)


def prove_rule(sampler: Sampler, cases: Iterable[RuleCase]) -> RuleProof:
    """Enumerate `sampler` on `cases`."""
    num_cases = num_branches = 0
    worst, worst_case = 0.0, "none"
    for case in cases:
        num_cases += 1
        try:
            distance, branches = total_variation(sampler, case)
        except DEFECTS as error:
            defect = f"{type(error).__name__}: {error}"
            return RuleProof(sampler.name, num_cases, num_branches, 1.0, case.name, defect)
        num_branches += branches
        if not distance <= worst:
            worst, worst_case = distance, case.name
    return RuleProof(sampler.name, num_cases, num_branches, worst, worst_case)


def total_variation(sampler: Sampler, case: RuleCase) -> tuple[float, int]:
    """Return the total variation between what a round of `case` emits and the target's
    distribution, and the number of branches walked."""
    rows: dict[Text, VerifyRow] = {}
    known: dict[Text, Tensor] = {}

    def one_round(rng: EveryBranch) -> Text:
        draft = case.drawn(rng, sampler.draw, known)
        if draft.tokens not in rows:
            rows[draft.tokens] = case.row(draft, exact=sampler.rule.exact)
        row = replace(rows[draft.tokens], draft=draft, rng=rng)
        return Outcome(0, draft, sampler.rule([row])[0]).tokens

    found: Distribution = {}
    num_branches = 0
    for text, weight in runs(one_round):
        found[text] = found.get(text, 0.0) + weight
        num_branches += 1
    wanted = continued({(): 1.0}, case)
    got = continued(found, case)
    texts = got.keys() | wanted.keys()
    distance = sum(abs(got.get(text, 0.0) - wanted.get(text, 0.0)) for text in texts) / 2
    return distance, num_branches


def continued(found: Distribution, case: RuleCase) -> Distribution:
    """Return the distribution of texts of `found`, continued to the case's length."""
    result: Distribution = {}
    for text, weight in found.items():
        for whole, share in _endings(text, case):
            result[whole] = result.get(whole, 0.0) + weight * share
    return result


def _endings(text: Text, case: RuleCase) -> Iterable[tuple[Text, float]]:
    if len(text) >= case.length:
        yield text, 1.0
        return
    for token, share in enumerate(case.conditional(text)):
        if share > 0:
            for whole, rest in _endings((*text, token), case):
                yield whole, share * rest
