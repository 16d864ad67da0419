"""Cached keys and values are never copied, and a steady round allocates nothing that grows.

Every PyTorch operation of a run on the embedded pair passes a dispatch mode that knows the arena's
storage, so a copy cannot hide behind a wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from doubles.tiny_attention import poison_dead_space
from outrider import LLM, EngineConfig, SamplingParams
from outrider.cache.paged_kv import PagedKV

pytestmark = pytest.mark.weights


class Watch(TorchDispatchMode):
    """Names of operations on the arena, of those that made new tensors of it, and bytes of new
    tensors since `new_bytes` was last set to 0."""

    def __init__(self, arena: torch.Tensor) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._arena = arena.untyped_storage().data_ptr()
        self.on_arena: list[str] = []
        self.made_of_arena: list[str] = []
        self.new_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        storages = {self._storage(leaf) for leaf in tree_leaves((args, kwargs))}
        if self._arena in storages:
            self.on_arena.append(str(func))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and self._storage(leaf) not in storages:
                self.new_bytes += leaf.untyped_storage().nbytes()
                if self._arena in storages:
                    self.made_of_arena.append(str(func))
        return out

    def _storage(self, leaf: object) -> int | None:
        return leaf.untyped_storage().data_ptr() if isinstance(leaf, torch.Tensor) else None


def native_llm(drafter: str) -> LLM:
    llm = LLM(config=EngineConfig(drafter=drafter, k=4, batch_size=1, device="cpu"))
    if any(choice.name != "native" for choice in llm.kernels.choices):
        pytest.skip("no C++ compiler: the reference attention is a PyTorch operation on the arena")
    return llm


def reference_llm(drafter: str) -> LLM:
    return LLM(
        config=EngineConfig(
            drafter=drafter,
            k=4,
            batch_size=1,
            device="cpu",
            dtype="float32",
            force_reference=True,
        )
    )


def arena_of(llm: LLM) -> PagedKV:
    store = llm._pair.target.state  # pyright: ignore[reportPrivateUsage]
    assert isinstance(store, PagedKV)
    return store


@contextmanager
def watching(llm: LLM) -> Generator[Watch]:
    with Watch(arena_of(llm).arena) as watch:
        yield watch


@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_no_round_touches_cached_keys_or_values_through_pytorch(drafter: str) -> None:
    """The native kernels read pages in place, so PyTorch sees no operation on the arena at all."""
    llm = native_llm(drafter)
    with watching(llm) as watch:
        llm.generate("def add(a, b):\n    return a", SamplingParams(max_tokens=12))
    assert watch.on_arena == []


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_the_reference_takes_views_of_cached_keys_and_values(drafter: str) -> None:
    """Of float32 nothing is gathered, cloned or widened: attention alone reads them."""
    llm = reference_llm(drafter)
    with watching(llm) as watch:
        llm.generate("def add(a, b):\n    return a", SamplingParams(max_tokens=12))
    assert set(watch.made_of_arena) == {"aten.scaled_dot_product_attention.default"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [native_llm, pytest.param(reference_llm, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_a_steady_round_allocates_the_same_however_long_the_context(
    drafter: str, make: Callable[[str], LLM]
) -> None:
    llm = make(drafter)
    text = "for i in range(10):\n    print(i)\n" * 20
    per_round: list[tuple[int, int]] = []
    with watching(llm) as watch:
        for event in llm.stream(text, SamplingParams(max_tokens=100, ignore_eos=True)):
            per_round.append((len(event.token_ids), watch.new_bytes))
            watch.new_bytes = 0
    full = [size for emitted, size in per_round[3:] if emitted == per_round[5][0]]
    assert len(full) > 5
    # Page tables gain a column a page; nothing else may grow.
    assert max(full) - min(full) <= 256


def test_the_models_see_views_of_one_arena_that_never_moves() -> None:
    llm = LLM()
    store = arena_of(llm)
    start = store.arena.data_ptr()
    end = start + store.arena.numel() * store.arena.element_size()
    llm.generate("x = 1\n", SamplingParams(max_tokens=8))
    assert store.arena.data_ptr() == start
    for pair in store.layers:
        for view in pair:
            last = view.data_ptr() + (view.stride(0) * (view.shape[0] - 1)) * view.element_size()
            assert start <= view.data_ptr() <= last < end


def test_poisoned_dead_space_changes_nothing() -> None:
    params = SamplingParams(max_tokens=40)
    prompt = "def fibonacci(n):"
    expected = LLM(config=EngineConfig(drafter="none")).generate(prompt, params)[0]
    for drafter in ("none", "ngram", "model"):
        llm = LLM(config=EngineConfig(drafter=drafter, k=4, batch_size=1))
        store = arena_of(llm)
        got: list[int] = []
        for event in llm.stream(prompt, params):
            got += event.token_ids
            poison_dead_space(store)
        assert tuple(got) == expected.token_ids
