"""The same question to the whole engine: texts that it writes with scripted models, by chi-square.

Nothing of a round is left out here: draft model, target pass, processing, rule, clamp, commit and
the keys of each round are wired by `engine/build.py`. Only the weights are missing: both models'
laws are hashes of the last tokens (`lab/scripted.py`), so the law of a whole text is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.sequence import LiveSequence
from outrider.engine.build import build_engine
from outrider.engine.drafter_builders import Parts
from outrider.kernels.reference.pointwise import argmax
from outrider.lab.scripted import Script, ScriptedLM
from outrider.proof.cases import Text
from outrider.proof.plain_law import plain_law

VOCAB = 4
LENGTH = 3
PROMPT = (2, 0, 3)
TARGET = Script(vocab_size=VOCAB, seed=5, order=2, gap=0.4, spread=2.0)
DRAFT = Script(vocab_size=VOCAB, seed=5, order=2, gap=1.2, spread=1.0, agreement=0.6)
_BATCH = 16


def text_law() -> dict[Text, float]:
    """The probability of each text of LENGTH tokens after PROMPT, in plain floats."""
    law: dict[Text, float] = {}
    for text in product(range(VOCAB), repeat=LENGTH):
        whole, chance = (*PROMPT, *text), 1.0
        for place, token in enumerate(text, start=len(PROMPT)):
            chance *= _next_law(whole[place - TARGET.order : place])[token]
        law[text] = chance
    return law


def engine_texts(
    sampler: str, *, seed: int, num_texts: int, tick: Callable[[], None] = lambda: None
) -> Iterator[Text]:
    """One text a sample number, each written by the engine in a batch of others."""
    config = EngineConfig(drafter="model", k=2, sampler=sampler, batch_size=_BATCH)
    parts = Parts(ScriptedLM(TARGET), ScriptedLM(DRAFT), argmax)
    engine = build_engine(config, parts, num_slots=TARGET.num_slots, sink=lambda _: None)
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH)
    for first in range(0, num_texts, _BATCH):
        batch = [_sequence(params, i) for i in range(first, min(first + _BATCH, num_texts))]
        for seq in batch:
            engine.submit(seq)
        while engine.has_work:
            engine.step()
        for seq in batch:
            tick()
            yield tuple(seq.tokens[len(PROMPT) :])


def _sequence(params: SamplingParams, sample: int) -> LiveSequence:
    return LiveSequence(
        seq_id=sample,
        tokens=list(PROMPT),
        prompt_length=len(PROMPT),
        params=params,
        limit=params.max_tokens,
        sample=sample,
    )


@cache
def _next_law(context: Text) -> list[float]:
    logits = [float(logit) for logit in TARGET.logits(context)]
    return plain_law(logits, SamplingParams(temperature=1.0))
