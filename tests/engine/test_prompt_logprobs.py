"""Log-probabilities of prompts are, to the bit, those that writing the same tokens reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.result import GenerationResult
from outrider.core.errors import ConfigError

pytestmark = pytest.mark.weights

PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"
WRITE = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=True, top_logprobs=3)
SCORE = SamplingParams(max_tokens=2, prompt_logprobs=3)

SCHEDULES: dict[str, dict[str, Any]] = {
    "single": {},
    "no drafts": {"drafter": "none"},
    "small chunks": {"prefill_chunk": 5, "drafter": "ngram"},
    "pd": {"schedule": "pd", "batch_size": 4},
    "pdv": {"schedule": "pdv", "batch_size": 4},
    "ssd": {"schedule": "ssd"},
    "heads": {"drafter": "eagle"},
}


@pytest.fixture(scope="module")
def written() -> GenerationResult:
    return LLM(drafter="none").generate(PROMPT, WRITE)[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SCHEDULES)
def test_prompt_tokens_are_told_what_writing_them_told(
    written: GenerationResult, name: str
) -> None:
    with LLM(config=EngineConfig(**SCHEDULES[name])) as llm:
        ids = [*llm.encode(PROMPT), *written.token_ids]
        llm.generate([ids, ids[:30]], SamplingParams(max_tokens=1))
        alone = llm.generate(ids, SCORE)[0]
        others = llm.generate([ids, ids[:25], ids[:9], ids], [SCORE, SCORE, SCORE, WRITE])
    found = alone.prompt_logprobs
    assert found[0] is None
    assert [one and one.token_id for one in found] == [None, *ids[1:]]
    assert found[len(ids) - 40 :] == written.logprobs
    assert [one.prompt_logprobs for one in others] == [found, found[:25], found[:9], ()]
    assert others[0].token_ids == alone.token_ids


def test_a_text_is_the_same_whether_its_prompt_is_scored() -> None:
    with LLM() as llm:
        seeded = SamplingParams(max_tokens=20, temperature=1, seed=5)
        plain = llm.generate(PROMPT, seeded)[0]
        scored = llm.generate(PROMPT, replace(seeded, prompt_logprobs=0, n=2))
    assert scored[0].token_ids == plain.token_ids
    assert scored[0].prompt_logprobs[1:]
    assert all(one is None or not one.top for one in scored[0].prompt_logprobs)
    assert scored[1].prompt_logprobs == ()


def test_log_probabilities_are_the_models_own_whatever_the_request_changes() -> None:
    with LLM(drafter="none") as llm:
        plain = llm.generate(PROMPT, SCORE)[0]
        bent = replace(SCORE, temperature=2, top_k=3, seed=1, logit_bias={5: 9.0}, max_tokens=3)
        assert llm.generate(PROMPT, bent)[0].prompt_logprobs == plain.prompt_logprobs


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    with LLM() as llm:
        result = llm.generate([llm.encode(PROMPT)[:1]], SCORE)[0]
    assert result.prompt_logprobs == (None,)
    assert GenerationResult.from_dict(result.to_dict()) == result


def test_a_record_has_them() -> None:
    with LLM() as llm:
        result = llm.generate(PROMPT, SCORE)[0]
    assert GenerationResult.from_dict(result.to_dict()) == result
    assert all(one is None or len(one.top) == 3 for one in result.prompt_logprobs)


def test_a_request_that_is_pre_empted_keeps_what_was_told() -> None:
    """Two texts that do not fit together: the younger one begins again."""
    config = EngineConfig(batch_size=2, arena_tokens=192, page_size=16, reserve=0.0)
    with LLM(config=config) as llm:
        ids = llm.encode(PROMPT)
        params = [replace(WRITE, max_tokens=90), replace(SCORE, max_tokens=90, ignore_eos=True)]
        first, second = llm.generate([ids, ids], params)
        alone = llm.generate(ids, SCORE)[0]
    assert llm.counts.preempted
    assert first.finish_reason == "length"
    assert second.prompt_logprobs == alone.prompt_logprobs


@pytest.mark.parametrize("count", [-1, 21])
def test_a_number_out_of_bounds_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=count)
