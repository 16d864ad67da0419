"""A round as one native call gives what the stages give: tokens, verdicts, memory and errors."""

from __future__ import annotations

import ctypes
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from doubles.rig import round_of
from outrider import LLM
from outrider.api.result import GenerationResult
from outrider.core.config import EXACT_SAMPLERS, EngineConfig
from outrider.core.draft import Outcome
from outrider.core.errors import NumericsError
from outrider.core.params import SamplingParams
from outrider.core.philox import philox_uniform
from outrider.engine.native_round import NativeRound
from outrider.engine.round import Batch, Chunks
from outrider.engine.stages import Stages
from outrider.kernels.native.rounds import NativeRounds
from outrider.models.llama import LlamaModel
from outrider.models.loading import resolve

pytestmark = [pytest.mark.weights, pytest.mark.usefixtures("native_library")]

PROMPTS = (
    "def fibonacci(n):\n",
    "Natalia sold clips to 48 of her friends in April. How many",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\nfor i",
)
LONG = "x = [" + ", ".join(map(str, range(60))) + "]\n"
_WORDS = st.integers(0, 2**32 - 1)


def _llm(*, fused: bool, draft: str | None = None, **config: object) -> LLM:
    config.setdefault("batch_size", 3)
    llm = LLM(draft=draft, config=EngineConfig(fused_round=fused, profile=True, **config))  # pyright: ignore[reportArgumentType]
    wanted = NativeRound if fused else Stages
    assert isinstance(round_of(llm._engine), wanted)  # pyright: ignore[reportPrivateUsage]
    return llm


def _told(results: list[GenerationResult]) -> list[object]:
    """All that a round decides, of every round."""
    rounds = [
        [(r.num_drafted, r.num_accepted, r.num_prompt_tokens) for r in one.rounds]
        for one in results
    ]
    return [(one.token_ids, one.finish_reason, at) for one, at in zip(results, rounds, strict=True)]


