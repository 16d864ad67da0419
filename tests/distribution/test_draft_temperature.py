"""A drafter may draw at another temperature than the text's: the text keeps its distribution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from checks.engine_distribution import (
    FILTERS,
    LENGTH,
    PROMPT,
    VOCAB,
    check_engine_distribution,
    racing_drafter,
)
from checks.state import fresh_logits
from doubles.rig import Rig, model_drafter
from doubles.toy_hybrid import ToyHybrid
from outrider.control.heuristics import FixedController
from outrider.core.draft import Budget, Draft
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule, Drafter, DraftRow
from outrider.core.rng import KeyedRng
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule

RULES = [TokenRule(), BlockRule(), MatchRule(), CoupledRule()]
SHARP = SamplingParams(temperature=0.5, max_tokens=LENGTH)


def drafter() -> Drafter:
    return model_drafter(ToyHybrid(vocab_size=VOCAB, seed=7), chunk=2)


def drafted(budget: Budget, params: SamplingParams) -> Draft:
    """One draft of the target's own model."""
    own = model_drafter(ToyHybrid(vocab_size=VOCAB, seed=0))
    own.open(0, PROMPT)
    rng = KeyedRng(0, 0, len(PROMPT))
    return own.propose([DraftRow(0, PROMPT, None, budget, params, rng)])[0]


# Each rule and each temperature has its distribution. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("temperature", [1.5, 0.5])
def test_the_text_keeps_its_distribution(rule: AcceptanceRule, temperature: float) -> None:
    make: Callable[[], Drafter] = racing_drafter if isinstance(rule, CoupledRule) else drafter
    controller = FixedController(Budget(2, temperature))
    rig = Rig(ToyHybrid(vocab_size=VOCAB), make(), rule, chunk=3, controller=controller)
    check_engine_distribution(rig, ToyHybrid, FILTERS[1])


@pytest.mark.parametrize("temperature", [1.0, 1.5, 4.0])
def test_the_distribution_reported_is_that_of_the_higher_temperature(temperature: float) -> None:
    draft = drafted(Budget(2, temperature), SHARP)
    assert draft.probs_NV is not None
    for node, probs_V in enumerate(draft.probs_NV):
        logits_V = fresh_logits(ToyHybrid, [*PROMPT, *draft.tokens[:node]], VOCAB)
        wanted = torch.softmax(logits_V.double() / (0.5 * temperature), -1)
        assert float((probs_V - wanted).abs().max()) <= 1e-12


def test_greedy_drafts_are_drawn_at_none() -> None:
    greedy = SamplingParams(max_tokens=LENGTH)
    assert drafted(Budget(2, 3.0), greedy) == drafted(Budget(2), greedy)


def test_the_hottest_text_can_be_drafted_for() -> None:
    """A request's temperature has a highest value, which its drafts keep to as well."""
    hot = SamplingParams(temperature=100, max_tokens=LENGTH)
    first, second = drafted(Budget(2, 1.5), hot).probs_NV, drafted(Budget(2), hot).probs_NV
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
