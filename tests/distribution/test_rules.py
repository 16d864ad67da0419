"""Exact proof that every acceptance rule emits the target's distribution, by enumeration.

Vocabulary of three, integer weights (so ties, zeros, point masses and disjoint supports are common)
and the shipped rules' `__call__`; nothing is sampled and nothing is derived twice.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from checks.distribution import (
    CASES,
    TreeCase,
    Weights,
    accepted_distribution,
    best_acceptance,
    chain,
    check_acceptance,
    check_distribution_cases,
    check_greedy_walk,
    check_tree_distribution,
    normal,
    num_accepted,
    siblings,
)
from checks.effort import examples
from doubles.every_branch import EveryBranch, Tokens, distribution
from outrider.core.draft import Draft
from outrider.core.protocols import AcceptanceRule, VerifyRow
from outrider.core.rng import Role
from outrider.core.sampling import Distributions
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule

VOCAB = 3
TIGHT = 1e-12
RULES = [TokenRule(), BlockRule(), MatchRule(), CoupledRule()]
SHAPES = [(-1, -1, 0, 0), (-1, 0, -1, 2), (-1, -1, 1, 0), (-1, -1, 0, 1), (-1, 0, 0), (-1, -1, 1)]

weights = st.tuples(*[st.integers(0, 8)] * VOCAB).filter(any)
weights4 = st.tuples(*[st.sampled_from([0, 0, 1, 1, 2, 3, 8])] * 4).filter(any)
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
# Races are dear to enumerate; their trees are in test_coupled.py.
all_but_races = pytest.mark.parametrize("rule", RULES[:-1], ids=lambda rule: rule.name)


@every_rule
def test_fixed_pairs(rule: AcceptanceRule) -> None:
    check_distribution_cases(rule)
    assert {len(case.parents) for case in CASES} == {1, 2, 3, 4}


@every_rule
@examples(25)
@given(p=weights, qs=st.lists(weights, max_size=3), distinct=st.booleans())
@example(p=(1, 0, 0), qs=[(0, 1, 0), (0, 0, 1)], distinct=False)
@example(p=(2, 2, 2), qs=[(2, 2, 2), (2, 2, 2)], distinct=True)
@example(p=(0, 1, 1), qs=[(0, 1, 1), (1, 0, 0), (0, 1, 1)], distinct=False)
@example(p=(8, 8, 1), qs=[(8, 1, 8), (1, 8, 8), (3, 0, 0)], distinct=True)
def test_first_token(rule: AcceptanceRule, p: Weights, qs: list[Weights], distinct: bool) -> None:
    """Any number of siblings drawn from any distributions, independently or without replacement."""
    check_tree_distribution(rule, siblings(p, qs, distinct=distinct))


@every_rule
@examples(15)
@given(
    length=st.integers(1, 3),
    targets=st.lists(weights, min_size=4, max_size=4),
    proposals=st.lists(weights, min_size=3, max_size=3),
)
def test_chain(
    rule: AcceptanceRule, length: int, targets: list[Weights], proposals: list[Weights]
) -> None:
    """The joint distribution of a chain's tokens and the bonus after it."""
    check_tree_distribution(rule, chain(targets[: length + 1], proposals[:length]))


@pytest.mark.slow
@every_rule
def test_chains_over_four_tokens(rule: AcceptanceRule) -> None:
    """Three drafts: zeros on either side, a point mass, disjoint supports and a tie."""
    targets = [(3, 0, 2, 1), (0, 5, 1, 1), (2, 2, 2, 2), (1, 0, 0, 6)]
    for proposals in ([(1, 1, 0, 4), (2, 1, 2, 1), (1, 0, 3, 1)], [(0, 1, 0, 0), (3, 0, 1, 0)]):
        check_tree_distribution(rule, chain(targets[: len(proposals) + 1], proposals))


@all_but_races
@examples(8)
@given(
    parents=st.sampled_from(SHAPES),
    targets=st.tuples(weights, weights, weights),
    proposals=st.lists(weights, min_size=4, max_size=4),
    certain=st.frozensets(st.integers(0, 3)),
    distinct=st.booleans(),
)
def test_tree(
    rule: AcceptanceRule,
    parents: tuple[int, ...],
    targets: tuple[Weights, Weights, Weights],
    proposals: list[Weights],
    certain: frozenset[int],
    distinct: bool,
) -> None:
    """Trees of depth two with siblings, some drawn and some certain, or all certain."""
    nodes = frozenset(node for node in certain if node < len(parents))
    drawn_with = tuple(proposals[: len(parents)])
    check_tree_distribution(rule, TreeCase(parents, targets, drawn_with, nodes, distinct))


