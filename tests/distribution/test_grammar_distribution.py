"""Under a grammar every rule and every drafter keep the distribution of plain decoding under its
masks."""

from __future__ import annotations

import pytest

from checks.engine_distribution import distribution_drafters, racing_drafter
from checks.grammar_distribution import (
    GRAMMARS,
    PARAMS,
    check_distribution,
    check_grammar_distribution,
)
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule

RULES = [TokenRule(), BlockRule(), MatchRule(), CoupledRule()]


def test_a_generation_follows_the_masked_target() -> None:
    check_grammar_distribution()


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("drafter", ["ngram", "chains"])
def test_whatever_drafts(drafter: str, name: str) -> None:
    check_distribution(BlockRule(), distribution_drafters()[drafter](), PARAMS[0], name)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("params", PARAMS, ids=["temperature", "top-p and penalty"])
@pytest.mark.parametrize("drafter", ["model", "trees"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_under_every_rule(
    rule: AcceptanceRule, drafter: str, params: SamplingParams, name: str
) -> None:
    check_distribution(rule, distribution_drafters()[drafter](), params, name)


def test_with_a_drafter_that_races_along() -> None:
    check_distribution(CoupledRule(), racing_drafter(), PARAMS[0], "as many")
