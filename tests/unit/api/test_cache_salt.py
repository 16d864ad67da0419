"""Requests find each other's prompts in memory, unless they are of different salts."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.api.result import GenerationResult

pytestmark = pytest.mark.weights
PROMPT = "def quicksort(items):\n    " * 20


def run(llm: LLM, salt: str) -> GenerationResult:
    return llm.generate(PROMPT, SamplingParams(max_tokens=4, cache_salt=salt))[0]


@pytest.mark.parametrize("drafter", ["none", "model", "ngram"])
def test_each_salt_has_its_own_prompts(drafter: str) -> None:
    with LLM(drafter=drafter, threads=1) as llm:
        found = [run(llm, salt) for salt in ("", "", "a", "a", "b", "")]
    shared = found[1].num_cached_tokens
    assert shared >= 64
    assert [one.num_cached_tokens for one in found] == [0, shared, 0, shared, 0, shared]
    assert len({one.text for one in found}) == 1


def test_what_was_cached_is_kept_with_the_result() -> None:
    with LLM(drafter="none", threads=1) as llm:
        run(llm, "")
        found = run(llm, "")
    assert GenerationResult.from_dict(found.to_dict()).num_cached_tokens == found.num_cached_tokens


def test_one_prompt_of_several_completions_is_read_once() -> None:
    with LLM(drafter="none", threads=1) as llm:
        first, *others = llm.generate(PROMPT, SamplingParams(max_tokens=2, n=3, cache_salt="x"))
    assert first.num_cached_tokens == 0
    assert all(one.num_cached_tokens for one in others)
