"""The hybrid that ships: with its own MTP block, lookups or a draft model it writes the same text.

The floor of its block, trained on its own text, is 60 % of first drafts on code.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.config import DEFAULT_K
from outrider.models.heads import worth_of
from outrider.pairs.catalog import EMBEDDED_DRAFT, EMBEDDED_HYBRID
from outrider_lab.bench.workload import load_prompts

pytestmark = [pytest.mark.slow, pytest.mark.weights]
COMMON = EngineConfig(device="cpu", batch_size=2)
PARAMS = SamplingParams(max_tokens=32)
FLOOR = 0.6


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [*load_prompts("humaneval")[:2], *load_prompts("gsm8k")[:2]]


@pytest.fixture(scope="module")
def plain(prompts: list[str]) -> list[list[int]]:
    return written(prompts, replace(COMMON, drafter="none"))[0]


def written(prompts: list[str], config: EngineConfig) -> tuple[list[list[int]], int]:
    """Ids of every text, and how many tokens were drafted."""
    draft = EMBEDDED_DRAFT if config.drafter == "model" else None
    with closing(LLM(EMBEDDED_HYBRID, draft=draft, config=config)) as llm:
        results = llm.generate(prompts, PARAMS)
    num_drafted = sum(result.stats.num_drafted for result in results)
    return [list(result.token_ids) for result in results], num_drafted


# Pairs of drafter, rollback and tree are covered in test_drafter_matrix.py. Other combinations are
# `deep`.
@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("nodes", [0, 8])
@pytest.mark.parametrize("rollback", ["replay", "ring"])
@pytest.mark.parametrize("drafter", ["mtp", "ngram", "suffix", "recycling", "model"])
def test_greedy_text_is_that_of_plain_decoding(
    prompts: list[str], plain: list[list[int]], drafter: str, rollback: str, nodes: int
) -> None:
    config = replace(
        COMMON, drafter=drafter, k=4, tree_nodes=nodes, state_rollback=rollback, state_history=16
    )
    found, num_drafted = written(prompts, config)
    assert found == plain
    assert num_drafted > 20


def test_first_drafts_are_accepted_more_often_than_the_floor() -> None:
    with closing(LLM(EMBEDDED_HYBRID, config=replace(COMMON, drafter="mtp", k=1))) as llm:
        results = llm.generate(load_prompts("humaneval")[:4], PARAMS)
    num_drafted = sum(result.stats.num_drafted for result in results)
    assert num_drafted > 60
    assert sum(result.stats.num_accepted for result in results) / num_drafted > FLOOR


def test_it_drafts_as_long_as_its_files_say_is_best() -> None:
    with closing(LLM(EMBEDDED_HYBRID, config=replace(COMMON, drafter="mtp"))) as llm:
        stated = worth_of(llm.folder, "mtp")
        assert stated is not None
        assert stated.pays
        assert llm.k == stated.best_k
    # Look-ups in its text are nothing that its block could tell of.
    with closing(LLM(EMBEDDED_HYBRID, config=replace(COMMON, drafter="ngram"))) as llm:
        assert llm.k == DEFAULT_K
