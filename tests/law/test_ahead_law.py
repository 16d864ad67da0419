"""The law of a text that was drafted ahead: cached branches, misses and changed laws, enumerated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checks.ahead import (
    ONE_EACH,
    check_ahead_is_exact,
    check_law_ahead,
    check_saguaro_is_exact,
    law_ahead,
)
from checks.engine_law import FILTERS, PROMPT, target_law
from checks.law import assert_same_law
from doubles.ahead import Ways
from doubles.toy_hybrid import ToyHybrid
from outrider.core.params import SamplingParams
from outrider.drafters.ahead.saguaro import Saguaro
from outrider.verify.block import BlockRule
from outrider.verify.token import TokenRule

TOP_K = FILTERS[1]
TWO_DEEP = Ways(k=2, batch=1, fan_out=3, policy="uniform")


@pytest.mark.slow
def test_a_cached_branch_keeps_the_law() -> None:
    check_ahead_is_exact()


@pytest.mark.slow
@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=lambda rule: rule.name)
def test_so_do_branches_of_two_nodes(rule: TokenRule | BlockRule) -> None:
    check_law_ahead(TOP_K, replace(TWO_DEEP, fan_out=2), rule)


@pytest.mark.slow
def test_so_do_verdicts_of_one_length_that_share_their_numbers() -> None:
    check_law_ahead(TOP_K, TWO_DEEP, TokenRule())


@pytest.mark.slow
@pytest.mark.parametrize("params", FILTERS[1:], ids=["top-k", "top-p", "min-p"])
@pytest.mark.parametrize("fallback", ["ngram", "none"])
def test_with_fallbacks_that_draw_nothing(params: SamplingParams, fallback: str) -> None:
    """Copies of the text are point masses: accepted with the target's own probability."""
    ways = replace(ONE_EACH, fallback=fallback)
    check_law_ahead(params, ways, TokenRule(), ahead=lambda index: True)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_with_forced_hits(share: float) -> None:
    check_law_ahead(FILTERS[2], replace(ONE_EACH, force_hits=share), TokenRule())


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_with_saguaro_sampling(weight: float) -> None:
    check_saguaro_is_exact(weight)


@pytest.mark.slow
def test_what_saguaro_changes_is_only_what_is_kept() -> None:
    """Its drafts are others, and yet the text has the same law."""
    plain, _ = law_ahead(TOP_K, ONE_EACH, TokenRule())
    changed, _ = law_ahead(TOP_K, ONE_EACH, TokenRule(), change=Saguaro(0.0, [1]))
    wanted = target_law(ToyHybrid, PROMPT, TOP_K)
    assert_same_law(plain, wanted)
    assert_same_law(changed, wanted)


@pytest.mark.slow
def test_a_refused_token_may_be_foreseen_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which verdicts are foreseen is a matter of time, not of law."""
    monkeypatch.setattr("outrider.drafters.ahead.fork.masked_places", lambda draft: [])
    check_law_ahead(FILTERS[3], replace(ONE_EACH, fan_out=4), TokenRule())
