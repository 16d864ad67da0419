"""A careless drafter changes nothing but time; one that breaks its contract is named."""

from __future__ import annotations

import pytest
import torch

from checks.engine import PROMPT, check_greedy, greedy
from checks.engine_law import FILTERS, engine_law, target_law
from checks.engine_law import PROMPT as LAW_PROMPT
from checks.engine_law import VOCAB as LAW_VOCAB
from checks.law import assert_same_law
from checks.state import VOCAB
from doubles.drafters import (
    EMPTY,
    NEGATIVE_ID,
    OUT_OF_STEP,
    OVER_LONG,
    REPEATS_LAST,
    RowDrafter,
    WrongCount,
    foreign_law,
    random_chains,
    unknown_id,
)
from doubles.rig import Request, Rig
from doubles.toy_hybrid import ToyHybrid
from outrider.core.draft import Draft
from outrider.core.errors import DrafterError
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter

CARELESS = {
    "empty": EMPTY,
    "random": random_chains(LAW_VOCAB),
    "repeats": REPEATS_LAST,
    "out of step": OUT_OF_STEP,
}
BROKEN: dict[str, Drafter] = {
    "too long": OVER_LONG,
    "negative id": NEGATIVE_ID,
    "unknown id": unknown_id(VOCAB),
    "a draft too many": WrongCount(1),
    "a draft too few": WrongCount(-1),
    "foreign law": foreign_law(VOCAB),
}


@pytest.mark.parametrize("name", CARELESS)
def test_a_careless_drafter_leaves_the_text(name: str) -> None:
    rig = Rig(ToyHybrid(vocab_size=VOCAB), CARELESS[name], k=4, chunk=3)
    check_greedy(rig, ToyHybrid, [PROMPT, (0, 1)], 15)


@pytest.mark.parametrize("name", CARELESS)
def test_a_careless_drafter_leaves_the_law(name: str) -> None:
    rig = Rig(ToyHybrid(vocab_size=LAW_VOCAB), CARELESS[name], k=2)
    params = FILTERS[0]
    assert_same_law(engine_law(rig, LAW_PROMPT, params), target_law(ToyHybrid, LAW_PROMPT, params))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_drafter_is_named_before_the_target_sees_its_draft(
    name: str, temperature: float
) -> None:
    rig = Rig(ToyHybrid(vocab_size=VOCAB), BROKEN[name], k=2)
    params = SamplingParams(temperature=temperature, max_tokens=8)
    seq = rig.live(0, Request(PROMPT, params))
    rig.target.state.open(0, ())
    with pytest.raises(DrafterError, match="'double'"):
        rig.stages().run([seq], [])
    assert (rig.target.state.length(0), rig.target.state.num_staged(0)) == (0, 0)
    assert tuple(seq.tokens) == PROMPT
    assert not rig.traces


def test_after_an_error_cancelling_frees_everything() -> None:
    rig = Rig(ToyHybrid(vocab_size=VOCAB), OVER_LONG, k=2)
    free = rig.target.state.num_free_tokens
    engine = rig.engine()
    for seq_id in (0, 1):
        engine.submit(rig.live(seq_id, Request(PROMPT, greedy(5))))
    with pytest.raises(DrafterError):
        engine.step()
    for seq_id in (0, 1):
        engine.cancel(seq_id)
    assert not engine.has_work
    assert rig.target.state.num_free_tokens == free


def test_a_token_without_mass_in_its_own_law_is_refused() -> None:
    """Such a token cannot have been drawn; dividing by nothing must not accept it."""

    def lying(token: int) -> RowDrafter:
        law_NV = torch.zeros(1, VOCAB, dtype=torch.float64)
        law_NV[0, (token + 1) % VOCAB] = 1
        return RowDrafter(lambda row: Draft.chain([token], law_NV))

    for token in range(VOCAB):
        rig = Rig(ToyHybrid(vocab_size=VOCAB), lying(token), k=1)
        rig.outputs([PROMPT], SamplingParams(temperature=1.0, max_tokens=6))
        assert [t.num_accepted for t in rig.traces] == [0] * 6
