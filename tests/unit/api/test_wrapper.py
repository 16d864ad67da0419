"""One model by itself: shapes, cut caches, what a cache is worth, and what the wrapper says."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import outrider.pairs as pairs
from doubles.kinds import close_to
from doubles.tiny_checkpoints import COMMON_GPT2, Variant, random_llama, random_model
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import CapacityError, ConfigError
from outrider.models.decoder import ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.plugins.compat.wrapper import Cache, ModelWrapper, PagedModel, load_wrapper

TEXT = (5, 17, 3, 60, 5, 17, 9)
PAGE = 4
CAPACITY = ModelCapacity(num_slots=256, page_size=PAGE, max_rows=16, max_logits=16)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(pairs.__path__[0]) / "tiny" / "target")


def wrapping(model: PagedModel) -> ModelWrapper:
    return ModelWrapper(model, tokenizer(), max_rows=CAPACITY.max_rows)


@cache
def tiny() -> LlamaModel:
    return random_llama(capacity=CAPACITY)


@cache
def reference() -> ModelWrapper:
    """The same weights with a memory of their own."""
    return wrapping(random_llama(capacity=CAPACITY))


@pytest.fixture
def wrapper() -> Iterator[ModelWrapper]:
    made = wrapping(tiny())
    yield made
    made.reset_cache()
    assert made.free_tokens == CAPACITY.num_slots
    tiny().state.check()


def read(
    wrapper: ModelWrapper, tokens: Sequence[int], past: Cache | None = None
) -> tuple[Tensor, Cache]:
    logits_1NV, made = wrapper.forward(tokens, past)
    assert made is not None
    return logits_1NV, made


def fresh(tokens: Sequence[int]) -> Tensor:
    """Logits of a model that was fed `tokens` and nothing else."""
    logits_1NV, made = reference().forward(tokens, use_cache=False)
    assert made is None
    return logits_1NV


class TestShape:
    @pytest.mark.parametrize("num_tokens", [1, 7, 16, 37])
    def test_logits_have_a_row_for_every_token(
        self, wrapper: ModelWrapper, num_tokens: int
    ) -> None:
        """Also when the text is longer than a pass."""
        logits_1NV, made = read(wrapper, [3] * num_tokens)
        assert logits_1NV.shape == (1, num_tokens, 96)
        assert logits_1NV.dtype == torch.float32
        assert made.length == num_tokens

    def test_layers_hold_batch_heads_tokens_and_head_size(self, wrapper: ModelWrapper) -> None:
        _, made = read(wrapper, TEXT)
        assert wrapper.kv_shapes(made) == [(1, 4, 7, 16)] * 2
        for keys, values in wrapper.key_values(made):
            assert keys.shape == values.shape == (1, 4, 7, 16)

    @pytest.mark.slow
    def test_the_shape_of_gpt2(self) -> None:
        """12 layers of 12 heads of 64; a small vocabulary and a narrow FFN save time."""
        sizes = {"n_layer": 12, "n_head": 12, "n_embd": 768}
        item = Variant("gpt2_sizes", sizes, base=COMMON_GPT2)
        model = random_model(item, dtype="bfloat16", capacity=CAPACITY)
        wrapper = wrapping(cast("PagedModel", model))
        _, made = read(wrapper, TEXT)
        assert wrapper.kv_shapes(made) == [(1, 12, len(TEXT), 64)] * 12
        assert [keys.shape for keys, _ in wrapper.key_values(made)] == [(1, 12, 7, 64)] * 12

    @pytest.mark.parametrize("shape", [(7,), (1, 7)])
    def test_ids_may_be_a_tensor(self, wrapper: ModelWrapper, shape: tuple[int, ...]) -> None:
        logits_1NV, _ = wrapper.forward(torch.tensor(TEXT).reshape(shape))
        assert torch.equal(logits_1NV, fresh(TEXT))

    def test_the_shape_of_a_batch_is_refused(self, wrapper: ModelWrapper) -> None:
        with pytest.raises(ConfigError, match="one sequence at a time"):
            wrapper.forward(torch.zeros(2, 3, dtype=torch.int64))


class TestTruncation:
    @pytest.mark.parametrize("length", range(len(TEXT) + 1))
    def test_a_cut_cache_goes_on_as_if_the_rest_was_never_read(
        self, wrapper: ModelWrapper, length: int
    ) -> None:
        _, made = read(wrapper, TEXT)
        cut = wrapper.truncate_cache(made, length)
        assert wrapper.get_cache_length(cut) == length
        logits_1NV, _ = read(wrapper, [1, 2], cut)
        close_to(logits_1NV, fresh([*TEXT[:length], 1, 2])[:, -2:])

    def test_the_original_is_not_modified(self, wrapper: ModelWrapper) -> None:
        _, made = read(wrapper, TEXT)
        before = wrapper.key_values(made)
        read(wrapper, [9, 9, 9, 9, 9, 9], wrapper.truncate_cache(made, 2))
        assert wrapper.get_cache_length(made) == len(TEXT)
        for old, new in zip(before, wrapper.key_values(made), strict=True):
            assert torch.equal(old[0], new[0])
            assert torch.equal(old[1], new[1])
        close_to(read(wrapper, [4], made)[0], fresh([*TEXT, 4])[:, -1:])

    def test_whole_pages_are_shared_and_a_part_is_copied(self, wrapper: ModelWrapper) -> None:
        _, made = read(wrapper, TEXT)
        free = wrapper.free_tokens
        whole_page = wrapper.truncate_cache(made, PAGE)
        assert wrapper.free_tokens == free
        part = wrapper.truncate_cache(made, PAGE + 1)
        assert wrapper.free_tokens == free - PAGE
        del whole_page, part

    def test_a_cut_cache_outlives_its_source(self, wrapper: ModelWrapper) -> None:
        _, made = read(wrapper, TEXT)
        cut = wrapper.truncate_cache(made, 6)
        wrapper.close(made)
        _, other = read(wrapper, [8] * 30)
        close_to(read(wrapper, [1], cut)[0], fresh([*TEXT[:6], 1])[:, -1:])
        assert other.length == 30

    @pytest.mark.parametrize("length", [-1, 8])
    def test_a_length_that_is_not_held_is_refused(self, wrapper: ModelWrapper, length: int) -> None:
        _, made = read(wrapper, TEXT)
        with pytest.raises(ConfigError, match="between 0 and 7"):
            wrapper.truncate_cache(made, length)

    @settings(max_examples=10)
    @given(cuts=st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 95), min_size=1))))
    def test_any_series_of_cuts_and_reads(self, cuts: list[tuple[int, list[int]]]) -> None:
        wrapper = wrapping(tiny())
        text = list(TEXT)
        _, made = read(wrapper, text)
        for length, added in cuts:
            keep = min(length, len(text))
            text = [*text[:keep], *added[:6]]
            logits_1NV, made = read(wrapper, added[:6], wrapper.truncate_cache(made, keep))
            close_to(logits_1NV[:, -1], fresh(text)[:, -1])
        wrapper.reset_cache()
        tiny().state.check()


class TestForwardWithCache:
    @pytest.mark.parametrize("cut", range(1, len(TEXT)))
    def test_reading_in_two_parts_gives_the_same_logits(
        self, wrapper: ModelWrapper, cut: int
    ) -> None:
        first, made = read(wrapper, TEXT[:cut])
        second, made = read(wrapper, TEXT[cut:], made)
        assert made.length == len(TEXT)
        close_to(torch.cat([first, second], dim=1), fresh(TEXT))

    def test_without_use_cache_nothing_is_kept(self, wrapper: ModelWrapper) -> None:
        free = wrapper.free_tokens
        logits_1NV, made = wrapper.forward(TEXT, use_cache=False)
        assert made is None
        assert logits_1NV.shape == (1, len(TEXT), 96)
        assert wrapper.free_tokens == free

    def test_one_cache_serves_two_continuations(self, wrapper: ModelWrapper) -> None:
        _, made = read(wrapper, TEXT)
        for token in (1, 2):
            logits_1NV, _ = wrapper.forward([token], made)
            close_to(logits_1NV, fresh([*TEXT, token])[:, -1:])
        assert made.length == len(TEXT)

    def test_logits_stay_when_more_is_read(self, wrapper: ModelWrapper) -> None:
        """They are a copy, not a view of the model's buffer."""
        logits_1NV, made = read(wrapper, TEXT)
        before = logits_1NV.clone()
        read(wrapper, [1, 2, 3, 4, 5, 6, 7], made)
        assert torch.equal(logits_1NV, before)

    def test_a_dropped_cache_gives_its_memory_back(self, wrapper: ModelWrapper) -> None:
        free = wrapper.free_tokens
        _, made = read(wrapper, TEXT)
        assert wrapper.free_tokens == free - 2 * PAGE
        del made
        gc.collect()
        assert wrapper.free_tokens == free

    def test_a_long_text_token_by_token_holds_one_cache(self, wrapper: ModelWrapper) -> None:
        made: Cache | None = None
        for token in [7] * 40:
            _, made = wrapper.forward([token], made)
        assert wrapper.free_tokens == CAPACITY.num_slots - 40
        assert "1 caches" in repr(wrapper)

    def test_a_freed_cache_and_one_of_another_wrapper_are_refused(
        self, wrapper: ModelWrapper
    ) -> None:
        _, made = read(wrapper, TEXT)
        wrapper.close(made)
        for stale in (made, Cache(made.seq_id, 7)):
            with pytest.raises(ConfigError, match="freed") as caught:
                wrapper.forward([1], stale)
            assert caught.value.hint

    @pytest.mark.parametrize(
        ("ids", "problem"),
        [
            ([], "no ids"),
            ([96], "outside the vocabulary"),
            ([-1], "outside"),
            ([1] * 300, "window"),
        ],
    )
    def test_ids_that_cannot_be_read_are_refused(
        self, wrapper: ModelWrapper, ids: list[int], problem: str
    ) -> None:
        with pytest.raises(ConfigError, match=problem):
            wrapper.forward(ids)

    def test_a_full_arena_refuses_and_keeps_what_was_read(self, wrapper: ModelWrapper) -> None:
        _, made = read(wrapper, TEXT)
        free = wrapper.free_tokens
        with pytest.raises(CapacityError):
            wrapper.forward([1] * 249, made)
        assert wrapper.free_tokens == free
        close_to(read(wrapper, [1], made)[0], fresh([*TEXT, 1])[:, -1:])

    def test_greedy_is_the_loop_written_out(self, wrapper: ModelWrapper) -> None:
        text: list[int] = [*TEXT]
        while len(text) < len(TEXT) + 9 and wrapper.eos_token_id != text[-1]:
            text.append(int(fresh(text)[0, -1].argmax()))
        assert wrapper.greedy(TEXT, 9) == text[len(TEXT) :]