@given(
    node=_WORDS,
    start=_WORDS,
    sample=_WORDS,
    role=st.integers(0, 4),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_native_numbers_are_those_of_the_definition(
    native_library: ctypes.CDLL, node: int, start: int, sample: int, role: int, seed: int
) -> None:
    native = native_library.outrider_uniform
    native.restype = ctypes.c_double
    native.argtypes = (ctypes.c_uint64, *([ctypes.c_uint32] * 4))
    assert native(seed, node, start, sample, role) == philox_uniform(
        seed, (node, start, sample, role)
    )


# Rules and drafters are other parts of the call. Other combinations are `deep`.
@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["block", "token", "match", "coupled"])
@pytest.mark.parametrize(("drafter", "k"), [("model", 1), ("model", 6), ("ngram", 5), ("none", 0)])
def test_tokens_and_verdicts_are_those_of_the_stages(sampler: str, drafter: str, k: int) -> None:
    """Greedy, sampled and filtered requests share batches, and join and leave at other rounds."""
    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.02},
    )
    params = [
        SamplingParams(max_tokens=12 + 4 * i, seed=seed + 2**40 * i, **kind)  # pyright: ignore[reportArgumentType]
        for seed in range(2)
        for i, kind in enumerate(kinds)
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    fused, staged = (
        _told(_llm(fused=on, drafter=drafter, k=k, sampler=sampler).generate(prompts, params))
        for on in (True, False)
    )
    assert fused == staged


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_requests_with_rules_of_their_own_share_a_batch(drafter: str) -> None:
    rules = (None, *EXACT_SAMPLERS)
    params = [
        SamplingParams(max_tokens=9 + 2 * i, seed=i, temperature=0.9, sampler=rule)
        for i, rule in enumerate((*rules, *rules))
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    fused, staged = (
        _told(_llm(fused=on, drafter=drafter, k=4, batch_size=6).generate(prompts, params))
        for on in (True, False)
    )
    assert fused == staged


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_a_plain_request_never_asks_the_stages(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = _llm(fused=True, k=3, dtype=dtype)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a round went stage by stage")

    monkeypatch.setattr(Stages, "verify", refuse)
    ways = (
        dict[str, object](),
        {"temperature": 0.9},
        {"temperature": 0.9, "logprobs": True, "top_p": 0.9},
        *({"temperature": 0.9, "sampler": rule} for rule in EXACT_SAMPLERS),
    )
    shaped = {"presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {3: 1.0}}
    for way in (*ways, shaped, {"logprobs": True}):
        params = SamplingParams(max_tokens=12, seed=0, **way)  # pyright: ignore[reportArgumentType]
        assert len(llm.generate(PROMPTS[0], params)[0].token_ids) == 12


@pytest.mark.parametrize("tree_nodes", [0, 7])
def test_a_model_with_a_mask_drafts_as_by_the_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree_nodes: int
) -> None:
    """In one pass of masks, and no token after the text stays staged; trees are made before."""
    calls: list[int] = []
    run = NativeRounds.__call__

    def counted(rounds: NativeRounds, *words: Any, **named: Any) -> Any:
        calls.append(1)
        return run(rounds, *words, **named)

    monkeypatch.setattr(NativeRounds, "__call__", counted)
    draft = shutil.copytree(resolve("outrider/embedded-draft"), tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "pard_token": 5}))
    greedy = SamplingParams(max_tokens=12)
    params = [greedy, replace(greedy, temperature=0.8, repetition_penalty=1.2, seed=3)]
    fused, staged = (
        _told(
            _llm(fused=on, draft=str(draft), k=4, tree_nodes=tree_nodes).generate(
                PROMPTS[:2], params
            )
        )
        for on in (True, False)
    )
    assert fused == staged
    assert calls


SHAPED: tuple[dict[str, object], ...] = (
    {"logprobs": True, "top_logprobs": 3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3, "logprobs": True},
    {"logit_bias": {5: 2.5, 11: -100.0}, "frequency_penalty": -0.3, "min_tokens": 6},
    {},
)


# Rules and drafters are other parts of the call. Other combinations are `deep`.
@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["block", "token", "match", "coupled"])
@pytest.mark.parametrize(("drafter", "k"), [("model", 6), ("ngram", 5), ("none", 0)])
def test_penalties_and_log_probabilities_are_those_of_the_stages(
    sampler: str, drafter: str, k: int
) -> None:
    """Beside requests without them, greedy, sampled and filtered."""
    ways = ({"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.1, "top_p": 0.9})
    params = [
        SamplingParams(max_tokens=8 + 2 * i, seed=i, **shaped, **way)  # pyright: ignore[reportArgumentType]
        for i, (way, shaped) in enumerate(product(ways, SHAPED))
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    told: list[object] = []
    for on in (True, False):
        results = _llm(fused=on, drafter=drafter, k=k, sampler=sampler).generate(prompts, params)
        told.append((_told(results), [one.logprobs for one in results]))
    assert told[0] == told[1]


def _some(text: Sequence[int]) -> Tensor | None:
    """Every second text has a mask of a third of the vocabulary; after six tokens nothing fits."""
    if sum(text) % 2 == 0 and len(text) < 6:
        return None
    mask_V = torch.zeros(8192, dtype=torch.bool)
    if len(text) != 6:
        mask_V[len(text) % 3 :: 3] = True
    return mask_V


# Rules and drafters are other parts of the call. Other combinations are `deep`.
@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["block", "token", "match", "coupled"])
@pytest.mark.parametrize(
    "config",
    [
        {"drafter": "ngram", "k": 5},
        {"drafter": "medusa", "k": 4, "tree_nodes": 15},
        {"drafter": "model", "k": 3},
        {"drafter": "none"},
    ],
    ids=["chains", "trees", "model", "none"],
)
def test_masks_and_bans_are_those_of_the_stages(
    sampler: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains and trees, beside requests without; the call never asks the stages."""
    ways = ({"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.1, "top_p": 0.9})
    limits: tuple[dict[str, Any], ...] = (
        {},
        {"min_tokens": 7},
        {"bad_words": (" the", "\n", " x = 1")},
    )
    config = {**config, "sampler": sampler}
    params = [
        SamplingParams(max_tokens=8 + 2 * i, seed=i, **limited, **way)  # pyright: ignore[reportArgumentType]
        for i, (way, limited) in enumerate(product(ways, limits))
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    told = [_told(_llm(fused=False, **config).generate(prompts, params, allowed=_some))]
    shipped = Stages._pass  # pyright: ignore[reportPrivateUsage]

    def no_drafts(stages: Stages, batch: Batch, chunks: Chunks, **more: Any) -> list[Outcome]:
        assert not batch or chunks, "a round went stage by stage"
        return shipped(stages, batch, chunks, **more)

    monkeypatch.setattr(Stages, "_pass", no_drafts)
    told.append(_told(_llm(fused=True, **config).generate(prompts, params, allowed=_some)))
    assert told[0] == told[1]


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_before_logits_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts of recycled ranks, for sampled and shaped text, and the call ranks them."""
    params = [
        SamplingParams(max_tokens=20, temperature=at, seed=2, repetition_penalty=penalty)
        for at, penalty in ((0.0, 1.0), (0.7, 1.0), (0.0, 1.4))
    ]
    options: dict[str, Any] = {"drafter": "recycling", "k": 4, "tree_nodes": 9}
    told = [_told(_llm(fused=False, **options).generate(PROMPTS, params))]
    monkeypatch.setattr(Stages, "_pass", None)
    llm = _llm(fused=True, **options, prefill_chunk=512)
    results = llm.generate(PROMPTS, params)
    assert told[0] == _told(results)
    assert any(one.num_drafted for result in results for one in result.rounds)


@pytest.mark.slow
def test_requests_that_only_the_stages_serve_may_share_a_batch() -> None:
    """Reported rounds send their batch through the stages, and bans make drafts a call of their
    own; what the draft model holds is then theirs to go on with, and the other way round."""
    plain = SamplingParams(max_tokens=28, temperature=0.8, seed=5)
    params = [
        plain,
        replace(plain, max_tokens=9, bad_words=("the",)),
        replace(plain, max_tokens=17, round_events=True),
        replace(plain, max_tokens=25, min_tokens=12, presence_penalty=0.5),
        replace(plain, max_tokens=12, prompt_logprobs=1),
    ]
    prompts = [*PROMPTS, LONG, LONG]
    fused, staged = (
        _told(_llm(fused=on, k=3, batch_size=2).generate(prompts, params)) for on in (True, False)
    )
    assert fused == staged


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["band", "slo"])
def test_controllers_and_long_prompts(controller: str) -> None:
    """Prompt chunks ride beside others' rounds; drafts differ in length."""
    params = SamplingParams(max_tokens=28, temperature=0.7, seed=3)
    fused, staged = (
        [
            one.token_ids
            for one in _llm(
                fused=on, controller=controller, k=6, sampler="match", prefill_chunk=16
            ).generate([*PROMPTS, LONG], params)
        ]
        for on in (True, False)
    )
    assert fused == staged


def test_text_may_end_anywhere_in_a_round() -> None:
    for stop in (("\n",), ("return", "for")):
        params = SamplingParams(max_tokens=32, stop=stop)
        fused, staged = (
            _told(_llm(fused=on, k=8).generate(PROMPTS, params)) for on in (True, False)
        )
        assert fused == staged


def test_logits_that_are_no_numbers_are_told_of_as_ever() -> None:
    llm = _llm(fused=True, k=2)
    params = SamplingParams(max_tokens=4, temperature=0.5, seed=0)
    llm.generate(PROMPTS[0], params)
    free = llm.free_tokens
    target = llm._pair.target  # pyright: ignore[reportPrivateUsage]
    assert isinstance(target, LlamaModel)
    norm_D = target._tables.norm_D  # pyright: ignore[reportPrivateUsage]
    kept_D = norm_D.clone()
    norm_D.fill_(float("nan"))
    with pytest.raises(NumericsError):
        llm.generate(PROMPTS[0], params)
    norm_D.copy_(kept_D)
    assert llm.free_tokens == free
    assert llm.generate(PROMPTS[0], params)[0].token_ids


def test_other_kernels_put_in_their_place_are_used() -> None:
    """A profile exchanges a model's kernels for timed ones; rounds then go through them."""
    llm = _llm(fused=True, k=2)
    target = llm._pair.target  # pyright: ignore[reportPrivateUsage]
    shipped, calls = target.kernels, 0

    def counting(*args: object) -> None:
        nonlocal calls
        calls += 1
        shipped.silu_mul(*args)  # pyright: ignore

    params = SamplingParams(max_tokens=8)
    before = llm.generate(PROMPTS[0], params)[0].token_ids
    target.kernels = replace(shipped, silu_mul=counting)
    assert llm.generate(PROMPTS[0], params)[0].token_ids == before
    assert calls > 0


@pytest.mark.parametrize("config", [{"sampler": "threshold"}, {"sampler": "typical"}])
def test_rounds_that_cannot_be_one_call_go_by_stages(config: dict[str, str]) -> None:
    llm = LLM(config=EngineConfig(**config))  # pyright: ignore[reportArgumentType]
    assert isinstance(round_of(llm._engine), Stages)  # pyright: ignore[reportPrivateUsage]
