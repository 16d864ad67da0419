"""Blocks that read hidden states keep the target's distribution: whole generations, enumerated."""

from __future__ import annotations

import pytest

from checks.distribution import assert_same_distribution
from checks.engine_distribution import PROMPT, VOCAB, engine_distribution, target_distribution
from doubles.rig import Rig, first_maximum
from doubles.toy_heads import ToyNet, WithHidden
from doubles.toy_hybrid import ToyHybrid
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule
from outrider.core.rng import draw_for
from outrider.drafters.common.growth import DraftSampler
from outrider.plugins.heads.hidden import HeadLimits, HiddenDrafter
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule

BY_SEED = ("match", "coupled")
# A first round reads the prompt; the second one drafts two tokens.
FOUR = SamplingParams(temperature=1.3, top_k=2, max_tokens=4)
RULES: dict[str, AcceptanceRule] = {
    "block": BlockRule(),
    "token": TokenRule(),
    "match": MatchRule(),
    "coupled": CoupledRule(),
}


# Rules at both depths are enumerated in test_rules.py. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "rule", ["block", "token", *(pytest.param(rule, marks=pytest.mark.slow) for rule in BY_SEED)]
)
def test_a_generation_follows_the_target(rule: str, depth: int) -> None:
    blocks = [ToyNet(vocab_size=VOCAB, seed=7 + index) for index in range(depth)]
    sampler = DraftSampler(first_maximum, "the blocks", draw_for(rule))
    limits = HeadLimits(chunk=2, reach=3, window=100)
    target = WithHidden(ToyHybrid(vocab_size=VOCAB, seed=0))
    rig = Rig(target, HiddenDrafter("mtp", blocks, sampler, limits), RULES[rule], k=2, chunk=3)
    found = engine_distribution(rig, PROMPT, FOUR)
    assert max(trace.num_drafted for trace in rig.traces) == 2
    assert_same_distribution(found, target_distribution(ToyHybrid, PROMPT, FOUR))
