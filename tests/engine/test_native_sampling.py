"""Texts drawn with the chosen kernels depend on the request alone: not on mates, chunks, threads,
and under a rule that ties text to the seed not on the draft either."""

from __future__ import annotations

from functools import cache

import pytest

from outrider import LLM, EngineConfig, SamplingParams
from outrider_lab.bench.workload import load_prompts

pytestmark = pytest.mark.weights

PROMPTS = load_prompts("humaneval")[:3]
DRAWN = SamplingParams(max_tokens=16, temperature=0.8, seed=11)


@cache
def texts(**settings: int | str) -> list[tuple[int, ...]]:
    config = EngineConfig(**{"k": 3, "batch_size": 3, **settings})  # pyright: ignore[reportArgumentType]
    return [result.token_ids for result in LLM(config=config).generate(PROMPTS, DRAWN)]


# Both rules, every arrangement. Other combinations are `deep`.
@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["block", "token"])
@pytest.mark.parametrize(
    "settings", [{"batch_size": 1}, {"prefill_chunk": 7}, {"threads": 1}], ids=str
)
def test_company_changes_no_text(sampler: str, settings: dict[str, int]) -> None:
    assert texts(sampler=sampler, **settings) == texts(sampler=sampler)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"k": 0}, {"k": 6}, {"drafter": "ngram"}], ids=str)
def test_a_seed_s_text_is_the_same_with_any_draft(settings: dict[str, int | str]) -> None:
    assert texts(sampler="match", **settings) == texts(sampler="match")


def test_an_engine_draws_with_its_kernels() -> None:
    llm = LLM(config=EngineConfig(k=3))
    (choice,) = {choice.name for choice in llm.kernels.choices if choice.op == "softmax"}
    assert choice == llm.kernels.choices[0].name
    assert len(llm.generate(PROMPTS[0], DRAWN)[0].token_ids) == DRAWN.max_tokens
