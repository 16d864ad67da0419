"""A draft model over another table than the target's: the text keeps the target's distribution."""

from __future__ import annotations

import pytest

from checks.engine_distribution import (
    FILTERS,
    PROMPT,
    check_engine_distribution,
    check_reported_distribution,
)
from doubles.rig import Rig, model_drafter
from doubles.toy_hybrid import ToyHybrid
from outrider.core.draft import Budget
from outrider.core.protocols import AcceptanceRule, DraftRow
from outrider.core.rng import KeyedRng, pick_node, race_node
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import CommonIds
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule

RULES = [TokenRule(), BlockRule(), MatchRule(), CoupledRule()]
# Ids of the target, of the draft model, and those that both have.
SIZES = [(4, 3, 2), (3, 5, 3)]
every_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


def _drafter(sizes: tuple[int, int, int], *, races: bool = False) -> ModelDrafter:
    vocab_size, rows, num_common = sizes
    model = CommonIds.over(
        ToyHybrid(vocab_size=rows, seed=7), vocab_size=vocab_size, num_common=num_common
    )
    return model_drafter(model, chunk=2, draw=race_node if races else pick_node)


@pytest.mark.covering(1)
@every_size
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("number", range(len(FILTERS)))
def test_a_generation_follows_the_target(
    rule: AcceptanceRule, sizes: tuple[int, int, int], number: int
) -> None:
    target = ToyHybrid(vocab_size=sizes[0], seed=0)
    drafter = _drafter(sizes, races=isinstance(rule, CoupledRule))
    check_engine_distribution(Rig(target, drafter, rule, k=2, chunk=3), ToyHybrid, FILTERS[number])


@every_size
def test_drafts_come_with_the_frequencies_that_are_reported(sizes: tuple[int, int, int]) -> None:
    check_reported_distribution(lambda: _drafter(sizes), FILTERS[0])


@every_size
def test_nothing_beyond_the_common_ids_has_any_chance(sizes: tuple[int, int, int]) -> None:
    drafter = _drafter(sizes)
    drafter.open(0, PROMPT)
    rng = KeyedRng(0, 0, len(PROMPT))
    (draft,) = drafter.propose([DraftRow(0, PROMPT, None, Budget(2), FILTERS[0], rng)])
    assert draft.probs_NV is not None
    assert draft.probs_NV.shape == (2, sizes[0])
    assert (draft.probs_NV[:, sizes[2] :] == 0).all()
    assert max(draft.tokens) < sizes[2]
