"""The distribution of a text that was drafted ahead: cached branches, misses, changed
distributions, enumerated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checks.ahead import (
    ONE_EACH,
    check_ahead_is_exact,
    check_distribution_ahead,
    check_saguaro_is_exact,
    distribution_ahead,
    no_places,
)
from checks.distribution import assert_same_distribution
from checks.engine_distribution import FILTERS, PROMPT, target_distribution
from doubles.toy_hybrid import ToyHybrid
from outrider.plugins.lanes.ahead.forecast import Saguaro
from outrider.verify.exact import BlockRule, TokenRule

TOP_K = FILTERS[1]


@pytest.mark.slow
def test_a_cached_branch_keeps_the_distribution() -> None:
    check_ahead_is_exact()


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [TokenRule(), pytest.param(BlockRule(), marks=pytest.mark.deep)],
    ids=lambda rule: rule.name,
)
def test_so_do_branches_of_two_nodes(rule: TokenRule | BlockRule) -> None:
    assert True in check_distribution_ahead(TOP_K, replace(ONE_EACH, k=2), rule)


@pytest.mark.slow
def test_so_do_verdicts_of_one_length_that_share_their_numbers() -> None:
    for params in (FILTERS[1], FILTERS[3]):
        assert True in check_distribution_ahead(params, replace(ONE_EACH, fan_out=4), TokenRule())


@pytest.mark.slow
@pytest.mark.parametrize("fallback", ["ngram", "none"])
def test_with_fallbacks_that_draw_nothing(fallback: str) -> None:
    """Copies of the text are point masses: accepted with the target's own probability."""
    seen: set[bool | None] = set()
    for params in FILTERS[1:]:
        for fan_out in (2, 4):
            ways = replace(ONE_EACH, fallback=fallback, fan_out=fan_out)
            seen |= check_distribution_ahead(params, ways, TokenRule())
    assert seen == {None, True, False}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_with_forced_hits(share: float) -> None:
    check_distribution_ahead(FILTERS[2], replace(ONE_EACH, force_hits=share), TokenRule())


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, pytest.param(0.3, marks=pytest.mark.deep)])
def test_with_saguaro_sampling(weight: float) -> None:
    check_saguaro_is_exact(weight)


@pytest.mark.slow
def test_what_saguaro_changes_is_only_what_is_kept() -> None:
    """Its drafts are others, and yet the text has the same distribution."""
    plain, _ = distribution_ahead(TOP_K, ONE_EACH, TokenRule())
    changed, _ = distribution_ahead(TOP_K, ONE_EACH, TokenRule(), change=Saguaro(0.0, [1]))
    wanted = target_distribution(ToyHybrid, PROMPT, TOP_K)
    assert_same_distribution(plain, wanted)
    assert_same_distribution(changed, wanted)


@pytest.mark.slow
def test_a_refused_token_may_be_foreseen_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which verdicts are foreseen is a matter of time, not of distribution."""
    monkeypatch.setattr("outrider.plugins.lanes.ahead.table.masked_positions", no_places)
    check_distribution_ahead(FILTERS[3], ONE_EACH, TokenRule())
