"""The algebra accepts what is shipped and finds what is wrong, and wrong in which way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import pytest

from outrider.core.config import EXACT_SAMPLERS
from outrider.core.draft import Verdict
from outrider.core.params import SamplingParams
from outrider.core.protocols import VerifyRow
from outrider.core.rng import pick_node
from outrider.core.sampling import draw
from outrider.core.tree import ROOT
from outrider.plugins.proof.algebra import TOLERANCE, prove_rule, total_variation
from outrider.plugins.proof.cases import FIXED, chain, generated
from outrider.plugins.proof.check import Effort
from outrider.plugins.proof.distributions import Sampler, exact_samplers, plain_distribution
from outrider.verify.rules import rule_for

every_sampler = pytest.mark.parametrize("sampler", exact_samplers(), ids=lambda s: s.name)


def test_every_exact_sampler_is_proved() -> None:
    assert [sampler.name for sampler in exact_samplers()] == list(EXACT_SAMPLERS)
    assert all(sampler.rule.exact for sampler in exact_samplers())


@every_sampler
def test_the_shipped_rules_hold(sampler: Sampler) -> None:
    proof = prove_rule(sampler, [*FIXED, *islice(generated(1), 40)])
    assert proof.holds
    assert proof.num_cases == len(FIXED) + 40
    assert proof.num_branches > 1000
    assert proof.worst < 1e-14


@dataclass(frozen=True, slots=True)
class Wrong:
    """A rule of our own making, which claims to be exact."""

    judge: Callable[[VerifyRow], Verdict]
    name: str = "wrong"
    exact: bool = True

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return [self.judge(row) for row in rows]


def accept_all(row: VerifyRow) -> Verdict:
    path = tuple(range(len(row.draft)))
    return Verdict(path, draw(row.distributions.at(len(path)), row.rng, len(path) - 1))


def accept_none(row: VerifyRow) -> Verdict:
    return Verdict((), draw(row.distributions.at(0), row.rng, ROOT))


def fall_over(row: VerifyRow) -> Verdict:
    raise IndexError(f"no row {len(row.draft)}")


CHAIN = chain("chain", [(5, 3, 2), (1, 1, 2)], [(2, 3, 5)])


def proof_of(judge: Callable[[VerifyRow], Verdict]) -> tuple[bool, str]:
    proof = prove_rule(Sampler("wrong", Wrong(judge), pick_node), [CHAIN])
    return proof.holds, proof.finding


def test_a_rule_that_accepts_all_emits_the_drafters_distribution() -> None:
    """Its distance from the target's distribution is that of the two distributions: 0.3."""
    holds, finding = proof_of(accept_all)
    assert not holds
    assert finding == "chain: total variation 3.0e-01"


def test_a_rule_that_accepts_nothing_is_exact() -> None:
    assert proof_of(accept_none)[0]


def misspelt(row: VerifyRow) -> Verdict:
    raise AttributeError(f"no verdict of {len(row.draft)}")


def test_a_rule_that_falls_over_is_a_finding() -> None:
    assert proof_of(fall_over) == (False, "chain: IndexError: no row 1")
    assert "AttributeError" in proof_of(misspelt)[1]


def test_a_lossy_rule_is_found() -> None:
    lossy = Sampler("typical", rule_for("typical"), pick_node)
    assert total_variation(lossy, CHAIN)[0] > 100 * TOLERANCE


def test_no_cases_prove_nothing() -> None:
    assert not prove_rule(exact_samplers()[0], []).holds


def test_generated_cases_are_the_same_again_and_not_with_another_seed() -> None:
    first, again, other = (list(islice(generated(seed), 60)) for seed in (4, 4, 5))
    assert first == again != other
    assert {len(case.parents) for case in first} >= {1, 2, 3}
    assert any(not case.is_chain for case in first)
    assert any(0 in weights for case in first for weights in case.target)


def test_the_plain_distribution_by_hand() -> None:
    logits = [0.0, 1.0, 1.0, float("-inf")]
    assert plain_distribution(logits, SamplingParams()) == [0, 1, 0, 0]
    sampled = SamplingParams(temperature=1.0, top_k=1)
    assert plain_distribution(logits, sampled) == [0, 0.5, 0.5, 0]
    banned = plain_distribution(logits, sampled, text=(3, 0), bad_words=((0, 1), (9, 2)))
    assert banned == [0, 0, 1, 0]
    biased = SamplingParams(temperature=1.0, logit_bias={0: 1.0}, presence_penalty=1.0, min_p=0.9)
    assert plain_distribution(logits, biased, text=(1,)) == pytest.approx([0.5, 0, 0.5, 0])


def test_more_effort_is_more() -> None:
    assert Effort().num_texts >= 10_000
