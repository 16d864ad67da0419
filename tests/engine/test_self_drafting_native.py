"""A target that drafts for itself in native calls writes what it writes token by token: whole
rounds, chains and trees at once, and what is left of them in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doubles.gguf_writer import wide_llama
from doubles.rig import round_of
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.result import GenerationResult
from outrider.core.draft import RoundTrace
from outrider.core.errors import OutriderError
from outrider.drafters.common.draft_model import (
    _HeldBlocks,  # pyright: ignore[reportPrivateUsage]
)
from outrider.drafters.common.native import FusedChains, FusedTrees
from outrider.engine.native_round import NativeRound
from outrider.engine.stages import Stages
from outrider.kernels.native.rounds import NativeRounds
from outrider.models.llama import LlamaModel

pytestmark = [pytest.mark.weights, pytest.mark.usefixtures("native_library")]

PROMPTS = (
    "def fibonacci(n):\n",
    "Natalia sold clips to 48 of her friends in April. How many",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\nfor i",
    "1 +",
)
OWN = ("quantised-self", "layer-skip")
KINDS: Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02},
)
MIXED = [SamplingParams(max_tokens=10 + 4 * i, seed=i, **kind) for i, kind in enumerate(KINDS)]


def llm_of(drafter: str, target: str | Path | None = None, **config: Any) -> LLM:
    usual: dict[str, Any] = {"batch_size": 3, "self_quantise": "int4", "watchdog": "off", **config}
    settings = EngineConfig(drafter=drafter, profile=True, **usual)
    return LLM(config=settings) if target is None else LLM(target, config=settings)


def round_in(llm: LLM) -> object:
    return round_of(llm._engine)  # pyright: ignore[reportPrivateUsage]


def target_of(llm: LLM) -> LlamaModel:
    target = llm._pair.target  # pyright: ignore[reportPrivateUsage]
    assert isinstance(target, LlamaModel)
    return target


def told(results: Sequence[GenerationResult]) -> list[object]:
    """All that a round decides, of every round that wrote something."""
    return [
        (one.token_ids, one.finish_reason, [_verdict(each) for each in one.rounds])
        for one in results
    ]


def _verdict(trace: RoundTrace) -> tuple[int, int, int]:
    return trace.num_drafted, trace.num_accepted, trace.num_prompt_tokens


def refused(*_: object) -> None:
    return None


@pytest.fixture
def by_the_token(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Leaves no native call but a single pass."""

    def leave() -> None:
        for made in (FusedChains, FusedTrees):
            monkeypatch.setattr(made, "try_rows", refused)
        monkeypatch.setattr(NativeRounds, "__call__", refused)

    return leave


# Rules by lengths are those of a model's rounds in tests/engine/test_native_round.py. Other
# combinations are `deep`.
@pytest.mark.sample(3)
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("drafter", OWN)
@pytest.mark.parametrize(
    ("sampler", "k"), [("block", 4), ("token", 8), ("match", 3), ("block", 1), ("token", 2)]
)
def test_rounds_in_one_call_are_those_of_the_stages(
    drafter: str, sampler: str, k: int, by_the_token: Callable[[], None]
) -> None:
    """Greedy, sampled and filtered requests share batches, and join and leave at other rounds."""
    whole = llm_of(drafter, k=k, sampler=sampler, prefill_chunk=16)
    assert isinstance(round_in(whole), NativeRound)
    found = told(whole.generate(PROMPTS, MIXED))
    staged = llm_of(drafter, k=k, sampler=sampler, prefill_chunk=16, fused_round=False)
    assert told(staged.generate(PROMPTS, MIXED)) == found
    by_the_token()
    assert told(staged.generate(PROMPTS, MIXED)) == found
    assert told(whole.generate(PROMPTS, MIXED)) == found


