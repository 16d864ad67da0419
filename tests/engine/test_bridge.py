"""Pairs without a common vocabulary, whole: the text stays, and a good draft is still accepted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from checks.engine_distribution import FILTERS, VOCAB, check_hybrid_engine_distribution
from doubles.rig import SAMPLER
from doubles.toy_hybrid import ToyHybrid
from doubles.vocabularies import (
    Digits,
    Renaming,
    byte_level,
    random_checkpoint,
    relabelled,
    sentence_pieces,
)
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.result import GenerationResult
from outrider.core.errors import ConfigError, VocabularyError
from outrider.drafters.bridge import BridgeDrafter
from outrider.drafters.common.context import Translator
from outrider.models.loading import resolve
from outrider.verify.rules import EXACT, rule_for
from outrider_lab.bench.workload import load_prompts

PARAMS = SamplingParams(max_tokens=24)


def prompts() -> list[str]:
    return [*load_prompts("humaneval")[:2], *load_prompts("gsm8k")[:2]]


def run(drafter: str, draft: Path | None = None, *, batch_size: int = 8) -> list[GenerationResult]:
    config = EngineConfig(drafter=drafter, dtype="float32", batch_size=batch_size)
    return LLM(draft=draft, config=config).generate(prompts(), PARAMS)


@cache
def texts() -> list[tuple[int, ...]]:
    return [result.token_ids for result in run("none")]


def counts(results: list[GenerationResult]) -> list[tuple[int, int, int]]:
    stats = (result.stats for result in results)
    return [(s.num_rounds, s.num_drafted, s.num_accepted) for s in stats]


@pytest.mark.weights
@pytest.mark.slow
def test_other_ids_for_the_same_tokens_cost_nothing(tmp_path: Path) -> None:
    """The embedded draft with its ids shuffled drafts what it drafts without a bridge."""
    plain, same = run("model"), run("bridge")
    shuffled = run("bridge", relabelled(tmp_path / "shuffled"))
    assert [result.token_ids for result in shuffled] == texts()
    assert counts(shuffled) == counts(same) == counts(plain)


@pytest.mark.weights
@pytest.mark.slow
def test_other_tokens_for_the_same_text_cost_little(tmp_path: Path) -> None:
    """A quarter of the merges: the draft model reads and writes finer tokens than the target."""
    finer = run("bridge", relabelled(tmp_path / "finer", num_merges=2000))
    assert [result.token_ids for result in finer] == texts()
    wanted = sum(accepted for _, _, accepted in counts(run("model")))
    assert sum(accepted for _, _, accepted in counts(finer)) > 0.8 * wanted


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("make", [byte_level, sentence_pieces])
def test_a_senseless_draft_changes_nothing(tmp_path: Path, make: Callable[[], Backend]) -> None:
    folder = random_checkpoint(tmp_path / "random", make())
    results = run("bridge", folder, batch_size=3)
    assert [result.token_ids for result in results] == texts()
    assert sum(drafted for _, drafted, _ in counts(results)) > 0


@pytest.mark.weights
@pytest.mark.slow
def test_a_small_arena_ends_drafts_and_not_the_text(tmp_path: Path) -> None:
    """Without merges a text takes several draft ids a token: more than the arena has."""
    folder = relabelled(tmp_path / "bytes", num_merges=0)
    config = EngineConfig(drafter="bridge", dtype="float32", arena_tokens=128, batch_size=1)
    llm = LLM(draft=folder, config=config)
    result = llm.generate("def add(a, b):", SamplingParams(max_tokens=90, ignore_eos=True))[0]
    assert len(result.token_ids) == 90
    assert 0 < result.stats.num_drafted < result.stats.num_rounds * llm.k
    assert llm.free_tokens == 128


@pytest.mark.sample(4)
@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("translator", [Renaming(VOCAB, shift=1), Digits(VOCAB, base=2)])
def test_the_distribution_stays_the_targets(rule: str, translator: Translator) -> None:
    model = ToyHybrid(vocab_size=VOCAB, seed=7)
    drafter = BridgeDrafter(model, SAMPLER, translator, chunk=2, page_size=1)
    for params in FILTERS[:2]:
        check_hybrid_engine_distribution(rule_for(rule), drafter, params)


def test_the_errors_say_which_drafter_wants_what(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'bridge' needs a draft model"):
        LLM(resolve("outrider/embedded"), config=EngineConfig(drafter="bridge"))
    folder = random_checkpoint(tmp_path / "other", byte_level(vocab_size=300))
    with pytest.raises(VocabularyError) as caught:
        LLM(draft=folder, config=EngineConfig(drafter="model"))
    assert "--drafter bridge" in str(caught.value.hint)
