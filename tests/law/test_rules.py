"""Exact proof that every acceptance rule emits the target's law, by enumeration.

Vocabulary of three, integer weights (so ties, zeros, point masses and disjoint supports are common)
and the shipped rules' `__call__`; nothing is sampled and nothing is derived twice.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from checks.effort import examples
from checks.law import (
    CASES,
    TreeCase,
    Weights,
    chain,
    check_acceptance,
    check_greedy_walk,
    check_law_cases,
    check_tree_law,
    siblings,
)
from doubles.every_branch import EveryBranch
from outrider.core.draft import Draft
from outrider.core.laws import Laws
from outrider.core.noise import Role
from outrider.core.protocols import AcceptanceRule, JudgeRow
from outrider.verify.match import MatchRule
from outrider.verify.token import TokenRule

VOCAB = 3
RULES: list[AcceptanceRule] = [TokenRule(), MatchRule()]
SHAPES = [(-1, -1, 0, 0), (-1, 0, -1, 2), (-1, -1, 1, 0), (-1, -1, 0, 1), (-1, 0, 0), (-1, -1, 1)]

weights = st.tuples(*[st.integers(0, 8)] * VOCAB).filter(any)
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


@every_rule
def test_fixed_pairs(rule: AcceptanceRule) -> None:
    check_law_cases(rule)
    assert {len(case.parents) for case in CASES} == {1, 2, 3, 4}


@every_rule
@examples(60)
@given(p=weights, qs=st.lists(weights, max_size=3), distinct=st.booleans())
@example(p=(1, 0, 0), qs=[(0, 1, 0), (0, 0, 1)], distinct=False)
@example(p=(2, 2, 2), qs=[(2, 2, 2), (2, 2, 2)], distinct=True)
@example(p=(0, 1, 1), qs=[(0, 1, 1), (1, 0, 0), (0, 1, 1)], distinct=False)
@example(p=(8, 8, 1), qs=[(8, 1, 8), (1, 8, 8), (3, 0, 0)], distinct=True)
def test_first_token(rule: AcceptanceRule, p: Weights, qs: list[Weights], distinct: bool) -> None:
    """Any number of siblings drawn from any laws, independently or without replacement."""
    check_tree_law(rule, siblings(p, qs, distinct=distinct))


@every_rule
@examples(25)
@given(
    length=st.integers(1, 3),
    targets=st.lists(weights, min_size=4, max_size=4),
    proposals=st.lists(weights, min_size=3, max_size=3),
)
def test_chain(
    rule: AcceptanceRule, length: int, targets: list[Weights], proposals: list[Weights]
) -> None:
    """The joint law of a chain's tokens and the bonus after it."""
    check_tree_law(rule, chain(targets[: length + 1], proposals[:length]))


@every_rule
@examples(15)
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
    check_tree_law(rule, TreeCase(parents, targets, drawn_with, nodes, distinct))


def test_the_exact_rule_accepts_as_much_as_can_be() -> None:
    check_acceptance(TokenRule())


@every_rule
def test_greedy_laws_are_followed_without_randomness(rule: AcceptanceRule) -> None:
    check_greedy_walk(rule)


@every_rule
def test_rows_are_judged_one_by_one(rule: AcceptanceRule) -> None:
    rows = [
        JudgeRow(Draft.chain([token, 2]), Laws(tokens=(1, 2, 0)), EveryBranch()) for token in (1, 0)
    ]
    first, second = rule(rows)
    assert (first.path, first.next_token) == ((0, 1), 0)
    assert (second.path, second.next_token) == ((), 1)
    assert rule([]) == []


def test_the_enumerator_refuses_a_number_used_twice() -> None:
    noise = EveryBranch()
    assert noise.coin(0.5, 0, Role.ACCEPT) is False
    with pytest.raises(AssertionError, match="drawn twice"):
        noise.coin(0.5, 0, Role.ACCEPT)
    assert noise.at(7).coin(1.0, 0, Role.ACCEPT) is True