# Trees of either drafter have their parity in tests/engine/test_drafter_matrix.py as well. Other
# combinations are `deep`.
@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("drafter", OWN)
@pytest.mark.parametrize(("k", "nodes"), [(2, 8), (5, 16), (8, 24)])
def test_trees_at_once_are_those_that_grow(
    drafter: str, k: int, nodes: int, by_the_token: Callable[[], None]
) -> None:
    llm = llm_of(drafter, k=k, tree_nodes=nodes)
    results = llm.generate(PROMPTS, MIXED)
    found = told(results)
    assert max(each.num_drafted for one in results for each in one.rounds) > k
    target_of(llm).state.check()
    by_the_token()
    assert told(llm.generate(PROMPTS, MIXED)) == found
    plain = llm_of("none").generate(PROMPTS[0], MIXED[0])
    assert results[0].token_ids == plain[0].token_ids


def test_a_round_asks_nobody_but_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of("quantised-self", k=3)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a draft was asked for by itself")

    monkeypatch.setattr(Stages, "propose", refuse)
    for params in MIXED:
        assert len(llm.generate(PROMPTS[0], params)[0].token_ids) == params.max_tokens


@pytest.mark.parametrize("drafter", OWN)
def test_a_first_round_reads_no_prompt_with_the_copy(drafter: str) -> None:
    """However its prompt came: the rest of it is read by the target before the call."""
    whole = llm_of(drafter, k=3, prefill_chunk=1024).generate(PROMPTS, MIXED)
    parts = llm_of(drafter, k=3, prefill_chunk=5).generate(PROMPTS, MIXED)
    assert [one.token_ids for one in whole] == [one.token_ids for one in parts]
    first = [next(each for each in one.rounds if each.num_emitted) for one in whole]
    assert all(each.num_drafted and not each.num_prompt_tokens for each in first)


def test_text_may_end_anywhere_in_a_round(by_the_token: Callable[[], None]) -> None:
    params = [SamplingParams(max_tokens=24, stop=stop) for stop in (("\n",), ("return", "for"))]
    params += [SamplingParams(max_tokens=count) for count in (1, 2, 7)]
    prompts = [PROMPTS[i % 3] for i in range(len(params))]
    llm = llm_of("quantised-self", k=8)
    found = told(llm.generate(prompts, params))
    by_the_token()
    assert told(llm.generate(prompts, params)) == found


