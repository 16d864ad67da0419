"""An engine over models in memory: token ids in, token ids out, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from outrider.core.config import EngineConfig
from outrider.core.draft import RoundTrace
from outrider.core.errors import CapacityError
from outrider.core.params import SamplingParams
from outrider.kernels.operators import Kernels
from outrider.kernels.registry import choose
from outrider_lab.models.bare_engine import BareEngine, BareModels, bare_rooms
from outrider_lab.models.scripted import Script, ScriptedLM

PARAMS = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return choose(device=torch.device("cpu"), dtype=torch.float32, force_reference=True)


@pytest.fixture
def models(kernels: Kernels) -> Iterator[BareModels]:
    """Both memories must be empty again at the end."""
    target = ScriptedLM(Script(vocab_size=64, seed=3))
    draft = ScriptedLM(Script(vocab_size=64, seed=3, agreement=0.8))
    free = target.state.num_free_tokens
    yield BareModels(
        target=target,
        draft=draft,
        kernels=kernels,
        device=torch.device("cpu"),
        twin=lambda: None,
    )
    assert (target.state.num_free_tokens, draft.state.num_free_tokens) == (free, free)


def written(models: BareModels, config: EngineConfig) -> tuple[list[tuple[int, ...]], int]:
    """Two texts to their end, and in how many rounds."""
    rounds: list[RoundTrace] = []
    with closing(BareEngine(models, config, on_round=rounds.append)) as engine:
        first, second = (engine.submit(prompt, PARAMS) for prompt in ((1, 2, 3), (4, 5)))
        counts = {first: 0, second: 0}
        while sum(counts.values()) < 2 * PARAMS.max_tokens:
            for number, num_tokens in engine.step().items():
                counts[number] += num_tokens
        assert list(engine.texts) == [first, second]
        assert [len(text) for text in engine.texts.values()] == list(counts.values())
        with pytest.raises(CapacityError, match="no request is left"):
            engine.step()
        return list(engine.texts.values()), len(rounds)


def test_texts_are_the_targets_with_and_without_drafts(models: BareModels) -> None:
    plain, num_plain = written(models, EngineConfig(drafter="none", k=0, page_size=4))
    drafted, num_drafted = written(models, EngineConfig(drafter="model", k=4, page_size=4))
    assert drafted == plain
    assert num_drafted < num_plain


def test_what_runs_is_ended_with_the_engine(models: BareModels) -> None:
    config = EngineConfig(drafter="model", k=4, page_size=4, schedule="ssd")
    engine = BareEngine(models, config, on_round=lambda trace: None)
    number = engine.submit((1, 2, 3), SamplingParams(max_tokens=500))
    while not engine.texts[number]:
        engine.step()
    for _ in range(8):
        engine.step()
    assert engine.drafted_ahead[1] > 0
    engine.close()


def test_rooms_hold_what_the_settings_allow() -> None:
    config = EngineConfig(
        k=3, batch_size=2, page_size=8, schedule="ssd", fan_out=5, prefill_chunk=4
    )
    target, draft = bare_rooms(config, 50)
    assert target.num_slots == 2 * 56
    assert (target.max_rows, target.max_logits) == (4 + 8, 8)
    assert draft.max_logits >= 2 * 5
    assert draft.num_slots >= target.num_slots + 2 * (3 + 2 + 3 * 5)
