"""The block that ships for the embedded target: the same text, and drafts that are worth something.

The floor is that of the scripted contracts: 30 % of first drafts on code.
"""

from __future__ import annotations

import pytest

from outrider import LLM, EngineConfig, SamplingParams
from outrider_lab.bench.workload import load_prompts

pytestmark = [pytest.mark.slow, pytest.mark.weights]
FORTY_EIGHT = SamplingParams(max_tokens=48)
FLOOR = 0.3


@pytest.mark.sample(2)
@pytest.mark.parametrize(("k", "quantise"), [(1, "none"), (4, "none"), (3, "int8")])
def test_forty_eight_tokens_are_those_of_plain_decoding(k: int, quantise: str) -> None:
    prompts = load_prompts("humaneval")[:3]
    off = EngineConfig(drafter="none", quantise=quantise)
    plain = LLM(config=off).generate(prompts, FORTY_EIGHT)
    llm = LLM(draft="outrider/embedded-mtp", config=EngineConfig(k=k, quantise=quantise))
    assert llm.drafter == "mtp"
    found = llm.generate(prompts, FORTY_EIGHT)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]


def test_first_drafts_are_accepted_more_often_than_the_floor() -> None:
    llm = LLM(config=EngineConfig(drafter="mtp", k=1))
    results = llm.generate(load_prompts("humaneval")[:4], FORTY_EIGHT)
    num_drafted = sum(result.stats.num_drafted for result in results)
    num_accepted = sum(result.stats.num_accepted for result in results)
    assert num_drafted > 80
    assert num_accepted / num_drafted > FLOOR


def test_drafts_begin_with_the_first_state_that_the_target_has() -> None:
    """The pass of a prompt gives the first token, and that after it has a draft. Where memory has
    all of the prompt but its pending token, the first pass has one too."""
    config = EngineConfig(drafter="mtp", k=2, page_size=16, controller="fixed", profile=True)
    llm = LLM(config=config)
    prompt = llm.tokenizer.encode(load_prompts("humaneval")[0])[:17]
    drafted = [
        [one.num_drafted for one in llm.generate([prompt], FORTY_EIGHT)[0].rounds[:3]]
        for _ in range(2)
    ]
    assert drafted == [[0, 2, 2], [2, 2, 2]]
