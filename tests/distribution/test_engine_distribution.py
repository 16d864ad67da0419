"""The distribution of whole generations: keys across rounds, residuals, bonuses and filters at
once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checks.engine_distribution import (
    FILTERS,
    LENGTH,
    VOCAB,
    check_drafting_distribution,
    check_engine_distribution,
    check_hybrid_engine_distribution,
    check_penalised_engine_distribution,
    check_reported_distribution,
    distribution_drafters,
    engine_distribution,
    racing_drafter,
)
from checks.runs import rules_of_requests
from doubles.rig import Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule
from outrider.engine.round import StepwiseLM
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule

RULES = [TokenRule(), BlockRule(), MatchRule(), CoupledRule()]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
every_filter = pytest.mark.parametrize(
    "params", FILTERS, ids=["temperature", "top-k", "top-p", "min-p"]
)


# Rules keep their distribution whatever drafts (test_rules.py), so not every filter meets every
# drafter. Other combinations are `deep`.
@pytest.mark.covering(1)
@every_filter
@pytest.mark.parametrize("drafter", distribution_drafters())
def test_a_generation_follows_the_target(params: SamplingParams, drafter: str) -> None:
    """Under the default rule; trees and looked-up chains are the token rule's."""
    check_hybrid_engine_distribution(BlockRule(), distribution_drafters()[drafter](), params)


@every_rule
def test_under_every_rule(rule: AcceptanceRule) -> None:
    for drafter in ("model", "trees"):
        check_hybrid_engine_distribution(rule, distribution_drafters()[drafter](), FILTERS[1])


def test_a_request_may_have_a_rule_of_its_own() -> None:
    rules_of_requests()


@pytest.mark.parametrize("chosen", ["token", "block", "match"])
def test_under_a_rule_that_only_the_request_has(chosen: str) -> None:
    """The engine's drafter races, which none of these rules may be given."""
    params = replace(FILTERS[1], sampler=chosen)
    check_hybrid_engine_distribution(CoupledRule(), racing_drafter(), params)


@every_filter
def test_with_a_drafter_that_races_along(params: SamplingParams) -> None:
    check_hybrid_engine_distribution(CoupledRule(), racing_drafter(), params)


def test_with_penalties() -> None:
    check_penalised_engine_distribution()


@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("params", FILTERS[2:], ids=["top-p", "min-p"])
@pytest.mark.parametrize("drafter", distribution_drafters())
@pytest.mark.parametrize("rule", [TokenRule(), MatchRule()], ids=lambda rule: rule.name)
def test_under_the_other_rules_with_other_filters(
    rule: AcceptanceRule, drafter: str, params: SamplingParams
) -> None:
    check_hybrid_engine_distribution(rule, distribution_drafters()[drafter](), params)


@every_rule
def test_the_same_holds_on_paged_memory(rule: AcceptanceRule) -> None:
    target = TinyAttentionLM(vocab_size=VOCAB, page_size=2, num_slots=64)
    drafter = model_drafter(TinyAttentionLM(vocab_size=VOCAB, seed=7, page_size=2, num_slots=64))
    check_engine_distribution(
        Rig(target, drafter, rule, k=2, page_size=2), TinyAttentionLM, FILTERS[2]
    )


@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.4, max_tokens=2),
        SamplingParams(temperature=1.4, top_k=2, max_tokens=3),
    ],
    ids=["two tokens", "three of the likeliest"],
)
def test_the_same_holds_over_eight_tokens(rule: AcceptanceRule, params: SamplingParams) -> None:
    """A toy transformer on paged memory; all branches of drafts, verdicts and draws."""
    target = TinyAttentionLM(vocab_size=8, page_size=2, num_slots=64)
    drafter = model_drafter(TinyAttentionLM(vocab_size=8, seed=7, page_size=2, num_slots=64))
    check_engine_distribution(Rig(target, drafter, rule, k=2, page_size=2), TinyAttentionLM, params)


def test_the_same_holds_token_by_token() -> None:
    target = StepwiseLM(ToyHybrid(vocab_size=VOCAB))
    rig = Rig(target, model_drafter(ToyHybrid(vocab_size=VOCAB, seed=7)), k=2)
    check_engine_distribution(rig, ToyHybrid, FILTERS[3])


def test_the_walk_visits_rejections_and_acceptances() -> None:
    """The proof above is not empty: rounds of every length occur, and texts of every kind."""
    drafter = model_drafter(ToyHybrid(vocab_size=VOCAB, seed=7))
    rig = Rig(ToyHybrid(vocab_size=VOCAB), drafter, k=2)
    found = engine_distribution(rig, (0, 1), SamplingParams(temperature=2.0, max_tokens=LENGTH))
    assert len(found) == VOCAB**LENGTH
    assert sum(found.values()) == pytest.approx(1)


@every_filter
def test_a_sampling_drafter_reports_the_distribution_it_drew_from(params: SamplingParams) -> None:
    check_reported_distribution(lambda: model_drafter(ToyHybrid(vocab_size=VOCAB, seed=7)), params)


@every_filter
def test_the_drafters_distribution_is_its_models_processed_distribution(
    params: SamplingParams,
) -> None:
    check_drafting_distribution(params)