@pytest.mark.slow
@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=lambda rule: rule.name)
@examples(300)
@given(p=weights4, q=weights4)
@example(p=(1, 1, 0, 0), q=(0, 0, 1, 1))
@example(p=(0, 0, 0, 8), q=(1, 1, 1, 1))
@example(p=(1, 1, 1, 1), q=(0, 0, 8, 0))
@example(p=(2, 3, 2, 3), q=(2, 3, 2, 3))
def test_accepted_and_residual_mass_make_up_the_target(
    rule: AcceptanceRule, p: Weights, q: Weights
) -> None:
    """q(x) accept(x) + residual(x) = p(x) to 1e-12, for single drafts over four tokens."""
    check_tree_distribution(rule, siblings(p, [q]), TIGHT)


@examples(40)
@given(
    length=st.integers(1, 3),
    certain=st.frozensets(st.integers(0, 2)),
    targets=st.lists(weights, min_size=4, max_size=4),
    proposals=st.lists(weights, min_size=3, max_size=3),
)
def test_the_block_rule_accepts_as_much_as_can_be(
    length: int, certain: frozenset[int], targets: list[Weights], proposals: list[Weights]
) -> None:
    """Never less than the token rule, for chains that are drawn, certain or partly both."""
    nodes = frozenset(node for node in certain if node < length)
    case = replace(chain(targets[: length + 1], proposals[:length]), certain=nodes)
    kept = num_accepted(BlockRule(), case)
    assert kept >= num_accepted(TokenRule(), case) - TIGHT
    assert kept == pytest.approx(best_acceptance(case), abs=1e-9)


@pytest.mark.parametrize(("rule", "wanted"), [(TokenRule(), 10 / 9), (BlockRule(), 11 / 9)])
def test_the_block_rule_accepts_more_where_one_token_makes_up_for_another(
    rule: AcceptanceRule, wanted: float
) -> None:
    """The worked example of Sun et al. 2024, section 3: the same two distributions at both
    places."""
    p_V, q_V = normal((1, 2)), normal((2, 1))
    q_NV, distributions = q_V.repeat(2, 1), Distributions(probs_NV=p_V.repeat(3, 1))

    def accepted(rng: EveryBranch) -> Tokens:
        tokens = [rng.pick(q_V, node, Role.DRAFT) for node in (0, 1)]
        return (len(rule([VerifyRow(Draft.chain(tokens, q_NV), distributions, rng)])[0].path),)

    found = distribution(accepted)
    assert sum(count * share for (count,), share in found.items()) == pytest.approx(wanted)


@every_rule
def test_chains_of_certain_tokens_are_kept_alike(rule: AcceptanceRule) -> None:
    """With a point mass for q every exact rule keeps n tokens as often as the target writes them,
    so the block rule leaves them to the token rule's walk."""
    certain = frozenset({0, 1, 2})
    case = replace(CASES[6], certain=certain)
    assert accepted_distribution(rule, case) == pytest.approx(
        accepted_distribution(TokenRule(), case)
    )


def test_the_token_and_block_rules_accept_single_drafts_as_much_as_can_be() -> None:
    check_acceptance(TokenRule())
    check_acceptance(BlockRule())


@every_rule
def test_greedy_distributions_are_followed_without_randomness(rule: AcceptanceRule) -> None:
    check_greedy_walk(rule)


@every_rule
def test_rows_are_judged_one_by_one(rule: AcceptanceRule) -> None:
    rows = [
        VerifyRow(Draft.chain([token, 2]), Distributions(tokens=(1, 2, 0)), EveryBranch())
        for token in (1, 0)
    ]
    first, second = rule(rows)
    assert (first.path, first.next_token) == ((0, 1), 0)
    assert (second.path, second.next_token) == ((), 1)
    assert rule([]) == []


def test_the_enumerator_refuses_a_number_used_twice() -> None:
    rng = EveryBranch()
    assert rng.coin(0.5, 0, Role.ACCEPT) is False
    with pytest.raises(AssertionError, match="drawn twice"):
        rng.coin(0.5, 0, Role.ACCEPT)
    assert rng.at(7).coin(1.0, 0, Role.ACCEPT) is True
