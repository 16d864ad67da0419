"""A draft model whose table has another padding than the target's: every way of drafting is exact,
and no id beyond the tokenizer's end is drafted, though both models find such ids likely."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from doubles.in_turn import InTurn
from doubles.rig import round_of
from doubles.vocabularies import PADDED_TOKENS, padded_pair
from outrider import LLM
from outrider.api.result import GenerationResult
from outrider.core.config import EXACT_SAMPLERS, EngineConfig
from outrider.core.params import SamplingParams
from outrider.engine.native_round import NativeRound

pytestmark = pytest.mark.slow
PROMPTS = ("def f(x):\n", "Natalia sold clips", "for i in range(10):\n    print(i)\nfor i")
# Rows of target and draft; the tokenizer ends at PADDED_TOKENS.
SIZES = ((330, 310), (300, 330))
NATIVE: dict[str, Any] = {"drafter": "model", "k": 4}
STAGES: dict[str, Any] = {"drafter": "model", "k": 4, "fused_round": False}
WAYS: dict[str, dict[str, Any]] = {
    "rounds": NATIVE,
    "stages": STAGES,
    "reference": {"drafter": "model", "k": 4, "force_reference": True},
    "trees": {"drafter": "model", "k": 3, "tree_nodes": 8},
    "trees of the reference": {"k": 3, "tree_nodes": 8, "force_reference": True},
    "ahead": {"drafter": "model", "k": 3, "schedule": "ssd"},
    "ahead by the reference": {"k": 3, "schedule": "ssd", "force_reference": True},
    "portfolio": {"drafter": "portfolio", "k": 4},
    "auto": {"k": 4},
}
Pair = tuple[Path, Path]


@pytest.fixture(scope="module", params=SIZES, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return padded_pair(tmp_path_factory.mktemp("padded"), *request.param)


def _llm(pair: Pair, **config: Any) -> LLM:
    settings: dict[str, Any] = {"batch_size": 3, "dtype": "float32", "profile": True, **config}
    settings = {"watchdog": "off", **settings}
    draft = None if config.get("drafter") == "none" else pair[1]
    return LLM(pair[0], draft=draft, config=EngineConfig(**settings))


def _run(pair: Pair, params: Sequence[SamplingParams], **config: Any) -> list[GenerationResult]:
    llm = _llm(pair, **config)
    try:
        return llm.generate(list(PROMPTS), list(params))
    finally:
        llm.close()


def _texts(results: Sequence[GenerationResult]) -> list[tuple[int, ...]]:
    return [tuple(result.token_ids) for result in results]


def _sampled(**more: Any) -> list[SamplingParams]:
    """One greedy and two that draw, so that a batch has both."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.7, "top_p": 0.95},
        {"temperature": 0.0},
        {"temperature": 0.5, "top_k": 320, "min_p": 0.001},
    )
    return [
        SamplingParams(max_tokens=20, ignore_eos=True, seed=seed, **{**kind, **more})
        for seed, kind in enumerate(kinds)
    ]


@pytest.mark.sample(3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
def test_greedy_text_is_the_targets_own(pair: Pair, way: str) -> None:
    greedy = [SamplingParams(max_tokens=32, ignore_eos=True)] * len(PROMPTS)
    plain, found = _run(pair, greedy, drafter="none"), _run(pair, greedy, **WAYS[way])
    assert _texts(found) == _texts(plain)
    assert sum(result.stats.num_accepted for result in found) > 0


@pytest.mark.sample(3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("sampler", ["match", "coupled"])
@pytest.mark.parametrize("way", WAYS)
def test_a_seed_has_one_text_under_rules_that_follow_the_target(
    pair: Pair, way: str, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Members lead in turn, whether that pays or not.
    monkeypatch.setattr("outrider.drafters.portfolio.Leads", InTurn)
    params = _sampled()
    plain = _run(pair, params, drafter="none", sampler=sampler)
    found = _run(pair, params, **WAYS[way], sampler=sampler)
    assert _texts(found) == _texts(plain)
    assert sum(result.stats.num_accepted for result in found) > 0


@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("sampler", EXACT_SAMPLERS)
def test_native_rounds_decide_as_the_stages_do(pair: Pair, sampler: str) -> None:
    """With bias and penalties on ids that the draft model lacks, too."""
    shaped = _sampled(
        logit_bias={token: 2.0 for token in (5, 305, 329) if token < _rows(pair[0])},
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.1,
    )
    for params in (_sampled(), shaped):
        found, wanted = (_run(pair, params, sampler=sampler, **way) for way in (NATIVE, STAGES))
        assert _texts(found) == _texts(wanted)
        assert [[r.num_drafted for r in one.rounds] for one in found] == [
            [r.num_drafted for r in one.rounds] for one in wanted
        ]


def _rows(folder: Path) -> int:
    llm = LLM(folder, config=EngineConfig(drafter="none"))
    try:
        return llm.spec.vocab_size
    finally:
        llm.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["rounds", "trees", "reference"])
def test_no_id_beyond_the_tokenizers_end_is_drafted(pair: Pair, way: str) -> None:
    """The target writes some itself where it has them, and drafting goes on behind them."""
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=i, temperature=0.8, round_events=True)
        for i in range(len(PROMPTS))
    ]
    found = _run(pair, params, **WAYS[way])
    events = [event for result in found for event in result.round_events]
    drafted = [node.token_id for event in events for node in event.nodes[:-1]]
    assert drafted
    assert max(drafted) < PADDED_TOKENS
    written = [token for text in _texts(found) for token in text]
    if _rows(pair[0]) > PADDED_TOKENS:
        assert max(written) >= PADDED_TOKENS


def test_rounds_are_native_calls(pair: Pair, native_library: object) -> None:
    del native_library
    llm = _llm(pair, **NATIVE)
    try:
        assert isinstance(round_of(llm._engine), NativeRound)  # pyright: ignore[reportPrivateUsage]
    finally:
        llm.close()


@pytest.mark.sample(1)
@pytest.mark.wide
@pytest.mark.parametrize("schedule", ["single", "ssd"])
def test_the_same_holds_in_a_process(pair: Pair, schedule: str) -> None:
    params = _sampled()
    plain = _run(pair, params, drafter="none", sampler="match")
    way = {"drafter": "model", "k": 3, "drafter_home": "process", "schedule": schedule}
    found = _run(pair, params, sampler="match", **way)
    assert _texts(found) == _texts(plain)
    assert sum(result.stats.num_accepted for result in found) > 0