class TestProperties:
    def test_reset_frees_every_cache(self, wrapper: ModelWrapper) -> None:
        free = wrapper.free_tokens
        held = [read(wrapper, TEXT)[1] for _ in range(3)]
        wrapper.reset_cache()
        assert wrapper.free_tokens == free
        with pytest.raises(ConfigError, match="freed"):
            wrapper.truncate_cache(held[0], 1)

    def test_a_device_where_the_model_is_not_is_refused(self) -> None:
        assert ModelWrapper(tiny(), tokenizer(), "cpu").device.type == "cpu"
        with pytest.raises(ConfigError, match="is on cpu, not on meta"):
            ModelWrapper(tiny(), tokenizer(), "meta")

    @pytest.mark.weights
    @pytest.mark.parametrize(("dtype", "megabytes"), [("auto", 16), ("float32", 32)])
    def test_loading_by_name(self, dtype: str, megabytes: int) -> None:
        wrapper, loaded = load_wrapper("outrider/embedded", dtype)
        assert wrapper.tokenizer is loaded
        assert wrapper.param_count == 7_999_744
        assert wrapper.memory_footprint_mb == pytest.approx(megabytes, rel=1e-3)
        logits_1NV, made = wrapper.forward(loaded.encode("def f(x):\n    return"))
        assert loaded.decode([int(logits_1NV[0, -1].argmax())]).strip()
        assert made is not None
        assert wrapper.kv_shapes(made)[0] == (1, 2, made.length, 64)

    @pytest.mark.weights
    def test_int4_is_a_name_for_weights_in_4_bits(self) -> None:
        named, tokenizer = load_wrapper("outrider/embedded", "int4")
        quantised, _ = load_wrapper("outrider/embedded", quantise="int4")
        assert named.memory_footprint_mb == quantised.memory_footprint_mb < 9
        ids = tokenizer.encode("def f(x):\n    return")
        assert named.greedy(ids, 8) == quantised.greedy(ids, 8)

    def test_two_formats_for_the_same_matrices_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="two formats"):
            load_wrapper("outrider/embedded", "int4", quantise="int8")
