"""Drafts of several members: the target's distribution, and greedy decoding's text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest

from checks.engine import check_greedy
from checks.merged import HEADS, LOOKUPS, MODELS, check_merged_distribution, merged_rig
from checks.state import VOCAB
from doubles.toy_hybrid import ToyHybrid
from outrider.core.protocols import AcceptanceRule
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule

RULES = (TokenRule(), BlockRule(), MatchRule(), CoupledRule())
PAIRS = (*combinations((*LOOKUPS, *MODELS), 2), tuple(HEADS))
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


@every_rule
@pytest.mark.parametrize("num_nodes", [0, 4])
def test_look_ups_that_are_merged_keep_the_distribution(
    rule: AcceptanceRule, num_nodes: int
) -> None:
    """Siblings that were chosen, not drawn, are merged at any temperature."""
    check_merged_distribution(LOOKUPS, rule, num_nodes)


# Each rule and each member that draws has its distribution. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("names", [("next", "model"), ("same", "heads")], ids="+".join)
@every_rule
def test_a_drawn_draft_beside_look_ups_keeps_the_distribution(
    names: Sequence[str], rule: AcceptanceRule
) -> None:
    check_merged_distribution(names, rule)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("model", "heads"), tuple(HEADS)], ids="+".join)
def test_two_members_that_draw_keep_the_distribution(names: Sequence[str]) -> None:
    check_merged_distribution(names, TokenRule())


@pytest.mark.parametrize("num_nodes", [0, 10])
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_greedy_text_of_every_pair_is_plain_decodings(names: Sequence[str], num_nodes: int) -> None:
    rig = merged_rig(names, TokenRule(), vocab_size=VOCAB, depth=4, num_nodes=num_nodes)
    prompts = [(1, 2, 3, 1, 2), (0, 0, 1), (3, 1)]
    check_greedy(rig, ToyHybrid, prompts, 30)
    drafted = {name for trace in rig.traces for name in trace.drafter.split("+")}
    assert {*names} <= drafted
