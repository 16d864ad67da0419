"""Models whose layers all have windows give back the pages that no later token sees."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from doubles.tiny_families import add_words, write_family
from outrider import LLM, EngineConfig, SamplingParams
from outrider.cache.paged_kv import PagedKV
from outrider.core.errors import CapacityError
from outrider.models.llama import LlamaModel

pytest.importorskip("transformers")
pytestmark = [pytest.mark.wide, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WINDOW, PAGE, CHUNK = 7, 4, 8
# The first two begin alike.
PROMPTS = [[(5 * i + 3) % 96 for i in range(n)] + [n] for n in (40, 24, 9)]
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)
WAYS: Sequence[dict[str, Any]] = (
    {"drafter": "none"},
    {"drafter": "none", "force_reference": True},
    {"drafter": "ngram", "k": 4, "min_ngram": 1},
    {"drafter": "ngram", "k": 4, "min_ngram": 1, "batch_size": 1},
    {"drafter": "recycling", "k": 3, "tree_nodes": 8},
    {"drafter": "model", "k": 4},
    {"drafter": "model", "k": 4, "tree_nodes": 8, "batch_size": 1},
    {"drafter": "layer-skip", "k": 3, "skip_layers": "1"},
)


def opened(folder: Path, **settings: Any) -> LLM:
    draft = folder if settings["drafter"] == "model" else None
    usual: dict[str, Any] = {"batch_size": 3, "page_size": PAGE, "prefill_chunk": CHUNK}
    usual |= {"dtype": "float32", **settings}
    return LLM(folder, draft=draft, config=EngineConfig(**usual))


def texts(folder: Path, **settings: Any) -> list[tuple[int, ...]]:
    with closing(opened(folder, **settings)) as llm:
        found = [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]
        target = llm.models["target"]
        assert isinstance(target, LlamaModel)
        target.state.check()
        return found


def all_seen(memory: PagedKV, length: int) -> int:
    del memory, length
    return 0


def test_greedy_text_is_what_it_is_where_all_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_words(write_family(tmp_path, "mistral"))
    with monkeypatch.context() as patched:
        patched.setattr(PagedKV, "_num_unseen", all_seen)
        expected = texts(folder, drafter="none", batch_size=1)
    assert [len(ids) for ids in expected] == [60, 60, 60]
    for way in WAYS:
        assert texts(folder, **way) == expected, way
    # Three texts of up to 101 tokens, whose pages are given to one another.
    for way in WAYS:
        if way["drafter"] != "model":
            assert texts(folder, arena_tokens=96, **way) == expected, way


def test_a_long_text_holds_few_pages(tmp_path: Path) -> None:
    folder = add_words(write_family(tmp_path, "mistral"))
    with closing(opened(folder, drafter="ngram", k=3, batch_size=1, arena_tokens=24)) as llm:
        target = llm.models["target"]
        assert isinstance(target, LlamaModel)
        assert target.spec.reach == WINDOW
        for _ in llm.stream(PROMPTS[0], PARAMS):
            assert target.state.num_free_tokens >= 24 - (WINDOW + CHUNK + PAGE)
        assert target.state.num_free_tokens == 24


def test_a_model_with_a_layer_that_sees_all_keeps_all(tmp_path: Path) -> None:
    folder = add_words(write_family(tmp_path, "ministral"))
    with closing(opened(folder, drafter="none", arena_tokens=96, batch_size=1)) as llm:
        target = llm.models["target"]
        assert isinstance(target, LlamaModel)
        assert target.spec.window
        assert target.state.reach == 0
        with pytest.raises(CapacityError, match="arena"):
            llm.generate([PROMPTS[0]], PARAMS)
