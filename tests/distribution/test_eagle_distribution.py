"""The distribution of whole generations that were drafted from hidden states, chains and trees."""

from __future__ import annotations

import pytest

from checks.distribution import assert_same_distribution
from checks.engine_distribution import (
    FILTERS,
    PROMPT,
    VOCAB,
    engine_distribution,
    target_distribution,
)
from doubles.rig import Rig, first_maximum
from doubles.toy_heads import ToyNet, WithHidden
from doubles.toy_hybrid import ToyHybrid
from outrider.control.heuristics import FixedController
from outrider.core.draft import Budget
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule
from outrider.core.rng import pick_node, race_node
from outrider.drafters.common.growth import DraftSampler
from outrider.plugins.heads.hidden import HeadLimits, HiddenDrafter
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule

LIMITS = HeadLimits(chunk=2, reach=3, window=1000, first=1)
# MTP blocks read a text from its first token.
FROM_THE_FIRST = HeadLimits(chunk=2, reach=4, window=1000)


def check_distribution(
    rule: AcceptanceRule,
    params: SamplingParams,
    *,
    num_nodes: int,
    limits: HeadLimits = LIMITS,
) -> None:
    draw = race_node if isinstance(rule, CoupledRule) else pick_node
    sampler = DraftSampler(first_maximum, "the heads", draw, branches=bool(num_nodes))
    net = ToyNet(vocab_size=VOCAB, num_slots=256)
    rig = Rig(
        WithHidden(ToyHybrid(vocab_size=VOCAB, seed=0)),
        HiddenDrafter("eagle", [net], sampler, limits),
        rule,
        chunk=3,
        controller=FixedController(Budget(2, num_nodes=num_nodes)),
    )
    wanted = target_distribution(ToyHybrid, PROMPT, params)
    assert_same_distribution(engine_distribution(rig, PROMPT, params), wanted)
    assert max(trace.num_drafted for trace in rig.traces) > 0


# Filters come before drafters; chains and trees, and each filter, have their distribution. Other
# combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("num_nodes", [0, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("params", FILTERS, ids=["temperature", "top-k", "top-p", "min-p"])
def test_a_generation_follows_the_target(params: SamplingParams, num_nodes: int) -> None:
    check_distribution(BlockRule(), params, num_nodes=num_nodes)


@pytest.mark.parametrize("num_nodes", [0, 3], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "rule", [TokenRule(), MatchRule(), CoupledRule()], ids=lambda rule: rule.name
)
def test_under_every_rule(rule: AcceptanceRule, num_nodes: int) -> None:
    check_distribution(rule, FILTERS[1], num_nodes=num_nodes)


@pytest.mark.parametrize("rule", [BlockRule(), TokenRule()], ids=lambda rule: rule.name)
def test_trees_of_a_block_that_reads_a_text_from_its_first_token(rule: AcceptanceRule) -> None:
    check_distribution(rule, FILTERS[1], num_nodes=3, limits=FROM_THE_FIRST)
