"""The embedded pair on the machine's own kernels: drafting ahead writes the text of the turns."""

from __future__ import annotations

import functools

import pytest

from doubles.ahead import AheadRig, Ways, ahead_drafter
from doubles.rig import Request
from outrider.api.tokenizer import Tokenizer
from outrider.core.params import SamplingParams
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import DraftSampler
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.loading import load_model, resolve
from outrider.pairs.catalog import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.verify.exact import BlockRule, TokenRule

PROMPTS = ("def f(x):", "The quick brown", "Once upon a time there was")
pytestmark = pytest.mark.slow


@functools.cache
def models() -> tuple[Decoder, Decoder]:
    options = LoadOptions(capacity=ModelCapacity(num_slots=4096, max_rows=256), device="cpu")
    return load_model(resolve(EMBEDDED_TARGET), options), load_model(
        resolve(EMBEDDED_DRAFT), options
    )


def requests(temperature: float, batch: int, max_tokens: int = 16) -> list[Request]:
    tokenizer = Tokenizer.load(resolve(EMBEDDED_TARGET))
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=3)
    return [Request(tokenizer.encode(prompt), params) for prompt in PROMPTS[:batch]]


# Temperatures by lengths are covered with small models in test_ahead.py. Other combinations are
# `deep`.
@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_the_text_is_that_of_drafting_in_turns(temperature: float, k: int) -> None:
    target, draft = models()
    kernels = target.kernels
    argmax, sampling = kernels.argmax, kernels.sampling
    for rule in (TokenRule(sampling), BlockRule(sampling)):
        for batch in (1, 3):
            wanted = requests(temperature, batch)
            sampler = DraftSampler(argmax, "the draft model", sampling=sampling)
            turns = ModelDrafter(draft, sampler, chunk=64)
            rig = AheadRig(target, turns, rule, k, argmax=argmax, sampling=sampling)
            text = rig.run(wanted)
            ways = Ways(k=k, batch=batch, fan_out=8)
            rig.drafter = ahead_drafter(draft, ways, argmax=argmax, sampling=sampling)
            assert rig.run(wanted) == text
            assert True in rig.hits


def test_most_verdicts_of_greedy_text_are_foreseen() -> None:
    """The draft model's list holds the target's own token more often than not."""
    target, draft = models()
    argmax = target.kernels.argmax
    drafter = ahead_drafter(draft, Ways(fan_out=24, batch=3), argmax=argmax)
    AheadRig(target, drafter, argmax=argmax).run(requests(0.0, 3, 60))
    stats = drafter.stats()
    assert stats.looks.share > 0.6
    assert stats.bonus.share > stats.looks.share
