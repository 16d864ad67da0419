"""At the end of the window drafts shrink and the text stays: as many tokens, and the same ones,
whatever drafts, in whatever lengths, shapes, lanes and batches, in memory of that many tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, EngineConfig, SamplingParams
from outrider.models.loading import resolve

pytestmark = [pytest.mark.weights, pytest.mark.slow]

WINDOW = 96
PARAMS = SamplingParams(max_tokens=100, ignore_eos=True)
PROMPT = "def quicksort(items):\n    "

WAYS: dict[str, dict[str, Any]] = {
    "model": {},
    "model, K = 40": {"k": 40},
    "stage by stage": {"fused_round": False, "k": 12},
    "token by token": {"batched_verify": False},
    "a tree": {"tree_nodes": 24, "k": 8},
    "pdv": {"schedule": "pdv", "k": 12},
    "ssd": {"schedule": "ssd", "k": 12},
    "a process": {"schedule": "ssd", "drafter_home": "process"},
    "goodput": {"controller": "goodput", "k": 16},
    "ngram": {"drafter": "ngram", "k": 16},
    "suffix tree": {"drafter": "suffix", "k": 16, "tree_nodes": 16},
    "recycling": {"drafter": "recycling", "k": 6, "tree_nodes": 24},
    "portfolio": {"drafter": "portfolio", "k": 12},
    "eagle tree": {"drafter": "eagle", "k": 8, "tree_nodes": 32},
    "medusa tree": {"drafter": "medusa", "k": 4, "tree_nodes": 24},
    "mtp": {"drafter": "mtp", "k": 12},
    "layer-skip": {"drafter": "layer-skip", "k": 8},
    "little reserved": {"reserve": 0.25, "k": 12},
}


def written(prompts: list[list[int]], target: str = "outrider/embedded", **config: Any) -> Any:
    page_size = config.pop("page_size", 32)
    llm = LLM(target, config=EngineConfig(context=WINDOW, page_size=page_size, threads=1, **config))
    try:
        free = llm.free_tokens
        results = llm.generate(prompts, PARAMS)
        assert llm.free_tokens == free
    finally:
        llm.close()
    assert not any("speculation was turned off" in note for r in results for note in r.notes)
    return [r.token_ids for r in results]


def prompts_of(llm: LLM) -> list[list[int]]:
    """Texts with 58, 1 and 95 tokens before the window's end."""
    text = llm.tokenizer.encode(PROMPT * 40)
    return [text[: WINDOW - 58], text[3 : WINDOW + 2], text[5:6]]


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], list[tuple[int, ...]]]:
    llm = LLM(config=EngineConfig(drafter="none", context=WINDOW, threads=1))
    prompts = prompts_of(llm)
    texts = [result.token_ids for result in llm.generate(prompts, PARAMS)]
    assert [len(text) for text in texts] == [58, 1, 95]
    return prompts, texts


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.wide if "process" in way else ()) for way in WAYS]
)
def test_every_token_comes_whatever_drafts(
    plain: tuple[list[list[int]], list[tuple[int, ...]]], way: str
) -> None:
    prompts, expected = plain
    assert written(prompts, batch_size=3, **WAYS[way]) == expected


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", ["model", "a tree", "ngram", "little reserved", "layer-skip"])
def test_an_arena_of_one_window_is_enough(
    plain: tuple[list[list[int]], list[tuple[int, ...]]], way: str
) -> None:
    prompts, expected = plain
    slots = WINDOW + WAYS[way].get("tree_nodes", 0)
    found = written(prompts, batch_size=1, arena_tokens=slots, page_size=1, **WAYS[way])
    assert found == expected


# Trees and long drafts end at the target's window above; here at the draft model's.
@pytest.mark.parametrize("config", [{}, {"schedule": "ssd"}])
def test_a_draft_model_with_a_shorter_window_drafts_as_far_as_it_reaches(
    plain: tuple[list[list[int]], list[tuple[int, ...]]], config: dict[str, Any], tmp_path: Path
) -> None:
    prompts, expected = plain
    draft = tmp_path / "draft"
    shutil.copytree(resolve("outrider/embedded-draft"), draft)
    told = json.loads((draft / "config.json").read_text("utf-8"))
    (draft / "config.json").write_text(json.dumps(told | {"max_position_embeddings": 60}), "utf-8")
    llm = LLM(draft=draft, config=EngineConfig(context=WINDOW, threads=1, batch_size=3, **config))
    try:
        results = llm.generate(prompts, PARAMS)
    finally:
        llm.close()
    assert [result.token_ids for result in results] == expected
    assert results[2].stats.num_drafted > 0
    assert not any("turned off" in note for result in results for note in result.notes)
