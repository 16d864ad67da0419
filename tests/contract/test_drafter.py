"""What every Drafter must keep to."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from checks.engine import PROMPT, check_greedy, greedy
from doubles.ahead import Ways, ahead_drafter
from doubles.counting import CyclingController, Guessing
from doubles.kinds import Kind, scripted
from doubles.rig import SAMPLER, Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from doubles.vocabularies import Digits, Mute, Renaming
from outrider.core.params import SamplingParams
from outrider.core.plugins import KINDS
from outrider.core.protocols import Drafter
from outrider.drafters.bridge import BridgeDrafter
from outrider.drafters.common.context import Translator
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.plugins.proof.reports import MakeDrafter
from outrider.testing import VOCAB, ProposalContract

MODELS: Mapping[str, Kind] = {
    "hybrid": ToyHybrid,
    "attention": TinyAttentionLM,
    "scripted": scripted,
}
GUESS = (2, 0, 1, 3, 3, 1, 2, 4, 0, 1, 3, 2, 0, 0, 4)


def bridge(translator: Translator, *, paged: bool = False) -> BridgeDrafter:
    kind = TinyAttentionLM if paged else ToyHybrid
    model = kind(vocab_size=VOCAB, seed=5, num_slots=2048)
    return BridgeDrafter(model, SAMPLER, translator, chunk=3, page_size=4)


DRAFTERS: Mapping[str, MakeDrafter] = {
    "none": NoDrafter,
    "ngram": lambda: NgramDrafter(max_n=3, min_n=1),
    "long ngram": lambda: NgramDrafter(max_n=4, min_n=2),
    "model": lambda: model_drafter(ToyHybrid(vocab_size=VOCAB, seed=5, num_slots=2048), chunk=3),
    "paged model": lambda: model_drafter(
        TinyAttentionLM(vocab_size=VOCAB, seed=5, num_slots=2048), chunk=1
    ),
    "model ahead": lambda: ahead_drafter(
        TinyAttentionLM(vocab_size=VOCAB, seed=5, num_slots=2048), Ways(k=6)
    ),
    "scripted model": lambda: model_drafter(scripted(vocab_size=VOCAB, num_slots=2048), chunk=64),
    "prediction": lambda: Guessing(GUESS),
    "no prediction": PredictionDrafter,
    "bridge": lambda: bridge(Renaming(VOCAB, shift=2)),
    "finer bridge": lambda: bridge(Digits(VOCAB, base=3), paged=True),
    "mute bridge": lambda: bridge(Mute()),
}
every_drafter = pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS.keys())


class TestProposals(ProposalContract):
    """What authors of other packages run on their drafters."""

    @pytest.fixture(autouse=True, params=DRAFTERS.values(), ids=list(DRAFTERS))
    def chosen(self, request: pytest.FixtureRequest) -> None:
        self.chosen_make: MakeDrafter = request.param

    def make(self) -> Drafter:
        return self.chosen_make()


@every_drafter
def test_a_drafter_names_itself_and_its_needs(make: MakeDrafter) -> None:
    drafter = make()
    assert drafter.name in KINDS
    assert drafter.needs.hidden_layers == ()


@every_drafter
def test_a_run_with_changing_budgets_is_plain_decoding(make: MakeDrafter) -> None:
    controller = CyclingController((2, 0, 5, 0, 0, 1, 3))
    rig = Rig(ToyHybrid(vocab_size=VOCAB), make(), controller=controller, chunk=3)
    check_greedy(rig, ToyHybrid, [PROMPT, (0, 0, 0)], 20)


@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_equal_to_the_target_is_always_accepted(kind: Kind, temperature: float) -> None:
    """Also when sampled: where both distributions are the same, the ratio is one."""
    rig = Rig(kind(vocab_size=VOCAB), model_drafter(kind(vocab_size=VOCAB), chunk=2), k=3)
    prompts = [PROMPT, (0,), (2, 4, 4, 1, 0, 2, 3)]
    rig.outputs(prompts, SamplingParams(temperature=temperature, max_tokens=16))
    assert [trace.num_accepted for trace in rig.traces] == [3] * 12


@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS.keys())
def test_a_model_drafter_gives_its_memory_back(kind: Kind) -> None:
    model = kind(vocab_size=VOCAB, seed=5)
    free = model.state.num_free_tokens
    rig = Rig(ToyHybrid(vocab_size=VOCAB), model_drafter(model), k=4, batch_size=2)
    rig.outputs([PROMPT] * 5, greedy(9))
    assert model.state.num_free_tokens == free
