"""Penalties, bias, bans and masks under speculation: the text and the distribution of plain
decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from checks.distribution import assert_same_distribution, floats, joint_distribution
from checks.effort import examples
from checks.engine_distribution import (
    LENGTH,
    PROMPT,
    VOCAB,
    distribution_drafters,
    shaped,
    shaping_params,
)
from checks.state import fresh_logits
from doubles.drafters import random_chains, random_trees
from doubles.every_branch import Distribution, EveryBranch, Tokens, distribution
from doubles.rig import Request, Rig, model_drafter, walking
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter
from outrider.drafters.ngram import NgramDrafter
from outrider.plugins.proof.distributions import filtered

WORDS = ((1, 2), (0,))
STOPS = frozenset([2])


def mask_by_length(text: Sequence[int]) -> Tensor:
    """Two tokens of three, which two depends on the text."""
    mask_V = torch.ones(VOCAB, dtype=torch.bool)
    mask_V[(len(text) + sum(text)) % VOCAB] = False
    return mask_V


FEATURES: dict[str, tuple[SamplingParams, Callable[[SamplingParams, int], LogitsProcessor]]] = {
    "penalties": (
        SamplingParams(
            temperature=1.1,
            max_tokens=LENGTH,
            repetition_penalty=1.4,
            frequency_penalty=0.6,
            presence_penalty=-0.5,
        ),
        LogitsProcessor,
    ),
    "bias and top-p": (
        SamplingParams(temperature=0.9, max_tokens=LENGTH, logit_bias={0: 0.7, 2: -1}, top_p=0.9),
        LogitsProcessor,
    ),
    "bad words": (
        SamplingParams(temperature=1.5, max_tokens=LENGTH, bad_words=("x",)),
        lambda params, length: LogitsProcessor(params, length, bad_words=WORDS),
    ),
    "mask": (
        SamplingParams(temperature=1.0, max_tokens=LENGTH),
        lambda params, length: LogitsProcessor(params, length, allowed=mask_by_length),
    ),
}


def wanted_distribution(params: SamplingParams, shaper: LogitsProcessor) -> Distribution:
    def conditional(text: Tokens) -> Tensor:
        logits = shaped(
            floats(fresh_logits(ToyHybrid, [*PROMPT, *text], VOCAB)),
            PROMPT,
            text,
            params,
            bad_words=shaper.bad_words,
            allowed=shaper.allowed,
        )
        return torch.tensor(filtered(logits, params), dtype=torch.float64)

    return joint_distribution(conditional, params.max_tokens)


# Shaping comes before drafts; each drafter and each feature has its distribution. Other
# combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("drafter", distribution_drafters())
@pytest.mark.parametrize("feature", FEATURES)
def test_a_shaped_generation_follows_the_shaped_target(feature: str, drafter: str) -> None:
    params, make = FEATURES[feature]
    rig = Rig(ToyHybrid(vocab_size=VOCAB, seed=0), distribution_drafters()[drafter](), k=2, chunk=3)

    def generation(rng: EveryBranch) -> Tokens:
        request = Request(PROMPT, params, shaper=make(params, len(PROMPT)))
        with walking(rng):
            return tuple(rig.run([request])[0])

    assert_same_distribution(
        distribution(generation), wanted_distribution(params, make(params, len(PROMPT)))
    )


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: model_drafter(TinyAttentionLM(vocab_size=5, seed=4), chunk=3),
    "ngram": lambda: NgramDrafter(max_n=3, min_n=1),
    "chains": lambda: random_chains(5),
    "trees": lambda: random_trees(5, num_nodes=4),
}


@examples(25)
@given(
    params=shaping_params(5),
    prompts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=8), min_size=1, max_size=3),
    drafter=st.sampled_from(sorted(DRAFTERS)),
    k=st.integers(1, 4),
)
def test_shaped_greedy_text_is_plain_decodings(
    params: SamplingParams, prompts: list[list[int]], drafter: str, k: int
) -> None:
    params = SamplingParams(
        max_tokens=14,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias={i: b for i, b in (params.logit_bias or {}).items() if i < 5},
        min_tokens=params.min_tokens,
    )

    def run(rig: Rig) -> list[list[int]]:
        return rig.run(
            [
                Request(
                    prompt,
                    params,
                    stop_ids=STOPS,
                    shaper=LogitsProcessor(params, len(prompt), STOPS, bad_words=((3, 4), (1, 1))),
                )
                for prompt in prompts
            ]
        )

    plain = run(Rig(TinyAttentionLM(vocab_size=5)))
    got = run(Rig(TinyAttentionLM(vocab_size=5), DRAFTERS[drafter](), k=k, batch_size=2))
    assert got == plain
    for text in plain:
        assert len(text) >= min(params.min_tokens, 14)


def test_a_draft_shaped_like_its_target_is_always_accepted() -> None:
    """A drafter that left its own logits as they are would be refused here."""
    for temperature in (0.0, 0.9):
        shaped_params = SamplingParams(
            max_tokens=16, repetition_penalty=3.0, presence_penalty=2.0, temperature=temperature
        )
        drafter = model_drafter(TinyAttentionLM(vocab_size=5), chunk=2)
        rig = Rig(TinyAttentionLM(vocab_size=5), drafter, k=3)
        rig.run([Request((1, 2, 1), shaped_params, shaper=LogitsProcessor(shaped_params, 3))])
        assert [trace.num_accepted for trace in rig.traces] == [3] * 4
