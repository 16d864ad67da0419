"""Speculation on equals speculation off for the families of models/family_table.py: chains and
trees, in batches and alone, past their windows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from doubles.tiny_families import add_words, write_family
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import ConfigError

pytest.importorskip("transformers")
pytestmark = [pytest.mark.wide, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPTS = [[(7 * i * i + 3 * i) % 96 for i in range(length)] for length in (9, 30, 4)]
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
CASES = (
    "mistral",
    "qwen2_moe_unusual",
    "qwen3_moe",
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "smollm3_unusual",
    "olmo3",
    "cohere2",
    "exaone4",
    "granite",
    "gemma4_moe",
    "deepseek_v2_unusual",
    "deepseek_v3",
    "glm4_moe_lite",
    "gemma4_shared",
)
# Drafters, some by a draft model with the target's own weights.
WAYS: Sequence[dict[str, Any]] = (
    {"drafter": "ngram", "k": 4, "min_ngram": 1},
    {"drafter": "model", "k": 4},
    {"drafter": "model", "k": 4, "tree_nodes": 12, "batch_size": 1},
    {"drafter": "recycling", "k": 3, "tree_nodes": 12},
    {"drafter": "layer-skip", "k": 3, "skip_layers": "1"},
    {"drafter": "quantised-self", "k": 3, "self_quantise": "int4", "batch_size": 1},
)


def texts(folder: Path, **settings: Any) -> list[Sequence[int]]:
    draft = folder if settings["drafter"] == "model" else None
    usual: dict[str, Any] = {"batch_size": 3, "page_size": 8, "prefill_chunk": 16}
    usual |= {"dtype": "bfloat16", **settings}
    config = EngineConfig(**usual)
    with closing(LLM(folder, draft=draft, config=config)) as llm:
        return [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_greedy_text_is_the_same_with_every_drafter(name: str, tmp_path: Path) -> None:
    folder = add_words(write_family(tmp_path, name))
    expected = texts(folder, drafter="none", batch_size=1)
    assert [len(ids) for ids in expected] == [16, 16, 16]
    for way in WAYS:
        assert texts(folder, **way) == expected, way


def test_a_seed_s_text_is_the_same_too(tmp_path: Path) -> None:
    folder = add_words(write_family(tmp_path, "qwen3_moe"))
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=7, ignore_eos=True)

    def drawn(**settings: Any) -> list[Sequence[int]]:
        with closing(LLM(folder, config=EngineConfig(drafter="none", **settings))) as llm:
            return [result.token_ids for result in llm.generate(PROMPTS, params)]

    assert drawn(batch_size=1) == drawn(batch_size=3, prefill_chunk=5)


def test_keys_of_sliding_layers_are_not_dropped(tmp_path: Path) -> None:
    folder = add_words(write_family(tmp_path, "mistral"))
    with pytest.raises(ConfigError, match="kv_budget"):
        LLM(folder, config=EngineConfig(drafter="none", kv_budget=64, kv_window=8))
