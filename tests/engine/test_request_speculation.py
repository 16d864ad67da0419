"""Speculation that a request chooses: requests of one batch differ in it, and in nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider import LLM
from outrider.api.result import GenerationResult
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams

pytestmark = pytest.mark.weights

PROMPT = "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\nfor i"
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1, seed=7)
# Everything that makes drafts or runs rounds in a way of its own.
ENGINES: dict[str, dict[str, object]] = {
    "native": {"drafter": "model"},
    "stages": {"drafter": "model", "fused_round": False},
    "tree": {"drafter": "model", "tree_nodes": 12},
    "looked up": {"drafter": "ngram"},
    "heads": {"drafter": "eagle"},
    "own copy": {"drafter": "quantised-self"},
    "portfolio": {"drafter": "portfolio"},
    "recycled": {"drafter": "recycling", "tree_nodes": 12},
    "goodput": {"drafter": "model", "controller": "goodput"},
    "band": {"drafter": "model", "controller": "band"},
    "pd": {"drafter": "model", "schedule": "pd"},
    "pdv": {"drafter": "model", "schedule": "pdv", "hybrid_threshold": 0},
    "ssd": {"drafter": "model", "schedule": "ssd", "hybrid_threshold": 0},
    "process": {"drafter": "model", "schedule": "ssd", "drafter_home": "process"},
    "none": {"drafter": "none"},
}


def llm_of(engine: str, **more: object) -> LLM:
    settings = {"batch_size": 4, "profile": True, "device": "cpu", **ENGINES[engine], **more}
    return LLM(config=EngineConfig(**settings))  # pyright: ignore[reportArgumentType]


def together(llm: LLM, params: Sequence[SamplingParams]) -> list[GenerationResult]:
    return llm.generate([PROMPT] * len(params), params)


def drafted(result: GenerationResult) -> int:
    return max(one.num_drafted for one in result.rounds)


@pytest.mark.parametrize("engine", ENGINES)
def test_requests_without_drafts_have_none_beside_others_that_have(engine: str) -> None:
    with llm_of(engine) as llm:
        results = llm.generate(
            [PROMPT] * 4,
            [
                GREEDY,
                SamplingParams(max_tokens=24, ignore_eos=True, speculative=False),
                SamplingParams(max_tokens=24, ignore_eos=True, k=1),
                SamplingParams(max_tokens=24, ignore_eos=True, k=64),
            ],
        )
        engine_k = 0 if engine == "none" else llm.config.k
        drafter = llm.drafter
    assert len({one.token_ids for one in results}) == 1
    plain, short = results[1], results[2]
    assert plain.stats.num_drafted == 0
    assert (plain.stats.drafter, plain.stats.k, plain.is_speculative) == ("none", 0, False)
    assert {one.drafter for one in plain.rounds if one.num_emitted} == {"none"}
    assert len([one for one in plain.rounds if one.num_emitted]) == 24
    assert not plain.notes
    assert max(one.draft_depth for one in short.rounds) <= 1
    assert [one.stats.k for one in results] == [engine_k, 0, min(1, engine_k), engine_k]
    assert results[0].stats.drafter == drafter


@pytest.mark.parametrize("engine", ["native", "stages", "looked up"])
def test_a_request_without_drafts_has_the_text_that_it_has_alone(engine: str) -> None:
    """Of one seed, under rules that draw plain text with numbers of their own."""
    plain = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1, seed=7, speculative=False)
    with llm_of(engine) as llm, llm_of("none") as other:
        beside = together(llm, [SEEDED, plain, GREEDY])[1]
        assert beside.token_ids == together(other, [SEEDED])[0].token_ids


def test_no_drafts_are_made_for_a_text_under_a_grammar_either() -> None:
    with llm_of("native") as llm:
        (result,) = llm.generate([PROMPT], speculative=False, choices=["a long answer"])
    assert result.text == "a long answer"
    assert result.stats.num_drafted == 0


def test_true_refuses_a_request_that_nothing_would_be_drafted_for() -> None:
    with llm_of("none") as llm, pytest.raises(ConfigError, match="this engine drafts nothing"):
        llm.submit(PROMPT, speculative=True)
    with llm_of("looked up") as llm:
        with pytest.raises(ConfigError, match="k is 0"):
            llm.submit(PROMPT, speculative=True, k=0)
        assert llm.generate([PROMPT], GREEDY, speculative=True)[0].stats.k == llm.config.k


def test_text_without_drafts_is_exact_under_a_lossy_rule() -> None:
    with llm_of("looked up", sampler="p_min") as llm:
        lossy, plain = together(llm, [GREEDY, SamplingParams(max_tokens=24, speculative=False)])
    assert (lossy.exact, plain.exact) == (False, True)
