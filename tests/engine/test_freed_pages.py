"""Layers with windows give back what no later token sees: in all layers, or in those alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doubles.hf_checkpoints import write_hf
from doubles.tiny_families import FAMILIES, add_words, write_family
from outrider import LLM, EngineConfig, SamplingParams
from outrider.cache.paged_kv import PagedKV
from outrider.cache.pool import Frames
from outrider.core.errors import CapacityError, NumericsError
from outrider.core.spec import ModelSpec
from outrider.engine.build import model_capacity
from outrider.models.decoder import ModelCapacity
from outrider.models.llama import LlamaModel

pytest.importorskip("transformers")
pytestmark = [pytest.mark.wide, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WINDOW, PAGE, CHUNK = 7, 4, 8
# The first two begin alike.
PROMPTS = [[(5 * i + 3) % 96 for i in range(n)] + [n] for n in (40, 24, 9)]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
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
        memory_of(llm).check()
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
    assert [len(ids) for ids in expected] == [40, 40, 40]
    for way in WAYS:
        assert texts(folder, **way) == expected, way
    # Three texts of up to 81 tokens, whose pages are given to one another.
    for way in WAYS:
        if way["drafter"] != "model" and len(way) != 2 and "batch_size" not in way:
            assert texts(folder, arena_tokens=72, **way) == expected, way


def test_a_long_text_holds_few_pages(tmp_path: Path) -> None:
    folder = add_words(write_family(tmp_path, "mistral"))
    with closing(opened(folder, drafter="ngram", k=3, batch_size=1, arena_tokens=24)) as llm:
        memory = memory_of(llm)
        assert memory.reach == WINDOW
        for _ in llm.stream(PROMPTS[0], PARAMS):
            assert memory.num_free_tokens >= 24 - (WINDOW + CHUNK + PAGE)
        assert memory.num_free_tokens == 24


def test_layers_that_see_all_count_for_whole_texts(tmp_path: Path) -> None:
    folder = add_words(write_family(tmp_path, "ministral"))
    with closing(opened(folder, drafter="none", arena_tokens=72, batch_size=1)) as llm:
        assert memory_of(llm).reach == 0
        with pytest.raises(CapacityError, match="arena"):
            llm.generate([PROMPTS[0]], PARAMS)


LANES: Sequence[dict[str, Any]] = (
    {"drafter": "ngram", "k": 4, "min_ngram": 1, "schedule": "pd"},
    {"drafter": "model", "k": 3, "schedule": "pdv"},
    {"drafter": "model", "k": 3, "schedule": "ssd", "fan_out": 2},
    {"drafter": "model", "k": 3, "schedule": "ssd", "fan_out": 2, "force_reference": True},
    {"drafter": "recycling", "k": 3, "tree_nodes": 8, "fused_round": False},
    {"drafter": "layer-skip", "k": 3, "skip_layers": "0", "tree_nodes": 6},
)
# Windows before, behind and between layers that see all; caps, sinks and a mixture; heads of two
# sizes, and layers that read the keys and values of others.
MIXED = ("gemma3_text", "gemma2_unusual", "gpt_oss", "gemma4_equal", "gemma4_shared")


def one_table(capacity: ModelCapacity, spec: ModelSpec) -> int:
    del capacity, spec
    return 0


def wanted(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[tuple[int, ...]]:
    """Texts of a model whose layers all keep whole texts."""
    with monkeypatch.context() as patched:
        patched.setattr(ModelCapacity, "num_local_slots", one_table)
        return texts(folder, drafter="none", batch_size=1, **settings)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", MIXED)
def test_local_layers_hold_windows_and_the_text_is_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_words(write_family(tmp_path, family))
    expected = wanted(folder, monkeypatch)
    for way in (*WAYS, *LANES) if family == "gemma3_text" else WAYS:
        assert texts(folder, **way) == expected, way


@pytest.mark.parametrize("kind", [{"kv_dtype": "int8"}, {"dtype": "bfloat16"}])
def test_rows_of_any_type_lie_in_frames(
    kind: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = FAMILIES["gemma3_text"]
    folder = add_words(write_hf(tmp_path, family, {**changes, "head_dim": 32}))
    expected = wanted(folder, monkeypatch, **kind)
    for way in (WAYS[2], WAYS[4]):
        assert texts(folder, **way, **kind) == expected


@pytest.mark.parametrize("reference", [False, True])
def test_a_frame_that_is_given_back_is_read_by_nobody(
    reference: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_words(write_family(tmp_path, "gemma3_text"))
    release, num_unseen = Frames.release, PagedKV._num_unseen  # pyright: ignore[reportPrivateUsage]

    def poison(frames: Frames, numbers: Sequence[int]) -> None:
        release(frames, numbers)
        rows = [PAGE * number + row for number in numbers for row in range(PAGE)]
        frames.arena[:, :, :, rows] = float("nan")

    def early(memory: PagedKV, length: int) -> int:
        return num_unseen(memory, length) + 1

    def text(**settings: Any) -> Sequence[int]:
        with closing(opened(folder, **settings, force_reference=reference)) as llm:
            return llm.generate(PROMPTS[:1], PARAMS)[0].token_ids

    expected = text(drafter="none")
    monkeypatch.setattr(Frames, "release", poison)
    ways = [way for way in WAYS if "force_reference" not in way and way["drafter"] != "model"]
    for way in ways[:2] if reference else ways:
        assert text(**way) == expected, way
    # A page too early, and what is read of it is no number.
    monkeypatch.setattr(PagedKV, "_num_unseen", early)
    with pytest.raises(NumericsError):
        text(drafter="none")


def test_texts_that_are_preempted_and_read_again_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_words(write_family(tmp_path, "gemma3_text"))
    expected = wanted(folder, monkeypatch)
    for way in WAYS:
        if way["drafter"] == "model" or way.get("batch_size") == 1:
            continue
        # Room for whole layers of two texts of 81 tokens, not of three.
        with closing(opened(folder, arena_tokens=128, reserve=0.0, **way)) as llm:
            assert [result.token_ids for result in llm.generate(PROMPTS, PARAMS)] == expected, way
            assert llm.counts.preempted > 0
            memory_of(llm).check()


def test_local_layers_take_the_same_for_a_text_of_any_length(tmp_path: Path) -> None:
    folder = add_words(write_family(tmp_path, "gemma3_text"))
    with closing(opened(folder, drafter="ngram", k=3, batch_size=1)) as llm:
        memory = memory_of(llm)
        assert memory.frames is not None
        assert len(memory.frames.arena) == 3
        assert len(memory.arena) == 1
        # Those of a window, a chunk and a draft, in whole pages.
        most = (7 + CHUNK + 4) // PAGE + 2
        assert memory.frames.num_pages <= most < len(PROMPTS[0]) // PAGE
        held = memory.arena.nbytes + memory.frames.arena.nbytes
        assert [held] == [n for part, n in llm.memory.items() if part.startswith("KV arena")]
        for _ in llm.stream(PROMPTS[0], PARAMS):
            assert memory.frames.num_free >= 0
        memory.check()
        assert memory.frames.num_free == memory.frames.num_pages


def test_a_text_that_goes_on_shares_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beginning is found as far as the last window before it is still there."""
    folder = add_words(write_family(tmp_path, "gemma3_text"))
    way: dict[str, Any] = {"drafter": "ngram", "k": 3, "min_ngram": 1, "batch_size": 1}

    def turns(**settings: Any) -> list[tuple[int, ...]]:
        text, found = list(PROMPTS[0]), list[tuple[int, ...]]()
        with closing(opened(folder, **settings)) as llm:
            for turn in range(3):
                result = llm.generate([text], SamplingParams(max_tokens=24, ignore_eos=True))[0]
                if turn and memory_of(llm).frames is not None:
                    assert result.num_cached_tokens >= len(text) - 2 * PAGE
                found.append(result.token_ids)
                text += [*result.token_ids, turn]
            memory_of(llm).check()
        return found

    found = turns(**way)
    with monkeypatch.context() as patched:
        patched.setattr(ModelCapacity, "num_local_slots", one_table)
        assert found == turns(drafter="none", batch_size=1)


def test_where_ranks_share_a_model_all_layers_keep_all() -> None:
    config, capacity = (
        EngineConfig(page_size=PAGE, tensor_parallel=2),
        {"max_rows": 8, "max_logits": 8},
    )
    assert model_capacity(config, 64, num_staged=9, **capacity).num_texts == 0
    alone = model_capacity(replace(config, tensor_parallel=1), 64, num_staged=9, **capacity)
    assert alone.num_texts == config.most_batch


def memory_of(llm: LLM) -> PagedKV:
    target = llm.models["target"]
    assert isinstance(target, LlamaModel)
    return target.state