@pytest.mark.parametrize("settings", [{"k": 8}, {"k": 5, "tree_nodes": 20}], ids=["chain", "tree"])
def test_drafts_end_where_the_window_does(settings: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    (plain,) = llm_of("none", context=48).generate(PROMPTS[0], params)
    llm = llm_of("quantised-self", context=48, page_size=4, batch_size=1, **settings)
    (found,) = llm.generate(PROMPTS[0], params)
    assert found.token_ids == plain.token_ids
    target_of(llm).state.check()


@pytest.mark.parametrize("nodes", [0, 12])
def test_little_memory_pre_empts_and_changes_nothing(nodes: int) -> None:
    """What a tree reads level by level is counted among what a round may stage."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    config: dict[str, Any] = {"k": 4, "tree_nodes": nodes, "page_size": 4, "reserve": 0.0}
    wanted = [one.token_ids for one in llm_of("none").generate(PROMPTS, params)]
    llm = llm_of("quantised-self", arena_tokens=160, batch_size=4, **config)
    assert [one.token_ids for one in llm.generate(PROMPTS, params)] == wanted
    target_of(llm).state.check()


class _StopError(Exception):
    """Of a call that ends halfway."""


@pytest.mark.parametrize("error", [_StopError, KeyboardInterrupt])
def test_a_call_that_breaks_off_leaves_nothing_staged(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it wrote is dead space: the text goes on as it would have."""
    llm = llm_of("quantised-self", k=3, batch_size=1)
    (wanted,) = llm.generate(PROMPTS[0], MIXED[0])
    call, staged = NativeRounds.__call__, list[int]()
    state = target_of(llm).state

    def broken(self: NativeRounds, rows: Any) -> None:
        call(self, rows)
        staged.append(sum(state.num_staged(seq_id) for seq_id in state._sequences))  # pyright: ignore[reportPrivateUsage]
        raise error

    monkeypatch.setattr(NativeRounds, "__call__", broken)
    with pytest.raises((_StopError, OutriderError)):
        llm.generate(PROMPTS[0], MIXED[0])
    assert staged == [0]
    state.check()
    monkeypatch.undo()
    assert llm.generate(PROMPTS[0], MIXED[0])[0].token_ids == wanted.token_ids


def test_no_numbers_are_found_by_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that gives none leaves its round to them, in the memory that it had."""
    llm = llm_of("quantised-self", k=3)
    found = told(llm.generate(PROMPTS, MIXED))
    call, turns = NativeRounds.__call__, iter(range(10_000))

    def seldom(self: NativeRounds, rows: Any, num_likely: int = 0) -> Any:
        decided = call(self, rows, num_likely)
        return None if next(turns) % 3 else decided

    monkeypatch.setattr(NativeRounds, "__call__", seldom)
    assert told(llm.generate(PROMPTS, MIXED)) == found


def test_requests_of_the_stages_share_batches_with_others() -> None:
    plain = SamplingParams(max_tokens=20, temperature=0.8, seed=5)
    params = [
        plain,
        replace(plain, max_tokens=9, presence_penalty=0.5),
        replace(plain, max_tokens=17, logprobs=True),
        replace(plain, max_tokens=12, repetition_penalty=1.2),
    ]
    found, wanted = (
        told(llm_of("quantised-self", k=3, fused_round=on, batch_size=2).generate(PROMPTS, params))
        for on in (True, False)
    )
    assert found == wanted


@pytest.mark.covering(1)
@pytest.mark.parametrize("kinds", [("Q8_0",), ("Q4_K", "Q6_K"), ("Q4_1",)], ids="-".join)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_over_the_blocks_of_a_file(
    kinds: Sequence[str], scheme: str, tmp_path: Path, by_the_token: Callable[[], None]
) -> None:
    path = wide_llama(kinds).write(tmp_path / "a.gguf")
    prompts = [[5, 9, 7, 5, 9, 7, 5, 9], [3, 4, 3, 4, 3], [8]]
    params = [replace(one, max_tokens=20, ignore_eos=True, stop=()) for one in MIXED[:3]]
    llm = llm_of("quantised-self", path, k=4, self_quantise=scheme)
    assert isinstance(round_in(llm), NativeRound)
    found = told(llm.generate(prompts, params))
    by_the_token()
    assert told(llm.generate(prompts, params)) == found
    (plain,) = llm_of("none", path).generate(prompts[:1], params[:1])
    assert found[0][0] == plain.token_ids  # type: ignore[index]


def test_the_call_runs_two_models_over_one_memory() -> None:
    whole = round_in(llm_of("quantised-self", k=3))
    assert isinstance(whole, NativeRound)
    assert whole.drafter is None
    assert whole.draft is not None
    assert whole.draft.state is whole.target.state
    trees = round_in(llm_of("quantised-self", k=3, tree_nodes=9))
    assert isinstance(trees, NativeRound)
    assert trees.draft is None


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_copy_of_blocks_is_made_of_those_in_memory(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the bytes of one that is made of the file once more."""
    path = wide_llama(["Q8_0", "Q4_K"]).write(tmp_path / "a.gguf")
    llm = llm_of("quantised-self", path, self_quantise=scheme)
    target, own = target_of(llm), llm._pair.own  # pyright: ignore[reportPrivateUsage]
    assert own is not None
    found = own.of(target)
    monkeypatch.setattr(_HeldBlocks, "of", refused)
    wanted = own.of(target)
    assert len(found.streamed) == len(wanted.streamed) == 4 * target.config.num_layers + 1
    for one, other in zip(found.streamed, wanted.streamed, strict=True):
        assert one.equal(other)
